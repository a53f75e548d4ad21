"""S11, one step at a time: rows by hand, transformers where the rules agree, and properties."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from seethrough.sampling import truncate
from seethrough.sampling.softmax import softmax

INF = float("inf")


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def log(*probs: float) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probs)).astype(np.float32)


def kept(after: np.ndarray) -> list[int]:
    return np.flatnonzero(after > -np.inf).tolist()


# top-k


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (1, [1]),
        (2, [1, 3]),
        (3, [1, 3, 4]),
        (4, [0, 1, 3, 4]),
        (5, [0, 1, 2, 3, 4]),
        (10**7, [0, 1, 2, 3, 4]),
    ],
)
def test_top_k_keeps_exactly_k_and_ties_go_to_the_lower_id(k: int, expected: list[int]) -> None:
    assert kept(truncate.top_k(row(1, 5, 1, 3, 3), k)) == expected


def test_top_k_among_ties_and_holes() -> None:
    assert kept(truncate.top_k(row(2, 2, 2, 2), 2)) == [0, 1]
    assert kept(truncate.top_k(row(-INF, 2, -INF, 2, 1), 2)) == [1, 3]
    assert kept(truncate.top_k(row(-INF, 2, -INF, 2, 1), 4)) == [1, 3, 4]


# top-p


@pytest.mark.parametrize(
    ("probs", "p", "expected"),
    [
        ((0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1), 0.5, 3),  # .3 + .2 equals .5 and does not exceed it
        ((0.5, 0.25, 0.25), 0.75, 3),
        ((0.5, 0.25, 0.25), 0.7, 2),
        ((0.5, 0.25, 0.25), 0.5, 2),
        ((0.5, 0.25, 0.25), 0.4999, 1),
        ((0.6, 0.3, 0.1), 0.9, 3),
        ((0.6, 0.3, 0.1), 0.0, 1),
        ((0.6, 0.3, 0.1), 1e-300, 1),
        ((0.6, 0.3, 0.1), 1.0, 3),
        ((0.6, 0.3, 0.1), 1 - 2**-53, 3),
        ((0.25, 0.25, 0.25, 0.25), 0.5, 3),
        ((1.0, 0.0, 0.0), 0.999, 1),
    ],
)
def test_top_p_by_hand(probs: tuple[float, ...], p: float, expected: int) -> None:
    # The order of ids must not matter, so every rotation is tried.
    for shift in range(len(probs)):
        x = np.roll(log(*probs), shift)
        assert len(kept(truncate.top_p(x, p))) == expected


@pytest.mark.parametrize("scale", [0.125, 1, 8])
def test_top_p_exact_borders_do_not_hang_on_rounding(scale: float) -> None:
    # Whatever is added to all logits, a mass that equals p on paper is treated as equal.
    for shift in np.linspace(-scale, scale, 41):
        x = (np.log([0.5, 0.25, 0.125, 0.125]) + shift).astype(np.float32)
        sizes = {len(kept(truncate.top_p(x, p))) for p in (0.75,)}
        if scale <= 1:
            assert sizes == {3}
        else:
            assert sizes <= {2, 3}  # beyond: the logits themselves are rounded more than that


def test_top_p_ties_go_to_the_lower_id() -> None:
    assert kept(truncate.top_p(row(1, 2, 1, 1, 2), 0.5)) == [1, 4]
    assert kept(truncate.top_p(row(0, 0, 0, 0), 0.0)) == [0]
    assert kept(truncate.top_p(row(-INF, 0, 0, 0), 0.3)) == [1]


def test_top_p_of_a_wide_flat_row() -> None:
    # NVIDIA/TensorRT-LLM PR#19547: a float32 sum over 200,000 never reaches p.
    x = np.zeros(200_000, dtype=np.float32)
    assert len(kept(truncate.top_p(x, 0.9999999))) == 200_000
    assert len(kept(truncate.top_p(x, 1.0))) == 200_000
    assert len(kept(truncate.top_p(x, 0.5))) == 100_001
    assert len(kept(truncate.top_p(x, 0.0))) == 1
    x[123_456] = 1e-3
    assert kept(truncate.top_p(x, 0.0)) == [123_456]


def test_top_p_one_keeps_what_weighs_nothing() -> None:
    assert kept(truncate.top_p(row(0, -1000, -3e38, -INF), 1.0)) == [0, 1, 2]


def slow_top_p(x: np.ndarray, p: float) -> list[int]:
    """The rule in words, one token at a time, over the fully sorted row."""
    probs = softmax(x)
    order = sorted(kept(x), key=lambda i: (-float(x[i]), i))
    mass = 0.0
    for count, i in enumerate(order, start=1):
        mass += probs[i]
        if mass > p * (1 + truncate.BORDER):
            return sorted(order[:count])
    return sorted(order)


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.1, 1, 5, 30]),
    st.one_of(st.floats(0, 1), st.sampled_from([0.999, 0.99999, 0.9999999])),
)
def test_top_p_tail_shortcut_changes_nothing(seed: int, spread: float, p: float) -> None:
    x = np.random.default_rng(seed).normal(0, spread, 300).astype(np.float32)
    assert kept(truncate.top_p(x, p)) == slow_top_p(x, p)


# min-p


def test_min_p_by_hand() -> None:
    x = log(0.5, 0.25, 0.15, 0.1)
    assert kept(truncate.min_p(x, 0.5)) == [0, 1]  # .25 is half of .5: on the border, kept
    assert kept(truncate.min_p(x, 0.500001)) == [0]
    assert kept(truncate.min_p(x, 0.2)) == [0, 1, 2, 3]
    assert kept(truncate.min_p(x, 1.0)) == [0]
    assert kept(truncate.min_p(row(1, 1, 0), 1.0)) == [0, 1]
    assert kept(truncate.min_p(row(1, -INF, 0), 1e-9)) == [0, 2]


# typical


def test_typical_by_hand() -> None:
    # H of (.5, .25, .125, .125) is 1.75 bits; surprises 1, 2, 3, 3; distances .75, .25, 1.25, 1.25.
    x = log(0.5, 0.25, 0.125, 0.125)
    assert kept(truncate.typical_p(x, 0.2)) == [1]
    assert kept(truncate.typical_p(x, 0.25)) == [1]  # reached, not exceeded
    assert kept(truncate.typical_p(x, 0.26)) == [0, 1]
    assert kept(truncate.typical_p(x, 0.75)) == [0, 1]
    assert kept(truncate.typical_p(x, 0.76)) == [0, 1, 2, 3]  # equally near: both
    assert kept(truncate.typical_p(x, 1 - 2**-53)) == [0, 1, 2, 3]
    assert kept(truncate.typical_p(x, 5e-324)) == [1]


def test_typical_on_degenerate_rows() -> None:
    assert kept(truncate.typical_p(row(3, -INF, -INF), 0.1)) == [0]
    assert kept(truncate.typical_p(row(0, 0, 0), 0.1)) == [0, 1, 2]
    assert kept(truncate.typical_p(row(0, -1e30, -3e38), 0.5)) == [0]


# transformers as oracle, where the rules agree


def random_row(seed: int, size: int = 60) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(0, rng.uniform(0.5, 5), size).astype(np.float32)


def theirs(warper: Callable[..., torch.Tensor], x: np.ndarray) -> list[int]:
    return kept(warper(None, torch.from_numpy(x)[None].double())[0].numpy())


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(1, 80))
def test_top_k_equals_transformers(seed: int, k: int) -> None:
    x = random_row(seed)
    assume(np.unique(x).size == x.size)  # on ties transformers keeps more than k
    assert kept(truncate.top_k(x, k)) == theirs(TopKLogitsWarper(k), x)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.floats(0.001, 0.999))
def test_top_p_equals_transformers_away_from_borders(seed: int, p: float) -> None:
    x = random_row(seed)
    mass = np.cumsum(np.sort(softmax(x))[::-1])
    assume(np.abs(mass - p).min() > 1e-6)
    assert kept(truncate.top_p(x, p)) == theirs(TopPLogitsWarper(p), x)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.floats(0.001, 0.999))
def test_min_p_equals_transformers_away_from_borders(seed: int, share: float) -> None:
    x = random_row(seed)
    probs = softmax(x)
    assume(np.abs(probs / probs.max() - share).min() > 1e-6)
    assert kept(truncate.min_p(x, share)) == theirs(MinPLogitsWarper(share), x)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.floats(0.001, 0.999))
def test_typical_equals_transformers_away_from_borders(seed: int, p: float) -> None:
    x = random_row(seed)
    probs = softmax(x)
    distance = np.abs(-np.log(probs) + (probs * np.log(probs)).sum())
    order = np.argsort(distance)
    assume(np.abs(np.cumsum(probs[order]) - p).min() > 1e-6)
    assume(np.diff(distance[order]).min() > 1e-9)
    assert kept(truncate.typical_p(x, p)) == theirs(TypicalLogitsWarper(p), x)


# properties of all four

LOGITS = st.lists(
    st.one_of(
        st.floats(-50, 50, width=32),
        st.sampled_from([-INF, 0.0, 1.0, -3e38, 3e38]),
    ),
    min_size=1,
    max_size=40,
).filter(lambda values: max(values) > -INF)
STEPS = {
    "top_k": (truncate.top_k, st.integers(1, 50)),
    "top_p": (truncate.top_p, st.floats(0, 1)),
    "min_p": (truncate.min_p, st.floats(0, 1)),
    "typical_p": (truncate.typical_p, st.floats(0, 1, exclude_min=True)),
}


@pytest.mark.parametrize("name", STEPS)
@settings(deadline=None, max_examples=120)
@given(data=st.data())
def test_one_survives_nobody_returns_and_more_keeps_more(name: str, data: st.DataObject) -> None:
    step, values = STEPS[name]
    x = np.array(data.draw(LOGITS), dtype=np.float32)
    before = x.copy()
    small, large = sorted((data.draw(values), data.draw(values)))
    fewer, more = set(kept(step(x, small))), set(kept(step(x, large)))
    assert fewer
    assert more
    assert fewer | more <= set(kept(x))
    assert (more <= fewer) if name == "min_p" else (fewer <= more)
    after = step(x, small)
    assert np.array_equal(after[sorted(fewer)], x[sorted(fewer)])  # logits themselves are kept
    assert np.array_equal(x, before)
    if name != "typical_p":  # typical may drop the most probable; the others never
        assert int(np.argmax(x)) in fewer


@pytest.mark.parametrize("name", ["top_k", "min_p"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_idempotent(name: str, data: st.DataObject) -> None:
    # True of top-k and min-p; top-p and typical see a new softmax and may cut again.
    step, values = STEPS[name]
    x = np.array(data.draw(LOGITS), dtype=np.float32)
    value = data.draw(values)
    once = step(x, value)
    assert np.array_equal(step(once, value), once)


@pytest.mark.parametrize("name", STEPS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_ids_do_not_matter(name: str, data: st.DataObject) -> None:
    step, values = STEPS[name]
    seed = data.draw(st.integers(0, 2**32 - 1))
    x = random_row(seed)
    assume(np.unique(x).size == x.size)
    value = data.draw(values)
    moved = np.random.default_rng(seed).permutation(x.size)
    assert sorted(moved[kept(step(x[moved], value))]) == kept(step(x, value))


@pytest.mark.parametrize("name", STEPS)
def test_holes_change_nothing(name: str) -> None:
    # The same survivors, alone or among a wide row's holes: the same are kept, bit for bit.
    step, _ = STEPS[name]
    x = random_row(3)
    wide = np.full(1000, -np.inf, dtype=np.float32)
    places = np.sort(np.random.default_rng(0).choice(1000, x.size, replace=False))
    wide[places] = x
    for value in (5, 20) if name == "top_k" else (0.1, 0.5, 0.9):
        assert np.array_equal(step(wide, value)[places], step(x, value))
