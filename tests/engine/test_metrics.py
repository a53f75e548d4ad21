"""What the engine says of itself: counters that add up, times in their order, progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_forge import Models, Rig, prompt

from seethrough import LLM, SamplingParams
from seethrough.engine.outputs import RequestOutput
from seethrough.errors import ParameterError

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture
def fresh(models: Models, llama_dir: Path) -> LLM:
    """An engine whose counters start at 0."""
    return LLM(llama_dir, threads=1, max_model_len=128, num_kv_blocks=8)


def test_counters_of_one_request(fresh: LLM) -> None:
    fresh.generate(prompt(*range(40)), **GREEDY)
    state = fresh.state
    counted = state.counted
    assert (state.running, state.waiting, state.blocks, state.blocks_held) == (0, 0, 8, 0)
    assert state.blocks_idle == 2  # 45 positions: two blocks are full, and remembered
    assert (counted.prompt_tokens, counted.output_tokens) == (40, 6)
    assert (counted.steps, counted.step_tokens) == (6, 1)
    # The last output token is never computed.
    assert counted.computed_tokens == 40 + 6 - 1
    assert (counted.cached_tokens, counted.recomputed_tokens, counted.preemptions) == (0, 0, 0)
    assert counted.finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}


def test_counters_of_a_prompt_that_is_known(fresh: LLM) -> None:
    first, again = (fresh.generate(prompt(*range(40)), **GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 32)
    assert again.outputs == first.outputs
    counted = fresh.state.counted
    assert counted.cached_tokens == 32
    assert counted.computed_tokens == 2 * 45 - 32
    fresh.forget_prefixes()
    assert fresh.state.blocks_idle == 0
    assert fresh.generate(prompt(*range(40)), **GREEDY)[0].num_cached_tokens == 0


def test_counters_with_preemption(fresh: LLM) -> None:
    """Three requests of 30 + 40 tokens want 15 blocks; there are 8."""
    prompts = [prompt(*range(k, k + 30)) for k in (0, 100, 200)]
    outputs = fresh.generate(prompts, temperature=0, max_tokens=40, ignore_eos=True)
    counted = fresh.state.counted
    assert counted.preemptions > 0
    assert counted.preemptions == sum(output.metrics.preemptions for output in outputs)
    known = 3 * (30 + 40 - 1)
    assert counted.computed_tokens == known + counted.recomputed_tokens
    # It was not more than what the prompts and outputs have, each time.
    assert 0 <= counted.recomputed_tokens <= counted.preemptions * 69
    assert (counted.prompt_tokens, counted.output_tokens) == (90, 120)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]


def test_a_state_is_a_copy_and_plain_json(fresh: LLM) -> None:
    before = fresh.state
    fresh.generate("dog", **GREEDY)
    assert before.counted.steps == 0
    assert before.counted.finished["length"] == 0
    body = fresh.state.to_dict()
    assert body["counted"]["finished"]["length"] == 1
    assert body["blocks"] == 8


def test_reasons_are_counted(says: Any, rig: Rig) -> None:
    llm = says("ab", "<|end|>", nan_after=ord("N"))
    before = dict(llm.state.counted.finished)
    llm.generate(prompt(1), temperature=0)
    llm.generate(prompt(1), temperature=0, max_tokens=1)
    llm.generate(prompt(ord("N")), temperature=0)
    with llm.stream(prompt(1), temperature=0) as stream:
        next(stream)
    after = llm.state.counted.finished
    assert {name: after[name] - before[name] for name in after} == dict.fromkeys(after, 1)


def times_of(output: RequestOutput) -> tuple[float, ...]:
    metrics = output.metrics
    assert metrics.queue_ms is not None
    assert metrics.prefill_ms is not None
    assert metrics.decode_ms is not None
    assert metrics.ttft_ms is not None
    return metrics.queue_ms, metrics.prefill_ms, metrics.decode_ms, metrics.ttft_ms


def test_times_of_a_request_add_up(llm: LLM) -> None:
    (output,) = llm.generate("the quick brown fox", **GREEDY)
    queue, prefill, decode, ttft = times_of(output)
    assert min(queue, prefill, decode) > 0
    assert queue + prefill == pytest.approx(ttft)
    gaps = output.metrics.inter_token_ms
    assert len(gaps) == 5
    assert min(gaps) > 0
    assert sum(gaps) == pytest.approx(decode)
    assert output.metrics.tpot_ms == pytest.approx(decode / 5)


def test_times_of_samples(llm: LLM) -> None:
    (output,) = llm.generate("the quick brown fox", n=3, seed=1, **(GREEDY | {"temperature": 1}))
    assert len(output.metrics.inter_token_ms) == 3 * 5
    queue, prefill, _, ttft = times_of(output)
    assert queue + prefill == pytest.approx(ttft)


def test_one_token_and_none(llm: LLM) -> None:
    one = llm.generate("dog", temperature=0, max_tokens=1)[0].metrics
    assert (one.inter_token_ms, one.tpot_ms, one.decode_ms) == ((), None, 0)
    none = llm.generate("dog", temperature=0, max_tokens=0)[0].metrics
    assert (none.ttft_ms, none.prefill_ms, none.decode_ms) == (None, None, None)
    assert none.queue_ms is not None


def test_a_request_that_never_ran_has_waited_for_ever(llm: LLM) -> None:
    stream = llm.stream("dog", **GREEDY)
    stream.close()
    metrics = stream.output().metrics
    assert (metrics.queue_ms, metrics.prefill_ms, metrics.ttft_ms) == (None, None, None)


def test_who_waits_says_so(models: Models, llama_dir: Path) -> None:
    """With one seat the second request waits for the first."""
    one = models(llama_dir, max_model_len=96, max_num_seqs=1)
    first, second = one.generate(["the dog", "the fox"], **(GREEDY | {"max_tokens": 30}))
    assert times_of(second)[0] > times_of(first)[2]


def test_progress_of_many_prompts(models: Models, llama_dir: Path) -> None:
    few = models(llama_dir, max_model_len=96, max_num_seqs=3)
    seen: list[tuple[int, int]] = []
    lengths = [SamplingParams(temperature=0, max_tokens=k, ignore_eos=True) for k in range(1, 13)]
    few.generate(["dog"] * 12, lengths, progress=lambda *given: seen.append(given))
    assert seen[-1] == (12, 12)
    assert all(total == 12 for _, total in seen)
    done = [count for count, _ in seen]
    assert done == sorted(set(done))
    assert len(done) > 4
    talks = [[{"role": "user", "content": text}] for text in ("a", "b")]
    seen.clear()
    few.chat(talks, progress=lambda *given: seen.append(given), **GREEDY)
    assert seen[-1] == (2, 2)


def test_a_progress_that_fails_leaves_nothing_running(llm: LLM) -> None:
    def fail(*_: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.generate(["dog", "the fox"], progress=fail, **GREEDY)
    assert llm.state.running == llm.state.waiting == llm.state.blocks_held == 0


@pytest.mark.parametrize("salt", ["", "x" * 1025, 5, b"a"])
def test_salts_that_are_none(llm: LLM, salt: Any) -> None:
    for ask in (llm.generate, llm.stream):
        with pytest.raises(ParameterError, match="cache_salt"):
            ask("dog", cache_salt=salt, **GREEDY)
