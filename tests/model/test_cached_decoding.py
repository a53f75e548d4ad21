"""Decoding with the cache equals computing everything again, however the work is cut and mixed."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged import Array, Paged, prefill
from tiny_models import CONTEXT, FAMILIES, TinyModel, TinyModels, prompt

from seethrough import pipeline
from seethrough.kernels.batch import ForwardBatch
from seethrough.model.program import Op, Program
from seethrough.model.run import run

CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tiny: TinyModels) -> TinyModel:
    return tiny[request.param]


def recomputed(program: Program, ids: Any) -> Array:
    x = pipeline.forward(program.spec, program.weights, *pipeline.pad_and_mask([ids]))
    logits: Array = pipeline.head(program.spec, program.weights, x)[0]
    return logits


@pytest.mark.parametrize("chunk", [1, 7, 16, 59, 60])
def test_chunks_equal_recomputing(model: TinyModel, chunk: int) -> None:
    ids = prompt(60)
    chunked = Paged(model.program, capacity=60).feed(ids.tolist(), chunk)
    np.testing.assert_allclose(chunked, recomputed(model.program, ids), **CLOSE)


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_block_size_changes_nothing(tiny: TinyModels, block_size: int) -> None:
    """Windows and block borders meet in every way."""
    ids, program = prompt(40), tiny["mistral"].program
    chunked = Paged(program, capacity=40, block_size=block_size).feed(ids.tolist(), 9)
    np.testing.assert_allclose(chunked, recomputed(program, ids), **CLOSE)


def test_ragged_mates_change_nothing(model: TinyModel) -> None:
    """A long prefill, chunks, and single tokens together; requests join late and pause."""
    lengths = (50, 1, 12, 33)
    prompts = [prompt(n, seed=n) for n in lengths]
    plan = [{0: 20, 2: 5}, {0: 1, 1: 1, 2: 1}, {3: 30, 0: 28}, {2: 6, 3: 1, 0: 1}, {3: 2}]
    paged = Paged(model.program, len(prompts))
    seen: list[list[Array]] = [[] for _ in prompts]
    for takes in plan:
        starts = {r: paged.computed[r] for r in takes}
        work = {r: prompts[r][starts[r] : starts[r] + n].tolist() for r, n in takes.items()}
        for r, logits in zip(work, paged.step(work), strict=True):
            seen[r].append(logits)
    assert paged.computed == list(lengths)
    for ids, parts in zip(prompts, seen, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), recomputed(model.program, ids), **CLOSE)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_schedule_equals_each_alone(tiny: TinyModels, data: st.DataObject) -> None:
    program = tiny[data.draw(st.sampled_from(["llama", "mistral", "xglm"]))].program
    lengths = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=4))
    prompts = [prompt(n, seed=i) for i, n in enumerate(lengths)]
    paged = Paged(program, len(lengths), capacity=24, block_size=data.draw(st.integers(1, 9)))
    seen: list[list[Array]] = [[] for _ in prompts]
    while left := [r for r, n in enumerate(lengths) if paged.computed[r] < n]:
        chosen = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        work = {}
        for r in chosen:
            start = paged.computed[r]
            stop = start + data.draw(st.integers(1, lengths[r] - start))
            work[r] = prompts[r][start:stop].tolist()
        for r, logits in zip(work, paged.step(work), strict=True):
            seen[r].append(logits)
    for ids, parts in zip(prompts, seen, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), recomputed(program, ids), **CLOSE)


def test_only_asked_rows_get_logits(tiny: TinyModels) -> None:
    program, ids = tiny["llama"].program, prompt(9)
    paged = Paged(program, capacity=9)
    everything = paged.step({0: ids.tolist()})[0]
    table = paged.tables[0]
    rows = np.array([8, 2])
    batch = ForwardBatch(
        ids,
        np.arange(9),
        table.slots(0, 9),
        np.array([0, 9]),
        np.array([9]),
        (np.array(table.blocks),),
        rows,
    )
    np.testing.assert_allclose(run(program, batch, paged.pool), everything[rows], **CLOSE)


def test_no_state_between_lengths(model: TinyModel) -> None:
    """Short, long, short again: the first and the last are the same bits (vllm-project#5093)."""
    short, long = prompt(8), prompt(40, seed=1)
    first = prefill(model.program, short)
    prefill(model.program, long)
    np.testing.assert_array_equal(prefill(model.program, short), first)


@pytest.mark.parametrize("name", FAMILIES)
def test_tables_reach_the_last_position(name: str, tiny: TinyModels) -> None:
    """Every position below max_model_len can be computed, and is right."""
    ids = prompt(CONTEXT)
    logits = prefill(tiny[name].program, ids)
    np.testing.assert_allclose(logits, tiny[name].oracle_logits(ids), rtol=0, atol=1e-4)


class Outputs:
    """A tracer that keeps every operation's output."""

    def __init__(self) -> None:
        self.kept: list[tuple[Op, Array]] = []

    def wants_scores(self, layer: int) -> bool:
        return False

    def op_done(self, op: Op, outputs: Any, scores: Any, seconds: float) -> None:
        assert seconds >= 0
        self.kept += [(op, value) for value in outputs]

    def named(self, name: str) -> list[Array]:
        return [value for op, value in self.kept if op.outputs == (name,)]


def test_attention_reads_what_the_cache_holds(tiny: TinyModels) -> None:
    """With one position the output is V itself: rounded to float16 as the cache rounded it."""
    program, tracer = tiny["llama"].program, Outputs()
    Paged(program, dtype="f2").step({0: [3]}, tracer)
    for v, o in zip(tracer.named("V_heads"), tracer.named("O_heads"), strict=True):
        rounded = v.astype(np.float16).astype(np.float32).repeat(2, axis=1)
        assert not np.array_equal(rounded, v.repeat(2, axis=1))
        np.testing.assert_array_equal(o, rounded)


def test_float16_cache_is_near(model: TinyModel) -> None:
    ids = prompt(40)
    exact, near = prefill(model.program, ids), prefill(model.program, ids, dtype="f2")
    assert 0 < np.abs(near - exact).max() < 0.03


def test_tracing_changes_no_bit(model: TinyModel) -> None:
    ids, tracer = prompt(20).tolist(), Outputs()
    traced = Paged(model.program).step({0: ids}, tracer)[0]
    np.testing.assert_array_equal(traced, Paged(model.program).step({0: ids})[0])
    assert len(tracer.kept) == sum(len(op.outputs) for op in model.program.ops)
    np.testing.assert_array_equal(tracer.named("logits")[-1], traced)


def scaled(program: Program, name: str, factor: float) -> Program:
    weights = {**program.weights, name: program.weights[name] * np.float32(factor)}
    return replace(program, weights=weights)


@pytest.mark.parametrize("part", ["k", "v"])
def test_float16_cache_overflow_shows_in_the_logits(part: str, tiny: TinyModels) -> None:
    """Values beyond 65504 do not vanish: the logits are not finite, and the sampler refuses them
    (vllm-project/vllm PR#17364). A float32 cache holds them."""
    program = scaled(tiny["llama"].program, f"layers.1.{part}.weight", 1e6)
    ids = prompt(10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the error that follows says it; a warning adds nothing
        assert np.isfinite(prefill(program, ids)).all()
        assert not np.isfinite(prefill(program, ids, dtype="f2")[-1]).all()


def test_large_residuals_are_right_in_float32(tiny: TinyModels) -> None:
    """A residual stream above float16's range is ordinary here (huggingface/transformers#39972)."""
    program, tracer = scaled(tiny["gemma3"].program, "embed.weight", 1e5), Outputs()
    ids = prompt(20)
    logits = Paged(program).step({0: ids.tolist()}, tracer)[0]
    assert max(np.abs(x).max() for x in tracer.named("X")) > 65504
    np.testing.assert_allclose(logits, recomputed(program, ids), rtol=1e-5, atol=1e-5)
