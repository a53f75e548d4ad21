"""A request's answer does not depend on how it is run: alone, batched, chunked, streamed, sampled.

`reference` is compared by ids, text and log-probabilities within 1e-4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_forge import Models, oracle_logprobs, prompt, streamed

from seethrough import LLM, SamplingParams
from seethrough.engine.intake import Intake
from seethrough.engine.outputs import CompletionOutput

PROMPTS = [
    "the quick brown fox jumps over the lazy dog and the other dog sleeps",
    "dog",
    "the floor is " * 3,
    "q",
    "jumps over the lazy",
]
GREEDY = {"temperature": 0, "max_tokens": 10, "logprobs": 2}
DRAWN = {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "seed": 7, "max_tokens": 10, "logprobs": 2}
WAYS = pytest.mark.parametrize("way", [GREEDY, DRAWN], ids=["greedy", "drawn"])


def equal(a: CompletionOutput, b: CompletionOutput) -> None:
    assert a.token_ids == b.token_ids
    assert a.text == b.text
    assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
    assert a.logprobs is not None
    assert b.logprobs is not None
    for left, right in zip(a.logprobs, b.logprobs, strict=True):
        assert left.keys() == right.keys()
        for token in left:
            assert left[token].logprob == pytest.approx(right[token].logprob, abs=1e-4)
            assert left[token].decoded_token == right[token].decoded_token


def alone(llm: LLM, way: dict[str, Any]) -> list[CompletionOutput]:
    return [llm.generate(text, **way)[0].outputs[0] for text in PROMPTS]


def test_greedy_is_the_oracles_argmax(llm: LLM, llama_dir: Path) -> None:
    for output in llm.generate(PROMPTS, **GREEDY):
        ids = output.prompt_token_ids
        for token in output.outputs[0].token_ids:
            assert token == oracle_logprobs(llama_dir, ids)[-1].argmax()
            ids = [*ids, token]


@WAYS
def test_alone_is_batched_in_the_order_of_the_prompts(llm: LLM, way: dict[str, Any]) -> None:
    wanted = alone(llm, way)
    together = llm.generate(PROMPTS, **way)
    assert [output.prompt for output in together] == PROMPTS
    for output, one in zip(together, wanted, strict=True):
        equal(output.outputs[0], one)
    # Another order and other mates.
    mixed = llm.generate([*PROMPTS[::-1], "mate"], **way)
    assert [output.prompt for output in mixed] == [*PROMPTS[::-1], "mate"]
    for output, one in zip(mixed[:-1], wanted[::-1], strict=True):
        equal(output.outputs[0], one)


@WAYS
@pytest.mark.parametrize("budget", [1, 7, 16])
def test_whole_is_chunked(
    llm: LLM, models: Models, llama_dir: Path, way: dict[str, Any], budget: int
) -> None:
    chunked = models(llama_dir, max_model_len=128, max_num_batched_tokens=budget)
    for output, one in zip(chunked.generate(PROMPTS, **way), alone(llm, way), strict=True):
        equal(output.outputs[0], one)


@WAYS
@pytest.mark.parametrize("block_size", [32, 48, 64])
def test_block_size_changes_nothing(
    llm: LLM, models: Models, llama_dir: Path, way: dict[str, Any], block_size: int
) -> None:
    other = models(llama_dir, max_model_len=128, block_size=block_size)
    for output, one in zip(other.generate(PROMPTS, **way), alone(llm, way), strict=True):
        equal(output.outputs[0], one)


@WAYS
def test_whole_is_streamed(llm: LLM, way: dict[str, Any]) -> None:
    for text, one in zip(PROMPTS, alone(llm, way), strict=True):
        joined, ids, output = streamed(llm, text, **way)
        assert joined == one.text
        assert ids == one.token_ids
        equal(output, one)


def test_threads_change_nothing(llm: LLM, llama_dir: Path) -> None:
    two = LLM(llama_dir, max_model_len=128, threads=2)
    assert two.report.threads == 2
    for output, one in zip(two.generate(PROMPTS, **DRAWN), alone(llm, DRAWN), strict=True):
        equal(output.outputs[0], one)


@pytest.mark.parametrize("limits", [{"num_kv_blocks": 6}, {"max_num_seqs": 1}, {"max_num_seqs": 3}])
def test_many_prompts_run_in_waves(
    llm: LLM,
    models: Models,
    llama_dir: Path,
    limits: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = models(llama_dir, max_model_len=96, block_size=16, **limits)
    most: list[int] = []
    step = small._engine.step

    def watched(*given: Any) -> Any:
        for delta in step(*given):
            small._engine.check()
            most.append(len(small._engine.scheduler.running))
            yield delta

    monkeypatch.setattr(small._engine, "step", watched)
    texts = PROMPTS * 4
    outputs = small.generate(texts, **GREEDY)
    assert [output.prompt for output in outputs] == texts
    for output, one in zip(outputs, alone(llm, GREEDY) * 4, strict=True):
        equal(output.outputs[0], one)
    assert 0 < max(most) <= limits.get("max_num_seqs", 6)


def test_samples_differ_by_their_index_only(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], n=4, **DRAWN)
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 4
    # The first samples of a larger n are those of a smaller one.
    fewer = llm.generate(PROMPTS[0], n=2, **DRAWN)[0].outputs
    for some, same in zip(fewer, output.outputs, strict=False):
        equal(some, same)
    equal(llm.generate(PROMPTS[0], **DRAWN)[0].outputs[0], output.outputs[0])


def test_a_sample_alone_with_its_index_is_the_same(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = llm.generate(PROMPTS[0], n=3, **DRAWN)[0].outputs
    make = Intake.job

    def only_third(self: Intake, *given: Any, **more: Any) -> Any:
        return make(self, *given, **(more | {"samples": [2]}))

    monkeypatch.setattr(Intake, "job", only_third)
    third = llm.generate(PROMPTS[0], **DRAWN)[0].outputs[0]
    equal(third, together[2])


def test_samples_are_streamed_each_in_full(llm: LLM) -> None:
    pieces = list(llm.stream(PROMPTS[1], n=3, **DRAWN))
    for sample in llm.generate(PROMPTS[1], n=3, **DRAWN)[0].outputs:
        own = [piece for piece in pieces if piece.index == sample.index]
        assert "".join(piece.text for piece in own) == sample.text
        assert [i for piece in own for i in piece.token_ids] == sample.token_ids
        assert [piece.finish_reason for piece in own if piece.finish_reason] == ["length"]


def test_greedy_samples_are_all_alike(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS[2], n=3, **GREEDY)[0].outputs
    assert len({tuple(sample.token_ids) for sample in outputs}) == 1


def test_mates_with_other_parameters_change_nothing(llm: LLM) -> None:
    """torch-spyre/sendnn-inference#542, vllm-project/vllm-metal#646: mixed rows in one batch."""
    common = {"max_tokens": 8, "logprobs": 1}
    each = [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=1, top_k=-1, seed=1, **common),
        SamplingParams(temperature=1, top_k=0, seed=1, **common),
        SamplingParams(temperature=1, top_k=1, seed=1, **common),
        SamplingParams(temperature=1, top_k=10**7, seed=1, **common),
        SamplingParams(temperature=0.5, top_p=0.5, min_p=0.01, seed=2, **common),
        SamplingParams(temperature=2, typical_p=0.7, repetition_penalty=1.5, seed=3, **common),
        SamplingParams(temperature=0, presence_penalty=2, frequency_penalty=2, n=2, **common),
    ]
    together = llm.generate([PROMPTS[0]] * len(each), each)
    for output, params in zip(together, each, strict=True):
        one = llm.generate(PROMPTS[0], params)[0]
        for sample, same in zip(output.outputs, one.outputs, strict=True):
            equal(sample, same)
    off, zero, first, all_kept = (output.outputs[0].token_ids for output in together[1:5])
    assert off == zero == all_kept
    assert first == together[0].outputs[0].token_ids


def test_cold_temperatures_are_greedy(llm: LLM) -> None:
    """vllm-project/vllm#3063: llama_dir temperatures must be sharp, not broken."""
    greedy = llm.generate(PROMPTS, temperature=0, max_tokens=8)
    for temperature in (1e-3, 1e-4, 1e-5, 1e-6, 1e-30, 1e-300):
        cold = llm.generate(PROMPTS, temperature=temperature, seed=5, max_tokens=8)
        for a, b in zip(cold, greedy, strict=True):
            assert a.outputs[0].token_ids == b.outputs[0].token_ids, temperature


def test_half_a_cache_changes_scores_but_little(llm: LLM, models: Models, llama_dir: Path) -> None:
    half = models(llama_dir, max_model_len=128, kv_cache_dtype="f16")
    assert (llm.report.kv_dtype, half.report.kv_dtype) == ("f32", "f16")
    assert half._engine.pool.k.dtype == "float16"
    ids = prompt(*llm.tokenizer.encode(PROMPTS[0]))
    scored = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    full, rounded = (model.generate(ids, **scored)[0] for model in (llm, half))
    gaps = [
        abs(a[token].logprob - b[token].logprob)
        for a, b in zip(full.prompt_logprobs[1:], rounded.prompt_logprobs[1:], strict=True)
        for token in a.keys() & b.keys()
    ]
    assert 0 < max(gaps) < 0.05


def test_ids_are_used_exactly_as_given(llm: LLM) -> None:
    """tenstorrent/tt-metal#48444: no BOS is added to ids, none is taken away."""
    for ids in ([5, 6, 7], [llm.tokenizer.eos_token_id] * 2, [0]):
        output = llm.generate(prompt(*ids), temperature=0, max_tokens=2)[0]
        assert output.prompt_token_ids == ids
        assert output.metrics.prompt_tokens == len(ids)
        assert output.prompt is None
    named = llm.generate({"prompt": "shown", "prompt_token_ids": [5]}, max_tokens=1)[0]
    assert (named.prompt, named.prompt_token_ids) == ("shown", [5])
