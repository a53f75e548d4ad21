"""Requests come, go, and are cut short; nothing is left running and no piece is lost.

After every test the fixture `books` checks that all blocks are free and nothing runs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_forge import Models, Rig, prompt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from seethrough import LLM, SamplingParams
from seethrough.engine import engine as engine_module
from seethrough.engine.outputs import Delta
from seethrough.errors import (
    CapacityError,
    ContextLengthError,
    KVIntegrityError,
    NoCandidatesError,
    NonFiniteLogitsError,
    ParameterError,
    SeethroughError,
)
from seethrough.model.compiled import CompiledProgram

Says = Callable[..., LLM]
SAMPLING = {"temperature": 1.1, "seed": 3, "max_tokens": 12}


def ids_of(pieces: list[Delta]) -> list[int]:
    return [i for piece in pieces for i in piece.token_ids]


def all_free(llm: LLM) -> bool:
    llm._engine.check()
    pool = llm._engine.pool
    return pool.free_blocks == pool.num_blocks and not llm._engine.busy


# ------------------------------------------------------------------------------------ streams


def test_interleaved_streams_and_a_generate_in_between(llm: LLM) -> None:
    texts = ["the quick brown fox", "dog", "over the lazy"]
    wanted = [llm.generate(text, **SAMPLING)[0].outputs[0] for text in texts]
    first, second = (llm.stream(text, **SAMPLING) for text in texts[:2])
    pieces: tuple[list[Delta], list[Delta]] = ([next(first)], [next(second), next(second)])
    between = llm.generate(texts[2], **SAMPLING)[0].outputs[0]
    assert between.token_ids == wanted[2].token_ids
    # Both have finished meanwhile; what they said waits for whoever asks.
    pieces[1].extend(second)
    pieces[0].extend(first)
    for own, one, stream in zip(pieces, wanted, (first, second), strict=False):
        assert ids_of(own) == one.token_ids
        assert "".join(piece.text for piece in own) == one.text
        assert stream.output().outputs[0].token_ids == one.token_ids


def test_a_stream_can_be_closed_half_way(llm: LLM) -> None:
    stream = llm.stream("the dog", **SAMPLING)
    taken = [next(stream), next(stream)]
    assert not all_free(llm)
    stream.close()
    stream.close()
    assert all_free(llm)
    output = stream.output().outputs[0]
    assert (output.finish_reason, output.token_ids) == ("abort", ids_of(taken))
    assert stream.output().finished
    assert list(stream) == []


def test_a_with_block_closes_it(llm: LLM) -> None:
    with llm.stream("the dog", **SAMPLING) as stream:
        next(stream)
    assert all_free(llm)

    def fail() -> None:
        with llm.stream("the dog", **SAMPLING) as stream:
            for _ in stream:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all_free(llm)
    with llm.stream("never asked", **SAMPLING):
        pass
    assert all_free(llm)


def test_closing_one_stream_does_not_disturb_another(llm: LLM) -> None:
    wanted = llm.generate("the dog", **SAMPLING)[0].outputs[0].token_ids
    kept, closed = llm.stream("the dog", **SAMPLING), llm.stream("the fox", **SAMPLING)
    pieces = [next(kept)]
    next(closed)
    closed.close()
    assert ids_of([*pieces, *kept]) == wanted


def test_a_stream_that_nobody_holds_ends_by_itself(llm: LLM) -> None:
    for _ in llm.stream("the dog", **SAMPLING):
        break
    gc.collect()
    assert llm.generate("dog", max_tokens=1)[0].finished
    assert all_free(llm)
    try:
        for _ in llm.stream("the dog", **SAMPLING):
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    gc.collect()
    # A trace needs the engine for itself, so it would refuse.
    assert llm.trace("dog", max_tokens=1, stages=["S9"]).output.finished
    assert all_free(llm)


def test_a_closed_stream_of_samples_ends_all_of_them(llm: LLM) -> None:
    stream = llm.stream("the dog", n=5, **SAMPLING)
    next(stream)
    stream.close()
    assert all_free(llm)
    assert {sample.finish_reason for sample in stream.output().outputs} == {"abort"}


def test_a_stream_waiting_for_blocks_can_be_closed(models: Models, llama_dir: Path) -> None:
    small = models(llama_dir, max_model_len=64, num_kv_blocks=4)
    running = small.stream(prompt(*range(40)), max_tokens=20)
    waiting = small.stream(prompt(*range(40)), max_tokens=20)
    next(running)
    assert len(small._engine.scheduler.waiting) == 1
    waiting.close()
    assert waiting.output().outputs[0].token_ids == []
    list(running)
    assert all_free(small)


def test_text_held_for_a_stop_is_in_the_output_after_an_abort(says: Says) -> None:
    stream = says("abHel").stream(prompt(1), stop="Hello", temperature=0)
    for _ in range(5):
        next(stream)
    stream.close()
    assert stream.output().outputs[0].text == "abHel"


# ------------------------------------------------------------------------------------ at the door


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (prompt(*range(128)), ContextLengthError),
        (prompt(10**18), ParameterError),
        (prompt(-1), ParameterError),
        ({"prompt_token_ids": "abc"}, ParameterError),
        ({"prompt_token_ids": [1.0]}, ParameterError),
        ({"prompt_token_ids": [True]}, ParameterError),
        ({"prompt_token_ids": 7}, ParameterError),
        ({"prompt": 5}, ParameterError),
        ({"prompt": {"prompt": "x"}}, ParameterError),
        ({"prompt": 5, "prompt_token_ids": [1]}, ParameterError),
        ({"text": "x"}, ParameterError),
        ("", ParameterError),
        ("\ud800", SeethroughError),
        (5, ParameterError),
        (None, ParameterError),
    ],
)
def test_a_bad_prompt_among_good_ones_leaves_nothing_running(
    llm: LLM, bad: Any, error: type[Exception]
) -> None:
    steps = llm._engine.step
    llm._engine.step = lambda *_: pytest.fail("a step ran")  # type: ignore[method-assign]
    try:
        with pytest.raises(error):
            llm.generate(["dog", "fox", bad], max_tokens=3)
        assert all_free(llm)
        if not isinstance(bad, int | None):
            with pytest.raises(error):
                llm.stream(bad, max_tokens=3)
        assert all_free(llm)
    finally:
        llm._engine.step = steps  # type: ignore[method-assign]


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_an_error_at_any_sample_leaves_nothing_queued(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    add, seen = llm._engine.add, []

    def failing(request: Any) -> None:
        seen.append(request)
        if len(seen) == nth + 4:
            raise CapacityError(9, 1, 16)
        add(request)

    monkeypatch.setattr(llm._engine, "add", failing)
    with pytest.raises(CapacityError):
        llm.generate(["dog", "fox"], n=4, max_tokens=3)
    assert all_free(llm)
    assert not llm.jobs


def test_parameters_are_checked_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="there are 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])
    for wrong in ({"temperature": 0}, ["x"], "x", 5, [None]):
        with pytest.raises(ParameterError, match="params"):
            llm.generate("a", wrong)
    with pytest.raises(ParameterError, match="not both"):
        llm.generate("a", SamplingParams(), temperature=0)
    with pytest.raises(ParameterError, match=r"temprature.*did you mean temperature"):
        llm.generate("a", temprature=0)
    with pytest.raises(ParameterError, match="prompt"):
        llm.generate(iter(["a"]))


# ------------------------------------------------------------------------------------ interrupts


class Stop(KeyboardInterrupt):
    """Ctrl-C, but one that the test run itself would not take for its own."""


def interrupt_call(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, nth: int) -> None:
    """The nth call of `where.name` is interrupted; `run` is the model's."""
    where = CompiledProgram if name == "run" else where
    original, calls = getattr(where, name), 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise Stop
        return original(*args, **kwargs)

    monkeypatch.setattr(where, name, interrupted)


PLACES = pytest.mark.parametrize("place", ["build_batch", "run", "sample"])


@PLACES
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_an_interrupt_frees_everything(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str, nth: int
) -> None:
    with monkeypatch.context() as patch:
        interrupt_call(patch, engine_module, place, nth)
        with pytest.raises(Stop):
            llm.generate(["the dog", "fox", "floor"], **SAMPLING)
    assert all_free(llm)
    with monkeypatch.context() as patch:
        interrupt_call(patch, engine_module, place, nth)
        stream = llm.stream("the dog", **SAMPLING)
        with pytest.raises(Stop):
            list(stream)
    assert all_free(llm)
    assert stream.output().outputs[0].finish_reason == "abort"
    with monkeypatch.context() as patch:
        interrupt_call(patch, engine_module, place, nth)
        with pytest.raises(Stop):
            llm.trace("the dog", **SAMPLING)
    assert all_free(llm)


@PLACES
@pytest.mark.parametrize("nth", range(1, 9))
def test_an_interrupted_mate_costs_a_stream_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str, nth: int
) -> None:
    """Whoever is stepping is ended; the others go on and get every piece."""
    wanted = llm.generate("the lazy dog", **SAMPLING)[0].outputs[0]
    streams = [llm.stream(text, **SAMPLING) for text in ("fox", "the lazy dog", "floor")]
    pieces = [next(streams[1])]
    with monkeypatch.context() as patch:
        interrupt_call(patch, engine_module, place, nth)
        with pytest.raises(Stop):
            list(streams[0])
    pieces += streams[1]
    assert ids_of(pieces) == wanted.token_ids
    assert "".join(piece.text for piece in pieces) == wanted.text
    assert len(ids_of(list(streams[2]))) == 12
    assert all_free(llm)


def test_an_interrupt_right_after_the_last_token(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that steps has just finished; its mate must not meet its freed blocks."""
    stepping = llm.stream("fox", temperature=0, max_tokens=1)
    mate = llm.stream("the lazy dog", temperature=0, max_tokens=3)
    with monkeypatch.context() as patch:
        interrupt_call(patch, engine_module, "sample", 2)
        with pytest.raises(Stop):
            list(stepping)
    assert stepping.output().outputs[0].finish_reason == "length"
    wanted = llm.generate("the lazy dog", temperature=0, max_tokens=3)[0].outputs[0].token_ids
    assert ids_of(list(mate)) == wanted


# ------------------------------------------------------------------------------------ the books


def test_a_block_that_is_lost_is_noticed_when_the_engine_is_idle(llama_dir: Path) -> None:
    """Not at the end of the world, when the pool is empty: with the request that lost it."""
    leaky = LLM(llama_dir, threads=1, max_model_len=64)
    stream = leaky.stream("the dog", temperature=0, max_tokens=4)
    next(stream)
    leaky._engine.pool.allocate(1)
    with pytest.raises(KVIntegrityError, match="nobody can get"):
        list(stream)
    other = LLM(llama_dir, threads=1, max_model_len=64)
    other.rest()
    other._engine.pool.allocate(1)
    with pytest.raises(KVIntegrityError, match="nobody can get"):
        other.rest()


# ------------------------------------------------------------------------------------ errors inside


def test_a_broken_row_ends_its_request_only(rig: Rig, says: Says) -> None:
    """vllm-project/vllm#17364: NaN logits are an error, not token 0 for ever; mates go on."""
    llm = says("all is well", nan_after=ord("N"))
    good, bad = prompt(1), prompt(ord("N"))
    outputs = llm.generate([good, bad, good], temperature=0, max_tokens=11)
    for output in (outputs[0], outputs[2]):
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == (
            "all is well",
            "length",
        )
    broken = outputs[1].outputs[0]
    assert (broken.text, broken.token_ids, broken.finish_reason) == ("", [], "error")
    assert isinstance(broken.error, NonFiniteLogitsError)
    assert "nan" in str(broken.error)
    assert outputs[1].finished


@pytest.mark.parametrize("temperature", [0, 1e-3, 1])
def test_nan_half_way_keeps_what_was_said(says: Says, temperature: float) -> None:
    llm = says("hello world", nan_at=5, sharpness=60)
    stream = llm.stream(prompt(1), temperature=temperature, seed=1, logprobs=1)
    pieces = list(stream)
    output = stream.output().outputs[0]
    assert "".join(piece.text for piece in pieces) == output.text == "hello"
    assert (pieces[-1].finish_reason, pieces[-1].token_ids) == ("error", [])
    assert isinstance(output.error, NonFiniteLogitsError)
    assert len(output.logprobs or []) == 5


def test_nan_in_the_prompts_scores(says: Says) -> None:
    llm = says("hello", nan_at=1)
    output = llm.generate(prompt(1, 2, 3), max_tokens=2, prompt_logprobs=1)[0]
    assert isinstance(output.outputs[0].error, NonFiniteLogitsError)


def test_no_candidate_left_ends_its_request_only(llm: LLM) -> None:
    banned = SamplingParams(allowed_token_ids=[5], bad_words_ids=[[5]], max_tokens=2)
    output, mate = llm.generate(["the dog"] * 2, [banned, SamplingParams(max_tokens=2)])
    assert isinstance(output.outputs[0].error, NoCandidatesError)
    assert output.outputs[0].finish_reason == "error"
    assert mate.outputs[0].finish_reason in ("length", "stop")


def test_one_sample_may_fail_while_its_siblings_go_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = engine_module.sample

    def failing(*args: Any, **kwargs: Any) -> Any:
        if kwargs["sample_index"] == 1 and kwargs["output_index"] == 2:
            raise NonFiniteLogitsError("made up")
        return original(*args, **kwargs)

    monkeypatch.setattr(engine_module, "sample", failing)
    samples = llm.generate("the dog", n=3, **SAMPLING)[0].outputs
    assert [sample.finish_reason for sample in samples] == ["length", "error", "length"]
    assert [len(sample.token_ids) for sample in samples] == [12, 2, 12]


def test_an_error_that_is_no_requests_fault_comes_out(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> np.ndarray:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(CompiledProgram, "run", broken)
        with pytest.raises(RuntimeError, match="a bug"):
            llm.generate(["dog", "fox"], max_tokens=2)
    assert all_free(llm)


# ------------------------------------------------------------------------------------ any order

TEXTS = st.sampled_from(["the quick brown fox jumps", "dog", "q", "the lazy dog " * 2])
LENGTHS = st.integers(0, 9)


class AnyOrder(RuleBasedStateMachine):
    """Streams opened, read, closed and dropped in any order over a pool that is too small."""

    llm: LLM
    wanted: dict[tuple[str, int, int], list[list[int]]]

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[tuple[str, int, int], Iterator[Delta], list[Delta]]] = []

    @precondition(lambda self: len(self.open) < 5)
    @rule(text=TEXTS, most=LENGTHS, n=st.integers(1, 3))
    def open_stream(self, text: str, most: int, n: int) -> None:
        stream = self.llm.stream(text, max_tokens=most, n=n, seed=9)
        self.open.append(((text, most, n), stream, []))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 4), count=st.integers(1, 6))
    def read(self, which: int, count: int) -> None:
        key, stream, pieces = self.open[which % len(self.open)]
        for _ in range(count):
            piece = next(stream, None)
            if piece is None:
                self.open.remove((key, stream, pieces))
                return self.compare(key, pieces)
            pieces.append(piece)
        return None

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 4))
    def close(self, which: int) -> None:
        _, stream, _ = self.open.pop(which % len(self.open))
        stream.close()  # type: ignore[attr-defined]

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 4))
    def drop(self, which: int) -> None:
        self.open.pop(which % len(self.open))

    @rule(text=TEXTS, most=LENGTHS, n=st.integers(1, 2))
    def generate(self, text: str, most: int, n: int) -> None:
        output = self.llm.generate(text, max_tokens=most, n=n, seed=9)[0]
        assert [s.token_ids for s in output.outputs] == self.alone((text, most, n))

    @rule()
    def refuse(self) -> None:
        with pytest.raises(CapacityError):
            self.llm.generate(["dog", prompt(*range(40))], max_tokens=20)

    @invariant()
    def books_add_up(self) -> None:
        self.llm._engine.check()

    def compare(self, key: tuple[str, int, int], pieces: list[Delta]) -> None:
        own = [ids_of([p for p in pieces if p.index == i]) for i in range(key[2])]
        assert own == self.alone(key)

    def alone(self, key: tuple[str, int, int]) -> list[list[int]]:
        return self.wanted[key]

    def teardown(self) -> None:
        for key, stream, pieces in self.open:
            pieces += list(stream)
            self.compare(key, pieces)
        self.open.clear()


def test_any_order(models: Models, llama_dir: Path, llm: LLM) -> None:
    texts = ["the quick brown fox jumps", "dog", "q", "the lazy dog " * 2]
    AnyOrder.llm = models(llama_dir, max_model_len=64, block_size=4, num_kv_blocks=12)
    AnyOrder.wanted = {
        (text, most, n): [
            sample.token_ids
            for sample in llm.generate(text, max_tokens=most, n=n, seed=9)[0].outputs
        ]
        for text in texts
        for most in range(10)
        for n in (1, 2, 3)
    }
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        AnyOrder, settings=settings(deadline=None, max_examples=40, stateful_step_count=15)
    )
