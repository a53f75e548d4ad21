"""The compiled backend against its plain twin, bit for bit, and both against the rules on paper."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mpmath import chebyfit, mp, mpf

from seethrough.errors import NoCandidatesError
from seethrough.kernels.cpu import sampling as source
from seethrough.kernels.cpu.compiled import Kernels
from seethrough.sampling import softmax as plain
from seethrough.sampling.bans import History, prepare_bans
from seethrough.sampling.compiled import CompiledOps
from seethrough.sampling.logprobs import prompt_logprobs
from seethrough.sampling.ops import NUMPY
from seethrough.sampling.params import LOGPROBS_MODES, SamplingParams, resolve
from seethrough.sampling.record import SamplingRecord
from seethrough.sampling.sampler import Sampled, sample
from seethrough.sampling.truncate import BORDER
from seethrough.weights.catalog import default_cache_dir

INF = float("inf")
LAST_U = 1 - 2**-53
WIDE = 49_152


@cache
def kernels() -> Kernels:
    return Kernels(default_cache_dir().parent / "kernels")


@cache
def compiled(size: int) -> CompiledOps:
    return CompiledOps(
        size, kernels()
    )  # kept from test to test, as an engine keeps it from token to token


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def kept(after: np.ndarray) -> list[int]:
    return np.flatnonzero(after > -np.inf).tolist()


# The exponential and the logarithm


def exp_of_all(x_at: int, n: int, out_at: int) -> None:
    x, out = source.f64(x_at), source.f64(out_at)
    for i in range(n):
        out[i] = source.exp(x[i])


def keys_of_all(x_at: int, n: int, keys_at: int, back_at: int) -> None:
    x, keys, back = source.f32(x_at), source.u32(keys_at), source.f32(back_at)
    for i in range(n):
        keys[i] = source.falling(x[i])
        back[i] = source.value_of(keys[i])


def sum_of_all(terms_at: int, n: int, mass_at: int, total_at: int) -> None:
    total = source.add_up(source.f64(terms_at), n, source.f64(mass_at))
    source.f64(total_at)[0] = total


def call(function: Any, *args: Any) -> None:
    """Compile a function of this file beside the kernels that it uses, and call it."""
    name = f"test_{function.__name__}"
    places = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in args]
    scratch_kernels().callable(name, len(args), function)(*places)


@cache
def scratch_kernels() -> Kernels:
    return Kernels(None)


def compiled_exp(x: np.ndarray) -> np.ndarray:
    """The compiled function; x float64 <= 0."""
    out = np.empty_like(x)
    call(exp_of_all, x, x.size, out)
    return out


def compiled_sum(terms: np.ndarray, n: int) -> tuple[np.ndarray, float]:
    """`add_up` of n terms, of which there must be whole blocks."""
    mass, total = np.empty(terms.size // 512), np.empty(1)
    call(sum_of_all, terms, n, mass, total)
    return mass, float(total[0])


def errors_in_ulp(ours: np.ndarray, x: np.ndarray) -> np.ndarray:
    true = np.exp(x.astype(np.longdouble))
    return np.abs(ours - true) / np.spacing(true.astype(np.float64))


def test_the_coefficients_are_the_documented_ones() -> None:
    with mp.workdps(50):
        half = mp.log(2) / 2

        def q(r: mpf) -> mpf:
            return (mp.exp(r) - 1 - r) / r**2 if abs(r) > mpf(10) ** -20 else mpf(1) / 2 + r / 6

        fitted = [float(c) for c in reversed(chebyfit(q, [-half, half], 11))]
    assert list(plain._POLYNOMIAL) == fitted
    assert [getattr(source, f"_C{i}") for i in range(11)] == fitted


def test_exp_is_within_one_ulp_and_both_twins_agree() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.uniform(low, 0, 300_000) for low in (-708, -40, -1, -1e-3, -1e-7)]
    x = np.concatenate(parts).astype(np.float32)
    ours = plain.exp(x.astype(np.float64))
    assert errors_in_ulp(ours, x).max() < 1
    assert np.array_equal(ours, compiled_exp(x.astype(np.float64)))
    # Arguments that no float32 holds, as the difference of two is.
    y = np.concatenate(parts)
    ours = plain.exp(y)
    assert errors_in_ulp(ours, y).max() < 1
    assert np.array_equal(ours, compiled_exp(y))


def test_exp_at_its_ends() -> None:
    x = np.array([0.0, -0.0, -5e-324, -1e-300, -708.0, np.nextafter(-708, -709), -1e5, -6e38])
    ours = plain.exp(x)
    assert ours[:4].tolist() == [1, 1, 1, 1]
    assert ours[4] == pytest.approx(math.exp(-708), rel=3e-16)
    assert ours[5:].tolist() == [0, 0, 0]
    assert np.array_equal(ours, compiled_exp(x))


def test_exp_is_monotone() -> None:
    grid = np.linspace(-708, 0, 3_000_001)
    assert (np.diff(plain.exp(grid)) >= 0).all()
    # Neighbouring doubles, where k changes (odd multiples of ln(2) / 2) and in between.
    centres = [-(n / 2) * math.log(2) for n in range(1, 60)] + [-1e-8, -0.1, -1.0, -10.0]
    for centre in centres:
        bits = np.array(-centre).view(np.int64) + np.arange(-2000, 2000)
        x = -bits.view(np.float64)  # ever lower
        assert (np.diff(plain.exp(x)) <= 0).all()


def test_log_is_within_one_ulp() -> None:
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.uniform(1, 4, 20_000), np.exp(rng.uniform(0, 14, 20_000)), [1.0, 2.0]])
    true = np.log(x.astype(np.longdouble))
    ours = np.array([plain.log(v) for v in x.tolist()])
    assert (np.abs(ours - true) <= np.spacing(true.astype(np.float64))).all()
    assert plain.log(1.0) == 0


# Sums, keys, the draw


@pytest.mark.parametrize("size", [1, 7, 8, 9, 511, 512, 513, 1500, WIDE])
def test_sums_have_one_order(size: int) -> None:
    terms = np.random.default_rng(size).lognormal(0, 5, size)
    padded = np.full(-(-size // 512) * 512, np.nan)
    padded[:size] = terms
    mass, total = compiled_sum(padded, size)
    assert np.array_equal(mass, plain.running_mass(terms))
    assert total == plain.total_of(terms)
    assert total == pytest.approx(math.fsum(terms), rel=1e-13)
    by_hand = 0.0
    for start in range(0, size, 512):
        lanes = [0.0] * 8
        for i, term in enumerate(terms[start : start + 512].tolist()):
            lanes[i % 8] += term
        a, b, c, d, e, f, g, h = lanes
        by_hand += ((a + b) + (c + d)) + ((e + f) + (g + h))
    assert total == by_hand


def test_keys_fall_as_logits_rise() -> None:
    x = row(3.4e38, 7, 1, 1e-45, 0, -1e-45, -1, -3.4e38)
    keys = plain.falling(x)
    assert keys.tolist() == sorted(set(keys.tolist()))
    assert plain.falling(row(0, -0.0)).tolist() == [plain.falling(row(0))[0]] * 2
    ours, back = np.empty(x.size, dtype=np.uint32), np.empty_like(x)
    call(keys_of_all, x, x.size, ours, back)
    assert ours.tolist() == keys.tolist()
    assert back.tolist() == x.tolist()


def test_a_draw_outside_its_words_is_refused() -> None:
    for words in ((-1, 0, 0), (2**64, 0, 0), (0, 2**32, 0), (0, 0, -1)):
        with pytest.raises(ValueError, match="64 bits"):
            compiled(1).uniform(*words)


def test_a_block_whose_end_rounding_misses() -> None:
    # One by one, .5 + 2^-54 stays .5 however often; by lanes the small ones add up first.
    weights = np.zeros(512)
    weights[0] = 0.5
    weights[1::8] = 2.0**-54
    mass, total = compiled_sum(weights, 512)
    assert total > 0.5
    at, target = np.empty(1, dtype=np.int64), np.array([0.5])
    places = (a.ctypes.data for a in (mass, target, at))
    kernels().callable("sample_draw", 5)(weights.ctypes.data, 512, *places)
    assert at[0] == 505


# Every step, against the twin and against paper

VALUES = st.one_of(
    st.floats(-30, 30, width=32),
    st.integers(-3, 3).map(float),
    st.sampled_from([-INF, -0.0, 0.0, 3e38, -3e38, 1e-45, -1e-30]),
)
ROWS = st.one_of(
    st.lists(VALUES, min_size=1, max_size=60),
    st.builds(
        lambda seed, size, spread, grid, hole: random_row(seed, size, spread, grid, hole),
        st.integers(0, 2**32 - 1),
        st.integers(1, 300),
        st.sampled_from([0, 1e-3, 1, 3, 30, 1e37]),
        st.sampled_from([0, 0.5, 2]),
        st.sampled_from([0, 0.3, 0.97]),
    ),
).map(lambda values: np.array(values, dtype=np.float32))


def random_row(seed: int, size: int, spread: float, grid: float, hole: float) -> np.ndarray:
    """Normal logits, on a grid (so with ties) unless 0, with a share of holes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 1, size) * spread
    x = np.round(x / grid) * grid if grid else x
    x[rng.random(size) < hole] = -np.inf
    x[seed % size] = spread  # one is always left
    return np.clip(x, -np.inf, 3e38).astype(np.float32)


SHARES = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 0.9, 0.999999, LAST_U, 1.0, 5e-324]))
TEMPERATURES = st.one_of(st.sampled_from([5e-324, 1e-6, 0.7, 1e30]), st.floats(0.05, 5))
STEPS = {
    "temperature": TEMPERATURES,
    "top_k": st.integers(1, 320),
    "top_p": SHARES,
    "min_p": SHARES,
    "typical_p": SHARES.filter(lambda p: p > 0),
}


def weights_on_paper(x: np.ndarray) -> dict[int, float]:
    top = float(x.max())
    return {i: math.exp(float(x[i]) - top) for i in kept(x)}


def prefix(order: list[int], w: dict[int, float], limit: float, exceed: bool) -> int:
    """How many of the order it takes until the mass exceeds (or reaches) a share of the whole."""
    total = math.fsum(w.values())
    for count in range(1, len(order) + 1):
        mass = math.fsum(w[i] for i in order[:count])
        if mass > limit * total or (not exceed and mass >= limit * total):
            return count
    return len(order)


def on_paper(name: str, x: np.ndarray, value: float, shift: float) -> list[int]:
    """Who stays, by the rule, over a fully sorted row; the limit is moved by a share `shift`."""
    w = weights_on_paper(x)
    order = sorted(w, key=lambda i: (-float(x[i]), i))
    if name == "top_k":
        return sorted(order[: int(value)])
    if name == "top_p":
        return sorted(order[: prefix(order, w, value * (1 + BORDER) * (1 + shift), True)])
    if name == "min_p":
        return sorted(i for i in order if w[i] >= value * (1 - BORDER) * (1 + shift))
    total = math.fsum(w.values())
    surprise = {i: math.log(total) - (float(x[i]) - float(x.max())) for i in w}
    entropy = math.fsum(w[i] / total * surprise[i] for i in w)
    far = {i: float(np.float32(min(abs(surprise[i] - entropy), 3e38))) for i in w}
    order = sorted(w, key=lambda i: (far[i], i))
    count = prefix(order, w, value * (1 - BORDER) * (1 + shift), False)
    return sorted(i for i in order if far[i] <= far[order[count - 1]])


@pytest.mark.parametrize("name", STEPS)
@settings(deadline=None, max_examples=250)
@given(data=st.data())
def test_each_step_equals_the_twin_bit_for_bit(name: str, data: st.DataObject) -> None:
    x = data.draw(ROWS)
    assume(x.max() > -INF)
    value = data.draw(STEPS[name])
    before = x.copy()
    ops = compiled(x.size)
    with np.errstate(all="raise", under="ignore"):
        ours = ops.row(getattr(ops, name)(ops.begin(x), value))
        twin = getattr(NUMPY, name)(x, value)
    assert np.array_equal(ours, twin)
    assert np.array_equal(x, before)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "typical_p"])
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_each_truncation_is_the_rule_on_paper(name: str, data: st.DataObject) -> None:
    x = data.draw(ROWS)
    assume(x.max() > -INF)
    value = data.draw(STEPS[name])
    tiny = 1e-12  # where the sums' own rounding decides on paper, both are right
    wanted = [on_paper(name, x, value, shift) for shift in (0, -tiny, tiny)]
    if name == "typical_p":  # float32 distances too round either way
        assume(wanted[0] == wanted[1] == wanted[2])
        far = np.abs(np.diff(sorted({float(v) for v in x if v > -INF})))
        assume(far.size == 0 or far.min() > 1e-3)
    ops = compiled(x.size)
    assert kept(ops.row(getattr(ops, name)(ops.begin(x), value))) in wanted


@settings(deadline=None, max_examples=300)
@given(ROWS, st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 0.5, LAST_U])))
def test_the_choice_is_the_rule_on_paper(x: np.ndarray, u: float) -> None:
    assume(x.max() > -INF)
    ops = compiled(x.size)
    token_id = ops.choose(ops.begin(x), u)
    assert token_id == NUMPY.choose(x, u)
    assert ops.greedy(ops.begin(x)) == int(np.argmax(x))
    w = weights_on_paper(x)
    total = math.fsum(w.values())
    below = math.fsum(v for i, v in w.items() if i < token_id)
    assert w[token_id] > 0
    assert below <= u * total * (1 + 1e-13)
    assert (below + w[token_id]) * (1 + 1e-13) >= u * total


@settings(deadline=None, max_examples=200)
@given(ROWS, st.integers(0, 30), st.data())
def test_scores_equal_the_twin(x: np.ndarray, k: int, data: st.DataObject) -> None:
    assume(x.max() > -INF)
    ops = compiled(x.size)
    candidates = ops.begin(x)
    token_id = data.draw(st.integers(0, x.size - 1))
    assert ops.log_total(candidates) == NUMPY.log_total(x)
    assert ops.largest(candidates, k) == NUMPY.largest(x, k)
    assert ops.score(candidates, token_id) == NUMPY.score(x, token_id)
    assert prompt_logprobs(x[None], [token_id], k, ops) == prompt_logprobs(x[None], [token_id], k)


# The whole chain


def run(x: np.ndarray, ops: Any, record: SamplingRecord | None = None, **given: Any) -> Sampled:
    params = resolve(SamplingParams(**{"seed": 5, **given}), None, {}, lambda: 1)
    history = History(tuple(i % x.size for i in (0, 2, 2)), tuple(i % x.size for i in (1, 4, 4)))
    bans = prepare_bans(params, (), x.size, lambda t: [0])
    return sample(x, params, history, bans, output_index=3, record=record, ops=ops)


CHAINS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.one_of(st.just(0), st.sampled_from([5e-324, 1e6]), TEMPERATURES),
        "top_k": st.integers(-1, 50),
        "top_p": SHARES,
        "min_p": SHARES,
        "typical_p": SHARES.filter(lambda p: p > 0),
        "repetition_penalty": st.floats(0.1, 3),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.just({0: -3.5}),
        "bad_words_ids": st.just([[0]]),
        "logprobs": st.integers(0, 20),
        "logprobs_mode": st.sampled_from(LOGPROBS_MODES),
        "seed": st.integers(0, 2**64 - 1),
    },
).map(lambda given: {**given, "temperature": min(given.get("temperature", 1), 1e6)})


@settings(deadline=None, max_examples=400)
@given(ROWS, CHAINS)
def test_any_chain_equals_the_twin_and_a_record_changes_nothing(
    x: np.ndarray, given: dict[str, Any]
) -> None:
    assume(x.max() > -INF)
    ops = compiled(x.size)
    try:
        twin_record = SamplingRecord()
        twin = run(x, NUMPY, twin_record, **given)
    except NoCandidatesError:
        with pytest.raises(NoCandidatesError):
            run(x, ops, **given)
        return
    record = SamplingRecord()
    assert run(x, ops, **given) == twin
    assert run(x, ops, record, **given) == twin
    assert record == twin_record


@pytest.mark.parametrize("spread", [0.0, 0.01, 2.0, 8.0])
@pytest.mark.parametrize("hole", [0.0, 0.01, 0.999])
def test_a_whole_vocabulary(spread: float, hole: float) -> None:
    x = random_row(7, WIDE, spread, 0, hole)
    ops = compiled(WIDE)
    for seed, knobs in enumerate(
        (
            {"temperature": 0, "logprobs": 20},
            {},
            {"temperature": 0.7, "top_p": 0.9, "logprobs": 5},
            {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
            {"top_k": 2000, "logprobs": 3, "logprobs_mode": "processed_logprobs"},
            {"typical_p": 0.9},
            {"temperature": 1.3, "typical_p": 0.2, "top_p": 0.999999},
            {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
        )
    ):
        assert run(x, ops, seed=seed, **knobs) == run(x, NUMPY, seed=seed, **knobs)


def test_a_row_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a row of 4 logits"):
        compiled(4).begin(row(1, 2, 3))


def test_rows_in_any_layout() -> None:
    x = random_row(1, 300, 2, 0, 0)
    strided = np.zeros((300, 3), dtype=np.float32)
    strided[:, 1] = x
    frozen = x.copy()
    frozen.flags.writeable = False
    given = {"top_p": 0.8, "temperature": 0.9, "presence_penalty": 1.0}
    expected = run(x, compiled(300), **given)
    assert run(strided[:, 1], compiled(300), **given) == expected
    assert run(frozen, compiled(300), **given) == expected
