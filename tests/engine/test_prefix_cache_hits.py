"""What is found in the prefix cache: whose it is, how much of it counts, and that it is right.

That hits change no bit is in `test_bit_identity.py`; keys and books are in `kv/test_prefix_cache`.
"""

from __future__ import annotations

import gc
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_forge import prompt, tiny_llama
from houses import HOUSES, Houses
from proof import ALL, Bench, Params
from tiny_models import VOCAB, TinyModels

from seethrough import LLM
from seethrough.errors import ParameterError

SCORED: Params = {"temperature": 0, "max_tokens": 4, "logprobs": 1, "prompt_logprobs": 2}
PLAIN: Params = {"temperature": 0, "max_tokens": 4, "logprobs": 1}


def ids(length: int, seed: int = 0) -> list[int]:
    """A prompt; a longer one with the same seed begins with it."""
    return np.random.default_rng(seed).integers(16, VOCAB - 8, 512)[:length].tolist()


# ------------------------------------------------------------------------------- scores of prompts


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 64])
@pytest.mark.parametrize("name", ["llama", "mistral", "llama q8_0"])
def test_prompt_scores_are_whole_after_a_hit(houses: Houses, name: str, length: int) -> None:
    """vllm-project/vllm#3251, #8268, #5344: every score is there, and it is the cold run's."""
    bench = houses(name).bench()
    wanted = houses(name).lone(ids(length), SCORED)
    assert wanted[0].prompt_scores is not None
    assert [e is None for e in wanted[0].prompt_scores] == [True] + [False] * (length - 1)
    for params in (SCORED, SCORED, PLAIN, SCORED):  # cold, again, with a hit, and again
        assert bench.ask(ids(length), params) == houses(name).lone(ids(length), params)


@pytest.mark.parametrize("chunk", [8, 16, 20])
def test_prompt_scores_in_chunks_come_before_the_first_token(houses: Houses, chunk: int) -> None:
    """vllm-project/vllm#14239, djl-serving PR#2299: nothing is said before the last chunk."""
    bench = houses("llama").bench(max_num_batched_tokens=chunk)
    for length in (7, 8, 9, 17, 40):
        for params in (SCORED, PLAIN):
            job = bench.submit(ids(length, seed=length), params)
            while job.running:
                bench.step()
                said = sum(bool(piece.token_ids) for piece in job.fresh)
                assert bool(said) == (job.requests[0].num_computed >= length)
            assert bench.close(job) == houses("llama").lone(ids(length, seed=length), params)


def test_prompt_scores_while_mates_take_the_rows(houses: Houses) -> None:
    """A chunk that is left out of a step leaves no gap."""
    bench = houses("llama").bench(max_num_batched_tokens=5)
    asked = [(ids(n, seed), SCORED) for seed, n in enumerate([30, 17, 33, 9, 2])]
    jobs = [bench.submit(*one) for one in asked]
    bench.run()
    for job, one in zip(jobs, asked, strict=True):
        assert bench.close(job) == houses("llama").lone(*one)


def test_samples_are_scored_once(houses: Houses) -> None:
    """With n samples the first one scores the prompt; the others may find its blocks."""
    params = {**SCORED, "n": 3, "temperature": 1, "seed": 5}
    bench = houses("llama").bench()
    for _ in range(2):
        assert bench.ask(ids(40), params) == houses("llama").lone(ids(40), params)


# ------------------------------------------------------------------------------- whose it is


def test_salts_never_share(houses: Houses) -> None:
    """vllm-project/vllm PR#17045, #16016: one tenant's prompt cannot be felt by another."""
    llm = LLM(houses.path("llama"), threads=1)
    salts = ["A", "B", "a", "A ", None, "plain", "salt A", "\ud800", "é", "e\u0301"]
    asked = prompt(*ids(64))
    for salt in salts:
        first, again = (llm.generate(asked, **PLAIN, cache_salt=salt)[0] for _ in range(2))
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 63), salt
        assert first.outputs[0].token_ids == again.outputs[0].token_ids
    for salt in salts:  # each still has its own, streamed or not
        stream = llm.stream(asked, **PLAIN, cache_salt=salt)
        list(stream)
        assert stream.output().num_cached_tokens == 63


def test_salts_do_not_share_what_runs_at_the_same_time(houses: Houses) -> None:
    bench = houses("llama").bench()
    jobs = [bench.submit(ids(40), PLAIN, salt=salt) for salt in ("A", "B", "A", "B", None)]
    bench.run()
    assert [job.output().num_cached_tokens for job in jobs] == [0, 0, 32, 32, 0]
    for job in jobs:
        assert bench.close(job) == houses("llama").lone(ids(40), PLAIN)


@pytest.mark.parametrize("salt", ["", 5, b"A", ["A"], "x" * 1025])
def test_bad_salts_are_refused(houses: Houses, salt: Any) -> None:
    """An empty salt would be a secret that everybody knows."""
    llm = LLM(houses.path("llama"), threads=1)
    for ask in (llm.generate, llm.stream):
        with pytest.raises(ParameterError, match="cache_salt"):
            ask(prompt(1), cache_salt=salt)
    assert not llm.jobs


def test_other_weights_under_the_same_name_share_nothing(tmp_path: Path) -> None:
    """vllm-project/vllm#30931: loaded again, the model does not meet what the old one left."""
    folder, other = tmp_path / "model", tiny_llama(tmp_path / "new", seed=1)
    old = LLM(tiny_llama(folder, seed=0), threads=1)
    asked = prompt(*range(40))
    before = old.generate(asked, **PLAIN)[0]
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    new, expected = LLM(folder, threads=1), LLM(other, threads=1)
    after = new.generate(asked, **PLAIN)[0]
    assert after.num_cached_tokens == 0
    assert after.outputs == expected.generate(asked, **PLAIN)[0].outputs
    assert after.outputs != before.outputs
    assert old.generate(asked, **PLAIN)[0].num_cached_tokens == 32


def test_a_trace_neither_takes_nor_leaves(houses: Houses) -> None:
    llm = LLM(houses.path("llama"), threads=1)
    for _ in range(2):
        trace = llm.trace(prompt(*ids(40)), **PLAIN)
        assert trace.output.num_cached_tokens == 0
        assert len(llm._engine.pool.prefix) == 0
    assert llm.generate(prompt(*ids(40)), **PLAIN)[0].num_cached_tokens == 0
    assert llm.trace(prompt(*ids(40)), **PLAIN).output.num_cached_tokens == 0


# ------------------------------------------------------------------------------- forgetting


def test_what_was_forgotten_is_not_waited_for(houses: Houses) -> None:
    """Emptied while a request runs: the same prompt need not wait until that one has ended."""
    bench = houses("llama").bench()
    talking = bench.submit(ids(40), {"temperature": 0, "max_tokens": 80, "ignore_eos": True})
    bench.step()
    bench.pool.forget()
    assert bench.ask(ids(40), PLAIN) == houses("llama").lone(ids(40), PLAIN)
    assert talking.running
    bench.run()
    bench.close(talking)


def test_forgetting_at_any_moment_changes_nothing(houses: Houses) -> None:
    params = {**ALL, "max_tokens": 30}
    bench = houses("llama").bench(9, max_num_batched_tokens=24)
    asked = [([*ids(33), *ids(n, seed=n)], params) for n in range(1, 9)]
    jobs = [bench.submit(*one) for one in asked]
    while bench.engine.busy:
        bench.step()
        if bench.engine.metrics.steps % 3 == 0:
            bench.pool.forget()
            bench.engine.check()
    for job, one in zip(jobs, asked, strict=True):
        assert bench.close(job) == houses("llama").lone(*one)


def test_the_caches_own_memory_is_bounded(houses: Houses) -> None:
    """vllm-project/vllm#28726: thousands of different prompts leave as much as the pool holds."""
    bench = houses("llama").bench(16)
    params = {"temperature": 0, "max_tokens": 1}

    def serve(first: int, count: int) -> None:
        for i in range(first, first + count):
            job = bench.submit([16 + i % 90, 16 + i // 90 % 90, *ids(34)], params)
            bench.jobs.step()
            bench.jobs.close(job)

    serve(0, 300)
    gc.collect()
    tracemalloc.start()
    serve(300, 100)
    before = tracemalloc.get_traced_memory()[0]
    serve(400, 1200)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 14 <= len(bench.pool.prefix) <= 16
    assert grown < 30_000
    assert bench.idle()


# ------------------------------------------------------------------------------- nothing unwritten


def poison(bench: Bench) -> None:
    """NaN into every number that a step may write, and a wrong id into every id."""
    model: Any = bench.engine.model
    for buffer in model._lowered.buffers.values():
        buffer.floats[:] = np.nan
    room: Any = bench.engine._sampling
    for name, array in vars(room._room).items():
        if name not in ("all_ids", "at"):
            array[:] = np.nan if array.dtype.kind == "f" else 1


@pytest.mark.parametrize("name", HOUSES)
def test_no_number_is_read_before_it_is_written(houses: Houses, name: str) -> None:
    """vllm-project/vllm PR#42245, PR#48567: whatever lies in a buffer, it reaches nobody."""
    house = houses(name)
    asked = [
        (ids(n, seed), {**ALL, "prompt_logprobs": 1, "max_tokens": 8})
        for seed, n in enumerate([20, 3, 37])
    ]
    bench = house.bench(max_num_batched_tokens=16)
    jobs = [bench.submit(*one) for one in asked]
    while bench.engine.busy:
        poison(bench)
        bench.step()
    for job, one in zip(jobs, asked, strict=True):
        assert bench.close(job) == house.lone(*one)


# ------------------------------------------------------------------------------- sliding windows


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_windows_are_exact_cold_and_after_a_hit(
    houses: Houses, tiny: TinyModels, name: str
) -> None:
    """huggingface/transformers#37574: lengths around the window of 8, and blocks behind it."""
    house, oracle = houses(name), tiny[name]
    for length in (*range(6, 21), 31, 32, 33, 40):
        bench = house.bench()
        wanted = oracle_scores(oracle.oracle_logits(np.array(ids(length))))
        (cold,) = house.lone(ids(length), {**SCORED, "max_tokens": 1})
        near(cold.prompt_scores or (), wanted, ids(length))
        bench.ask(ids(length), PLAIN)
        longer = [*ids(length), *ids(12, seed=1)]
        job = bench.submit(longer, {**PLAIN, "max_tokens": 12})
        bench.run()
        assert job.output().num_cached_tokens == length // 16 * 16
        (got,) = bench.close(job)
        assert [got] == house.lone(longer, {**PLAIN, "max_tokens": 12})
        after = oracle_scores(oracle.oracle_logits(np.array([*longer, *got.ids])))
        near((None,) * len(longer) + (got.scores or ()), after, [*longer, *got.ids])


def oracle_scores(logits: Any) -> Any:
    wide = logits.astype(np.float64)
    top = wide.max(axis=-1, keepdims=True)
    return wide - top - np.log(np.exp(wide - top).sum(axis=-1, keepdims=True))


def near(entries: Any, scores: Any, tokens: list[int]) -> None:
    """Each entry's own token against the oracle's row before it."""
    assert len(entries) == len(tokens)
    for at, entry in enumerate(entries):
        for token, score, _, _ in entry or ():
            assert float.fromhex(score) == pytest.approx(scores[at - 1][token], abs=2e-4)
        if entry is not None:
            assert tokens[at] in [token for token, *_ in entry]
