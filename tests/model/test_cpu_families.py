"""Every family on the `cpu` backend: transformers' numbers, and a row's bits are its own.

The pools are full of NaN and dealt in random order, so that nothing unwritten can go unseen.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged import Array, Paged, greedy, prefill
from tiny_models import CASES, CONTEXT, FAMILIES, TinyModel, TinyModels, prompt

DTYPES = pytest.mark.parametrize("dtype", ["f4", "f2"])


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tiny: TinyModels) -> TinyModel:
    return tiny[request.param]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tiny: TinyModels) -> TinyModel:
    return tiny[request.param]


def test_logits_equal_transformers(case: TinyModel) -> None:
    for n in (1, 7, 60, CONTEXT):
        ids = prompt(n)
        expected = case.oracle_logits(ids)
        assert np.abs(expected).max() > 3
        assert np.abs(prefill(case.compiled(), ids) - expected).max() <= 1e-4


def test_greedy_tokens_equal_transformers(case: TinyModel) -> None:
    ids = prompt(7, seed=1).tolist()
    expected = list(ids)
    for _ in range(20):
        expected.append(int(case.oracle_logits(np.array(expected))[-1].argmax()))
    assert greedy(case.compiled(), ids, 20) == expected[7:]


def test_float16_cache_is_near(model: TinyModel) -> None:
    ids = prompt(40)
    exact, near = prefill(model.compiled(), ids), prefill(model.compiled("f2"), ids, dtype="f2")
    reference = prefill(model.program, ids, dtype="f2")
    assert 0 < np.abs(near - exact).max() < 0.03
    assert np.abs(near - reference).max() < 0.01  # a value on the edge of rounding may differ


@DTYPES
@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 59])
def test_chunks_change_no_bit(model: TinyModel, chunk: int, dtype: str) -> None:
    compiled, ids = model.compiled(dtype), prompt(100)
    whole = Paged(compiled, capacity=100, dtype=dtype).feed(ids.tolist(), 100)
    cut = Paged(compiled, capacity=100, dtype=dtype).feed(ids.tolist(), chunk)
    np.testing.assert_array_equal(cut, whole)


@pytest.mark.parametrize("block_size", [32, 48, 112])
def test_block_size_changes_no_bit(model: TinyModel, block_size: int) -> None:
    compiled, ids = model.compiled(), prompt(100)
    whole = Paged(compiled, capacity=112).feed(ids.tolist(), 33)
    other = Paged(compiled, capacity=112, block_size=block_size).feed(ids.tolist(), 33)
    np.testing.assert_array_equal(other, whole)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_bit(model: TinyModel, threads: int) -> None:
    ids = prompt(90)
    one = Paged(model.compiled(threads=threads), capacity=90).feed(ids.tolist(), 13)
    np.testing.assert_array_equal(one, prefill(model.compiled(), ids))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_schedule_changes_no_bit(tiny: TinyModels, data: st.DataObject) -> None:
    """Requests that join, pause and mix in any way: each has the bits of its lone run."""
    model = tiny[data.draw(st.sampled_from(FAMILIES))]
    dtype = data.draw(st.sampled_from(["f4", "f2"]))
    compiled = model.compiled(dtype)
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    prompts = [prompt(n, seed=i) for i, n in enumerate(lengths)]
    paged = Paged(compiled, len(lengths), capacity=40, dtype=dtype)
    seen: list[list[Array]] = [[] for _ in prompts]
    while left := [r for r, n in enumerate(lengths) if paged.computed[r] < n]:
        chosen = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        work, room = {}, CONTEXT
        for r in chosen:
            start = paged.computed[r]
            stop = start + data.draw(st.integers(1, lengths[r] - start))
            if stop - start <= room:
                work[r] = prompts[r][start:stop].tolist()
                room -= stop - start
        for r, logits in zip(work, paged.step(work), strict=True):
            seen[r].append(logits)
    for ids, parts in zip(prompts, seen, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), prefill(compiled, ids, dtype=dtype))


def test_too_many_rows_are_refused(tiny: TinyModels) -> None:
    with pytest.raises(ValueError, match="129 rows, but this program has 128"):
        Paged(tiny["llama"].compiled(), capacity=160).step({0: prompt(129).tolist()})
