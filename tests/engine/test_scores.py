"""Log-probabilities, penalties and odd ids, from the front door to transformers' own numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_forge import Models, Rig, oracle_logits, oracle_logprobs, prompt, tiny_llama

from seethrough import LLM
from seethrough.engine.outputs import to_json
from seethrough.errors import ParameterError

Says = Callable[..., LLM]
TEXT = "the quick brown fox jumps over the lazy dog"

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.5, "seed": 1},
    {"temperature": 1, "top_p": 0.1, "seed": 2},
    {"temperature": 2, "top_k": 3, "repetition_penalty": 1.3, "seed": 3},
    {"temperature": 1, "frequency_penalty": 1.5, "logit_bias": {7: 50.0}, "seed": 4},
    {"temperature": 1, "allowed_token_ids": [3, 5, 8], "min_p": 0.2, "seed": 5},
]


@pytest.mark.parametrize("sampling", SETTINGS)
def test_raw_logprobs_are_the_oracles_whatever_the_sampling(
    llm: LLM, llama_dir: Path, sampling: dict[str, Any]
) -> None:
    """vllm-project/vllm#9453, EricLBuehler/mistral.rs#2329: log-softmax of the model's logits."""
    output = llm.generate(TEXT, max_tokens=5, logprobs=20, **sampling)[0]
    sample = output.outputs[0]
    ids = output.prompt_token_ids + sample.token_ids
    wanted = oracle_logprobs(llama_dir, ids[:-1])[-len(sample.token_ids) :]
    for row, token, entry in zip(wanted, sample.token_ids, sample.logprobs, strict=True):
        best = set(np.argsort(-row, kind="stable")[:20].tolist())
        assert set(entry) == best | {token}
        for i, scored in entry.items():
            assert scored.logprob == pytest.approx(row[i], abs=1e-4)
            assert scored.logprob <= 0
            assert scored.rank == 1 + np.count_nonzero(row > row[i])
    total = sum(e[t].logprob for e, t in zip(sample.logprobs, sample.token_ids, strict=True))
    assert sample.cumulative_logprob == pytest.approx(total)


def test_no_logprobs_unless_asked_for(llm: LLM) -> None:
    sample = llm.generate(TEXT, max_tokens=2)[0]
    assert sample.prompt_logprobs is None
    assert sample.outputs[0].logprobs is None
    assert sample.outputs[0].cumulative_logprob is None
    only = llm.generate(TEXT, max_tokens=2, logprobs=0)[0].outputs[0]
    assert [list(entry) for entry in only.logprobs] == [[i] for i in only.token_ids]


def test_views_of_the_scores(llm: LLM, llama_dir: Path) -> None:
    sampling = {"temperature": 0.5, "top_k": 10, "seed": 1, "max_tokens": 1, "logprobs": 20}
    views = {
        mode: llm.generate(TEXT, logprobs_mode=mode, **sampling)[0].outputs[0].logprobs[0]
        for mode in ("raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs")
    }
    logits = oracle_logits(llama_dir, llm.tokenizer.encode(TEXT))[-1].astype(np.float64)
    for i, scored in views["raw_logits"].items():
        assert scored.logprob == pytest.approx(logits[i], abs=1e-4)
    kept = views["processed_logprobs"]
    assert len(kept) == len(views["processed_logits"]) == 10
    assert sum(np.exp(p.logprob) for p in kept.values()) == pytest.approx(1)
    best = np.argsort(-logits)[:10]
    scaled = logits[best] / 0.5
    wanted = scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
    for i, value in zip(best, wanted, strict=True):
        assert kept[int(i)].logprob == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("budget", [1, 7, 16, 512])
def test_prompt_logprobs_are_the_oracles_also_in_chunks(
    models: Models, llama_dir: Path, budget: int
) -> None:
    llm = models(llama_dir, max_model_len=128, max_num_batched_tokens=budget)
    outputs = llm.generate([TEXT, "dog", TEXT], prompt_logprobs=3, max_tokens=2, n=2, seed=1)
    for output in outputs:
        ids = output.prompt_token_ids
        rows = oracle_logprobs(llama_dir, ids)
        scores = output.prompt_logprobs
        assert len(scores) == len(ids)
        assert scores[0] is None
        for row, token, entry in zip(rows, ids[1:], scores[1:], strict=False):
            assert set(entry) == set(np.argsort(-row, kind="stable")[:3].tolist()) | {token}
            for i, scored in entry.items():
                assert scored.logprob == pytest.approx(row[i], abs=1e-4)
                assert scored.rank == 1 + np.count_nonzero(row > row[i])


def test_prompt_logprobs_of_one_token(llm: LLM) -> None:
    output = llm.generate(prompt(5), prompt_logprobs=0, max_tokens=1)[0]
    assert output.prompt_logprobs == [None]


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("count", [-1, 21, 10**6, 2**63, True, 1.0, "3"])
def test_how_many_logprobs_is_bounded(llm: LLM, field: str, count: object) -> None:
    """sgl-project/sglang#40076, local-inference-lab/vllm#264."""
    with pytest.raises(ParameterError, match=field):
        llm.generate(TEXT, max_tokens=1, **{field: count})


def test_more_logprobs_than_candidates(says: Says) -> None:
    entry = says("a").generate(
        prompt(1),
        max_tokens=1,
        logprobs=20,
        allowed_token_ids=[3, 4],
        logprobs_mode="processed_logprobs",
    )
    assert set(entry[0].outputs[0].logprobs[0]) == {3, 4}


# ------------------------------------------------------------------------------------ spelling


def test_token_texts_lose_no_byte(rig: Rig, says: Says) -> None:
    """vllm-project/vllm#6626: halves of characters stay apart, and joined they are the text."""
    said = "a😀é"
    llm = says(said, "<|eot|>", "ï¿½")
    sample = llm.generate(prompt(1), temperature=0, max_tokens=9, logprobs=0)[0].outputs[0]
    texts = [e[i].decoded_token for e, i in zip(sample.logprobs, sample.token_ids, strict=True)]
    assert texts[0] == "a"
    assert texts[1:5] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80"]
    assert texts[-2:] == ["<|eot|>", "�"]
    raw = b"".join(
        bytes.fromhex(t.removeprefix("bytes:\\x")) if t.startswith("bytes:") else t.encode()
        for t in texts[:-2]
    )
    assert raw.decode() == said


# ------------------------------------------------------------------------------------ odd ids


def test_an_id_beyond_the_tokenizer_has_no_text_and_goes_on(rig: Rig, says: Says) -> None:
    """vllm-project/vllm#56100: a head wider than the tokenizer."""
    llm = says("abcd", extra_rows=20)
    assert (llm.spec.vocab_size, llm.tokenizer.vocab_size) == (rig.size + 20, rig.size)
    odd = rig.size + 7
    sampling = {"temperature": 0, "max_tokens": 3, "logprobs": 5}
    for n in (1, 2):
        output = llm.generate(prompt(1), logit_bias={odd: 100}, n=n, **sampling)[0]
        for sample in output.outputs:
            assert (sample.text, sample.token_ids) == ("", [odd] * 3)
            assert sample.logprobs[0][odd].decoded_token == ""
            assert sample.finish_reason == "length"
    pieces = list(llm.stream(prompt(1), logit_bias={odd: 100}, **sampling))
    assert [piece.token_ids for piece in pieces] == [[odd]] * 3
    trace = llm.trace(prompt(1, odd), logit_bias={odd: 100}, temperature=0, max_tokens=1)
    assert trace.tokens[1:] == [f"<id:{odd}>"] * 2
    stopped = llm.generate(
        prompt(1), logit_bias={odd: 100}, stop_token_ids=[odd], temperature=0, max_tokens=3
    )
    assert stopped[0].outputs[0].stop_reason == odd


def test_the_widest_id_of_a_prompt(rig: Rig, says: Says) -> None:
    """vllm-project/vllm#9634: one rule for ids, the rows of the table."""
    llm = says("abcd", extra_rows=20)
    top = rig.size + 19
    output = llm.generate(prompt(1, top), temperature=0, max_tokens=2, prompt_logprobs=0)[0]
    assert output.outputs[0].text == "bc"
    assert output.prompt_logprobs[1][top].decoded_token == ""
    for bad in (top + 1, -1, 10**18, 5279552648203111001):
        with pytest.raises(ParameterError, match=rf"{bad}.*0 to {top}"):
            llm.generate([prompt(1), prompt(0, bad)])
    assert llm.generate(prompt(1), temperature=0, max_tokens=4)[0].outputs[0].text == "abcd"


@pytest.mark.parametrize("field", ["logit_bias", "bad_words_ids"])
def test_parameters_cannot_name_ids_outside_the_head(llm: LLM, field: str) -> None:
    top = llm.spec.vocab_size
    value = {top: 1.0} if field == "logit_bias" else [[1, top]]
    with pytest.raises(ParameterError, match=f"{field}.*{top}"):
        llm.generate("dog", max_tokens=1, **{field: value})


# ------------------------------------------------------------------------------------ penalties


def greedy_by_hand(
    folder: Path, ids: list[int], steps: int, *, rep: float, pres: float, freq: float
) -> list[int]:
    """The penalties as their papers and the OpenAI API say them, on transformers' logits."""
    output: list[int] = []
    for _ in range(steps):
        row = oracle_logits(folder, ids + output)[-1].copy()
        for i in set(ids + output):  # arXiv:1909.05858; negative scores are multiplied
            row[i] = row[i] / rep if row[i] > 0 else row[i] * rep
        for i in set(output):
            row[i] -= pres + freq * output.count(i)
        output.append(int(row.argmax()))
    return output


@pytest.mark.parametrize(
    ("rep", "pres", "freq"),
    [(1.3, 0, 0), (0.7, 0, 0), (1, 2, 0), (1, -2, 0), (1, 0, 2), (1, 0, -2), (1.2, 0.5, 0.5)],
)
@pytest.mark.parametrize("budget", [3, 512])
def test_penalties_end_to_end(
    models: Models, llama_dir: Path, rep: float, pres: float, freq: float, budget: int
) -> None:
    """vllm-project/vllm-metal#69: repetition sees prompt and output, the others output only."""
    llm = models(llama_dir, max_model_len=128, max_num_batched_tokens=budget)
    ids = [40, 40, 41, 254, 20, 49]
    output = llm.generate(
        [prompt(*ids), prompt(7)],
        temperature=0,
        max_tokens=8,
        ignore_eos=True,
        repetition_penalty=rep,
        presence_penalty=pres,
        frequency_penalty=freq,
    )[0]
    wanted = greedy_by_hand(llama_dir, ids, 8, rep=rep, pres=pres, freq=freq)
    assert output.outputs[0].token_ids == wanted


def test_each_penalty_changes_the_answer_of_a_model_that_repeats(says: Says) -> None:
    llm = says("aaaa", sharpness=0.5)
    sampling = {"temperature": 0, "max_tokens": 4}
    assert llm.generate(prompt(97), **sampling)[0].outputs[0].text == "aaaa"
    for penalty in ({"presence_penalty": 1}, {"frequency_penalty": 0.3}):
        ids = llm.generate(prompt(97), **sampling, **penalty)[0].outputs[0].token_ids
        assert ids[0] == 97  # the prompt's own token is not punished
        assert set(ids[1:]) != {97}


# ------------------------------------------------------------------------------------ a wide head


def test_a_wide_head_against_the_oracle(models: Models, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, vocab_size=330, seed=4)
    llm = models(folder, max_model_len=64)
    output = llm.generate(TEXT, temperature=0, max_tokens=6, logprobs=20, ignore_eos=True)[0]
    ids = output.prompt_token_ids
    for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
        row = oracle_logprobs(folder, ids)[-1]
        assert token == row.argmax()
        assert all(abs(scored.logprob - row[i]) < 1e-4 for i, scored in entry.items())
        ids = [*ids, token]


# ------------------------------------------------------------------------------------ as JSON


def test_outputs_as_json(llm: LLM) -> None:
    (one,) = llm.generate("the dog", max_tokens=2, logprobs=2, prompt_logprobs=1, seed=2**64 - 1)
    body = json.loads(json.dumps(to_json(one, 12.5), allow_nan=False))
    assert body["token_ids"] == one.outputs[0].token_ids
    assert body["prompt_token_ids"] == one.prompt_token_ids
    assert body["params"]["seed"] == 2**64 - 1
    assert body["params"]["origin"]["seed"] == "request"
    assert body["metrics"]["load_ms"] == 12.5
    assert body["metrics"]["completion_tokens"] == 2
    assert body["prompt_logprobs"][0] is None
    for entry in (*body["prompt_logprobs"][1:], *body["logprobs"]):
        assert [scored["rank"] for scored in entry] == sorted(s["rank"] for s in entry)
    two = to_json(llm.generate("the dog", max_tokens=2, n=2)[0], 0.0)
    assert [choice["index"] for choice in two["choices"]] == [0, 1]
    assert "text" not in two
    assert "prompt_logprobs" not in two


def test_errors_as_json(says: Says) -> None:
    (output,) = says("ab", nan_at=1).generate(prompt(1), temperature=0, logprobs=1)
    body = json.loads(json.dumps(to_json(output, 0.0), allow_nan=False))
    assert body["finish_reason"] == "error"
    assert "nan" in body["error"]
