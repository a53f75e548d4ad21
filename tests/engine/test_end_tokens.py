"""What ends an answer: end tokens from every source, stop ids, min_tokens; and what is counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_forge import Rig, prompt, streamed

from seethrough import LLM
from seethrough.errors import CheckpointError, ParameterError

GREEDY = {"temperature": 0}
START = prompt(ord(">"))
Says = Callable[..., LLM]
# Byte tokens that serve as end tokens of the config and of generation_config.
A, B, C = ord("A"), ord("B"), ord("C")


@pytest.fixture
def ended(rig: Rig, says: Says) -> Callable[..., Any]:
    """What a model with these end tokens answers when it says `parts`."""

    def answer(
        *parts: str | int, config: Any = None, generation: Any = None, **sampling: Any
    ) -> Any:
        llm = says(
            *parts,
            config={} if config is None else {"eos_token_id": config},
            generation=None if generation is None else {"eos_token_id": generation},
        )
        whole = llm.generate(START, **GREEDY, **sampling)[0].outputs[0]
        joined, ids, output = streamed(llm, START, **GREEDY, **sampling)
        assert (joined, ids, output) == (whole.text, whole.token_ids, whole)
        return whole

    return answer


@pytest.mark.parametrize(
    ("config", "generation", "end"),
    [
        (None, None, "<|end|>"),  # the tokenizer alone
        (A, None, "<|end|>"),  # config names another: the tokenizer's still counts
        (A, None, A),
        ([A, B], None, A),
        ([A, B], None, B),  # vllm-project/vllm#4180: the second of a list
        (None, [A, C], C),
        (A, B, A),  # vllm-project/vllm#45591: no source replaces another
        (A, B, B),
        (A, [B, C], C),
        (A, [B, C], "<|end|>"),  # Blaizzy/mlx-vlm#2112
    ],
)
def test_every_source_of_end_tokens_counts(
    rig: Rig, ended: Callable[..., Any], config: Any, generation: Any, end: str | int
) -> None:
    (token,) = rig.ids(end)
    output = ended("ok", end, "more", config=config, generation=generation)
    assert output.text == "ok"
    assert output.token_ids == [*b"ok", token]
    assert (output.finish_reason, output.stop_reason) == ("stop", token)


def test_other_tokens_do_not_end_it(ended: Callable[..., Any]) -> None:
    output = ended("AB", "<|eot|>", "C", max_tokens=4)
    assert (output.text, output.finish_reason) == ("ABC", "length")


def test_ignore_eos_covers_all_sources_and_no_stop_id(rig: Rig, ended: Callable[..., Any]) -> None:
    """vllm-project/vllm#4589: the model's end tokens are ordinary, the user's are not."""
    parts = ("a", "<|end|>", "A", "B", "C", "z")
    sources = {"config": A, "generation": [B, C], "ignore_eos": True}
    output = ended(*parts, max_tokens=6, **sources)
    assert (output.text, output.finish_reason) == ("aABCz", "length")
    assert output.token_ids == rig.ids(*parts)
    stopped = ended(*parts, stop_token_ids=[C], **sources)
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("aAB", "stop", C)


def test_overriding_a_parameter_keeps_the_end_tokens(ended: Callable[..., Any]) -> None:
    output = ended("ok", "A", generation=A, top_k=5, stop_token_ids=[B])
    assert (output.text, output.stop_reason) == ("ok", A)


def test_stop_token_ids(ended: Callable[..., Any]) -> None:
    output = ended("onZe", stop_token_ids=[ord("Z"), ord("e")])
    assert (output.text, output.finish_reason, output.stop_reason) == ("on", "stop", ord("Z"))
    assert output.token_ids == [*b"onZ"]
    kept = ended("onZe", stop_token_ids=[ord("Z")], include_stop_str_in_output=True)
    assert kept.text == "onZ"


def test_an_end_token_that_no_logit_can_choose_is_harmless(ended: Callable[..., Any]) -> None:
    output = ended("ok", "<|end|>", config=10**6, min_tokens=1)
    assert (output.text, output.finish_reason) == ("ok", "stop")


@pytest.mark.parametrize("bad", [-1, "2", True, 1.5, [2, None, "x"], {"a": 1}])
def test_broken_end_tokens_in_a_config_are_named(rig: Rig, tmp_path: Path, bad: object) -> None:
    folder = rig.write(tmp_path, "ok", config={"eos_token_id": bad})
    with pytest.raises(CheckpointError, match="eos_token_id"):
        LLM(folder)


# ---------------------------------------------------------------------------------- min_tokens


@pytest.mark.parametrize("least", [0, 1, 2, 3, 4, 6])
def test_stop_strings_wait_for_min_tokens(ended: Callable[..., Any], least: int) -> None:
    """vllm-project/vllm#21987: a stop counts only from `min_tokens` tokens on."""
    said = "a\nb\ncd\n"
    output = ended(said, stop="\n", min_tokens=least, max_tokens=7)
    cut = said.index("\n", max(0, least - 1))
    assert (output.text, output.finish_reason) == (said[:cut], "stop")
    assert len(output.token_ids) == cut + 1 >= least


@pytest.mark.parametrize("least", [1, 2, 3, 4])
def test_end_tokens_cannot_be_chosen_before_min_tokens(
    rig: Rig, ended: Callable[..., Any], least: int
) -> None:
    ends = {rig.id("<|end|>"), A}
    output = ended("<|end|>", "A", "<|end|>", "A", "<|end|>", config=A, min_tokens=least)
    assert len(output.token_ids) == least + 1
    assert not ends & set(output.token_ids[:-1])
    assert output.finish_reason == "stop"


def test_stop_ids_cannot_be_chosen_before_min_tokens(ended: Callable[..., Any]) -> None:
    output = ended("ZZZ", stop_token_ids=[ord("Z")], min_tokens=2)
    assert [i == ord("Z") for i in output.token_ids] == [False, False, True]
    assert output.finish_reason == "stop"


def test_with_ignore_eos_end_tokens_are_free_before_min_tokens(
    rig: Rig, ended: Callable[..., Any]
) -> None:
    output = ended("<|end|>", "a", ignore_eos=True, min_tokens=2, max_tokens=2)
    assert output.token_ids == rig.ids("<|end|>", "a")


@pytest.mark.parametrize("ids", [[10**9], [-1], [2**64], [10**30]])
@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_ids_out_of_range_with_min_tokens_are_refused(llm: LLM, field: str, ids: list[int]) -> None:
    """gonka-ai/gonka#1170: one such request must not take the engine down."""
    with pytest.raises(ParameterError, match=field):
        llm.generate("dog", min_tokens=1, max_tokens=2, **{field: ids})
    assert llm.generate("dog", max_tokens=2)[0].finished


def test_min_tokens_beyond_max_tokens_is_refused(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="min_tokens=5"):
        llm.generate("dog", min_tokens=5, max_tokens=4)
    with pytest.raises(ParameterError, match=r"min_tokens=128.*127 tokens fit"):
        llm.generate(prompt(5), min_tokens=128)


# ---------------------------------------------------------------------------------- the last token


def test_a_stop_on_the_last_allowed_token_is_a_stop(ended: Callable[..., Any]) -> None:
    """The end of the text wins over the end of the room."""
    assert ended("abc", "<|end|>", max_tokens=4).finish_reason == "stop"
    assert ended("abc", "<|end|>", max_tokens=3).finish_reason == "length"
    assert ended("abcd", stop="cd", max_tokens=4).finish_reason == "stop"
    assert ended("abcd", stop="cd", max_tokens=3).finish_reason == "length"
    assert ended("abcd", stop_token_ids=[ord("d")], max_tokens=4).stop_reason == ord("d")
    assert ended("abc", "<|end|>", max_tokens=3, stop="cx").text == "abc"


@pytest.mark.parametrize(
    ("end", "more"),
    [
        ("<|end|>", {}),
        ("ZZ", {"stop": "ZZ"}),
        ("Z", {"stop": ["no", "Z"]}),
        ("Z", {"stop_token_ids": [ord("Z")]}),
        ("A", {"config": A}),
    ],
)
def test_how_it_ended_for_every_limit(
    rig: Rig, ended: Callable[..., Any], end: str, more: dict[str, Any]
) -> None:
    """vllm-project/vllm#53269, llama.cpp PR#7198: the end that was reached, streamed or not."""
    whole = len(rig.ids("call(1)", end))
    for most in range(1, whole + 3):
        output = ended("call(1)", end, "and more", max_tokens=most, **more)
        reached = most >= whole
        assert output.finish_reason == ("stop" if reached else "length"), most
        assert (output.stop_reason is not None) == reached
        assert len(output.token_ids) == min(most, whole)
        # What was cut in the middle of a stop string is text that was said.
        assert output.text == ("call(1)" if reached else ("call(1)" + end)[:most])


@pytest.mark.parametrize("most", [1, 5, 20])
def test_counts_are_the_sampled_ids(says: Says, most: int) -> None:
    """lmstudio-ai/lmstudio-bug-tracker#2335: nothing is counted from text."""
    llm = says("😀" * 5)
    output = llm.generate(prompt(1, 2), max_tokens=most, n=2, seed=1, temperature=0)[0]
    assert [len(sample.token_ids) for sample in output.outputs] == [most, most]
    assert output.metrics.completion_tokens == 2 * most
    assert output.metrics.prompt_tokens == 2
    stream = llm.stream(prompt(1, 2), max_tokens=most, n=2, seed=1, temperature=0)
    assert sum(len(piece.token_ids) for piece in stream) == 2 * most
    assert stream.output().metrics.completion_tokens == 2 * most


def test_an_end_token_is_counted_and_has_no_text(says: Says) -> None:
    output = says("ok", "<|end|>").generate(START, temperature=0, logprobs=0)[0]
    assert output.metrics.completion_tokens == 3
    assert len(output.outputs[0].logprobs or []) == 3


def test_times_are_there_and_make_sense(llm: LLM) -> None:
    metrics = llm.generate("the dog", max_tokens=5)[0].metrics
    assert metrics.ttft_ms is not None
    assert metrics.tpot_ms is not None
    assert 0 < metrics.ttft_ms < 60_000
    assert 0 < metrics.tpot_ms < 60_000
    single = llm.generate("the dog", max_tokens=1)[0].metrics
    assert single.ttft_ms is not None
    assert single.tpot_ms is None
    none = llm.generate("the dog", max_tokens=0)[0].metrics
    assert (none.ttft_ms, none.tpot_ms, none.completion_tokens) == (None, None, 0)
