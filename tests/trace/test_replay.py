"""A recorded request, run again alone with a tracer, is the request that was served."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_forge import prompt, tiny_llama

from seethrough import LLM, SamplingParams
from seethrough.engine.record_store import RecordStore
from seethrough.engine.recorder import Recorded
from seethrough.errors import ParameterError, RecordError, TraceError

Opened = Callable[..., LLM]
TEXT = "the quick brown fox jumps over the lazy dog"
DRAWN = {"temperature": 1.2, "top_k": 30, "top_p": 0.95, "seed": 11, "max_tokens": 8}
# Some begin alike for more than a block.
TEXTS = [TEXT * 3, TEXT * 3 + " sleeps", TEXT * 2 + " and the floor", "dog", "the lazy dog " * 7]


def some_params(dice: random.Random) -> SamplingParams:
    """Anything that a request may ask."""
    asked: dict[str, Any] = {
        "temperature": dice.choice([0, 0.7, 1.3]),
        "top_k": dice.choice([0, 20]),
        "top_p": dice.choice([1, 0.9]),
        "min_p": dice.choice([0, 0.02]),
        "typical_p": dice.choice([1, 0.9]),
        "repetition_penalty": dice.choice([1, 1.2]),
        "frequency_penalty": dice.choice([0, 0.5]),
        "max_tokens": dice.randrange(0, 40),
        "n": dice.choice([1, 1, 2]),
        "logprobs": dice.choice([None, 2]),
        "prompt_logprobs": dice.choice([None, None, 1]),
        "stop": dice.choice([None, ["e"]]),
    }
    return SamplingParams.from_dict(asked)  # without a seed: the one that was drawn is recorded


def test_a_hundred_requests_recorded_under_load_replay_identical(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Batched, chunked, preempted, found in the prefix cache, some ended by their callers."""
    folder = tiny_llama(tmp_path_factory.mktemp("served"))
    served = LLM(
        folder,
        max_model_len=96,
        num_kv_blocks=14,
        max_num_batched_tokens=24,
        threads=2,
        record=tmp_path,
    )
    dice = random.Random(7)
    streams = [served.stream(dice.choice(TEXTS), some_params(dice)) for _ in range(100)]
    for number, stream in enumerate(streams):
        if number % 9 == 5:
            next(stream, None)
            stream.close()
    for stream in streams:
        list(stream)
    counted = served.state.counted
    assert counted.preemptions > 0
    assert counted.cached_tokens > 0
    served.recorder.flush()
    store = RecordStore(tmp_path, read_only=True)
    recorded = list(store.newest(200))
    assert len(recorded) == 100
    fresh = LLM(folder, max_model_len=96, threads=1)
    reasons = set()
    for record in recorded:
        for sample in record.samples:
            replay = fresh.replay(record, sample=sample.number, stages=[])
            assert replay.identical, (record.request_id, sample.number)
            assert replay.changed_parts == []
            reasons.add(sample.finish_reason)
    assert reasons == {"stop", "length", "abort"}


def test_the_default_model_replays(default_model: str, tmp_path: Path) -> None:
    served = LLM(default_model, max_model_len=256, record=tmp_path)
    texts = ["Neural Bits Newsletter is", "The capital of France is", "Once upon a time"]
    outputs = served.generate(texts, temperature=0.9, top_p=0.9, max_tokens=12)
    for output in outputs:
        replay = served.replay(output.request_id, stages=["S9"])
        assert replay.identical
        assert replay.output.text == output.outputs[0].text


@pytest.mark.parametrize("stage", ["S4", "S6.4", "S6.8", "S9", "S12"])
def test_what_a_replay_shows_is_what_a_trace_shows(llm: LLM, stage: str) -> None:
    served = llm.generate(TEXT, **DRAWN)[0]
    replay = llm.replay(served.request_id, stages=[stage])
    trace = llm.trace(TEXT, stages=[stage], **DRAWN)
    assert replay.trace.keys() == trace.keys() != []
    for key in trace.keys():  # noqa: SIM118 - a method, not a mapping's
        assert np.array_equal(
            replay.trace.array(key[0], key[1], layer=key[2]),
            trace.array(key[0], key[1], layer=key[2]),
            equal_nan=True,
        )


def test_a_sample_is_replayed_by_its_index(llm: LLM) -> None:
    served = llm.generate(TEXT, n=3, **DRAWN)[0]
    for sample in served.outputs:
        replay = llm.replay("last", sample=sample.index, stages=[])
        assert replay.identical
        assert replay.output.token_ids == sample.token_ids
        assert replay.output.index == sample.index
    with pytest.raises(RecordError, match="no sample 3; it has 0, 1, 2"):
        llm.replay("last", sample=3)


def test_a_request_that_its_caller_ended(llm: LLM) -> None:
    with llm.stream(TEXT, min_tokens=5, **DRAWN) as stream:
        first = [next(stream), next(stream)]
    replay = llm.replay("last", stages=["S9"])
    assert replay.identical
    assert replay.output.token_ids == [i for piece in first for i in piece.token_ids]
    # What if it had not: the whole answer.
    whole = llm.replay("last", stages=[], ignore_eos=True)
    assert len(whole.output.token_ids) == DRAWN["max_tokens"]


def test_a_request_that_was_ended_before_its_first_token(open_kind: Opened) -> None:
    llm = open_kind("llama", max_num_batched_tokens=4)
    stream = llm.stream(TEXT, **DRAWN)
    llm.jobs.step()
    stream.close()
    assert stream.output().outputs[0].token_ids == []
    replay = llm.replay("last", stages=["S4"])
    assert replay.identical
    assert replay.trace.array("S4").shape[0] == len(replay.trace.prompt_token_ids)


def test_a_difference_is_found_where_it_is(llm: LLM) -> None:
    llm.generate(TEXT, **DRAWN)
    record = llm.recorder.get("last")

    def told(*ids: int, **more: Any) -> Recorded:
        sample = record.samples[0]._replace(token_ids=list(ids), **more)
        return record._replace(samples=(sample,))

    ids = list(record.samples[0].token_ids)
    other = (ids[3] + 1) % 200
    cases = [
        (ids, None, True),
        ([*ids[:3], other, *ids[4:]], 3, False),
        (ids[:5], 5, False),
        ([*ids, 7], len(ids), False),
        ([], 0, False),
    ]
    for changed, index, same in cases:
        replay = llm.replay(told(*changed), stages=[])
        assert (replay.first_difference, replay.identical) == (index, same)
    ended = llm.replay(told(*ids, finish_reason="stop", stop_reason=5), stages=[])
    assert (ended.first_difference, ended.identical) == (None, False)


def test_the_part_of_the_fingerprint_that_changed(llm: LLM) -> None:
    llm.generate("dog", **DRAWN)
    record = llm.recorder.get("last")
    assert record.origin is not None
    was = record.origin.fingerprint
    old = replace(was, model="other", arithmetic={**was.arithmetic, "sources": "old"})
    changed = record._replace(origin=replace(record.origin, fingerprint=old))
    replay = llm.replay(changed, stages=[])
    assert replay.changed_parts == ["model", "sources"]
    assert replay.identical  # what matters are the tokens


def test_another_model_is_not_identical(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = LLM(tiny_llama(tmp_path_factory.mktemp("other"), seed=9), threads=1, max_model_len=128)
    llm.generate(TEXT, temperature=0, max_tokens=8)
    replay = other.replay(llm.recorder.get("last"), stages=[])
    assert not replay.identical
    assert replay.changed_parts == ["model"]
    assert replay.to_dict()["identical"] is False


# ------------------------------------------------------------------------------------ what if


def test_other_parameters(llm: LLM) -> None:
    llm.generate(TEXT, **DRAWN)
    asked = {**DRAWN, "temperature": 0.2, "top_k": 5}
    wanted = llm.trace(TEXT, **asked).output.outputs[0]
    replay = llm.replay("last", stages=[], temperature=0.2, top_k=5)
    assert replay.output.token_ids == wanted.token_ids
    assert replay.trace.output.params.origin["top_k"] == "request"
    assert replay.trace.output.params.seed == 11
    as_object = llm.replay("last", SamplingParams(temperature=0.2, top_k=5), stages=[])
    assert as_object.output == replay.output


def test_another_token(llm: LLM) -> None:
    llm.generate(TEXT, **DRAWN)
    was = list(llm.recorder.get("last").samples[0].token_ids)
    other = next(i for i in range(5, 99) if i not in was)
    replay = llm.replay("last", stages=[], forced={2: other})
    assert replay.output.token_ids[:3] == [*was[:2], other]
    assert replay.first_difference == 2
    same = llm.replay("last", stages=[], forced={2: was[2]})
    assert same.identical


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": -1},
        {"no_such": 1},
        {"max_tokens": 10**6},
        {"forced": {0: 10**6}},
        {"forced": {10**6: 0}},
        {"n": 2},
    ],
)
def test_what_cannot_be(llm: LLM, change: dict[str, Any]) -> None:
    llm.generate("dog", **DRAWN)
    with pytest.raises((ParameterError, ValueError)):
        llm.replay("last", stages=[], **change)


def test_what_a_stranger_recorded_is_checked(llm: LLM) -> None:
    llm.generate("dog", **DRAWN)
    record = llm.recorder.get("last")
    for ids in ([], [10**6], [-1]):
        with pytest.raises(ParameterError, match="prompt_token_ids"):
            llm.replay(record._replace(prompt_ids=ids))
    with pytest.raises(ValueError, match="context"):
        llm.replay(record._replace(max_tokens=2**31 - 1))
    params = replace(record.params, logit_bias={10**6: 1.0})
    with pytest.raises(ParameterError, match="logit_bias"):
        llm.replay(record._replace(params=params))


def test_a_replay_needs_the_engine_alone(llm: LLM) -> None:
    llm.generate("dog", **DRAWN)
    with llm.stream(prompt(5), max_tokens=20) as stream:
        next(stream)
        with pytest.raises(TraceError, match="still open"):
            llm.replay("last")


def test_what_was_never_recorded(llm: LLM) -> None:
    with pytest.raises(RecordError, match="'req-none'"):
        llm.replay("req-none")
