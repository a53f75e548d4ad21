"""S12: the draw and greedy, by hand, by property and by statistics."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seethrough.sampling.choose import choose, greedy

INF = float("inf")
LAST_U = 1 - 2**-53


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize(
    ("u", "expected"),
    [(0.0, 1), (0.25, 1), (0.4999, 1), (0.5, 3), (0.75, 3), (LAST_U, 3)],
)
def test_first_id_whose_cumulative_mass_exceeds_u(u: float, expected: int) -> None:
    # Two equal candidates between holes: the mass is exactly 0, .5, .5, 1, 1.
    probs, token_id = choose(row(-INF, 2, -INF, 2, -INF), u)
    assert token_id == expected
    assert probs.tolist() == [0, 0.5, 0, 0.5, 0]


def test_no_draw_reaches_zero_mass() -> None:
    # Finite logits whose weight is zero stand first, between and last.
    x = row(-3e38, 0, -1e5, 0, -3e38, -INF)
    for u in (0.0, 0.5, 0.5 - 2**-54, LAST_U):
        assert choose(x, u)[1] in (1, 3)
    assert choose(row(0, -INF), LAST_U)[1] == 0
    assert choose(row(-INF, 0), 0.0)[1] == 1


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.one_of(st.floats(-100, 100, width=32), st.sampled_from([-INF, 3e38, -3e38])),
        min_size=1,
        max_size=50,
    ).filter(lambda v: max(v) > -INF),
    st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, LAST_U])),
)
def test_choose_agrees_with_a_loop(values: list[float], u: float) -> None:
    x = np.array(values, dtype=np.float32)
    weights = [float(np.exp(np.float64(v) - np.float64(x.max()))) for v in x]
    total, mass, expected = float(np.cumsum(weights)[-1]), 0.0, None
    for i, w in enumerate(weights):
        mass += w
        if mass > u * total:
            expected = i
            break
    probs, token_id = choose(x, u)
    assert token_id == expected
    assert probs[token_id] > 0
    assert probs.sum() == pytest.approx(1)
    assert (probs[x == -np.inf] == 0).all()


def test_greedy_ties_go_to_the_lower_id() -> None:
    assert greedy(row(1, 3, 2, 3)) == 1
    assert greedy(row(-INF, -5, -INF)) == 1


def test_wide_rows() -> None:
    x = np.zeros(300_000, dtype=np.float32)
    for u in (0.0, 0.25, 0.5, LAST_U):
        assert choose(x, u)[1] == int(u * 300_000)
