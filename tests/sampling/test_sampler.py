"""The whole chain: order, reproducible draws, records, and that every parameter does something."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seethrough.errors import NoCandidatesError
from seethrough.sampling import adjust, truncate
from seethrough.sampling.bans import History, prepare_bans
from seethrough.sampling.params import EffectiveParams, SamplingParams, resolve
from seethrough.sampling.philox import uniform
from seethrough.sampling.record import SamplingRecord
from seethrough.sampling.sampler import Sampled, sample, steps
from seethrough.sampling.softmax import softmax

INF = float("inf")
ENDS = (2,)


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def log(*probs: float) -> np.ndarray:
    return np.log(np.array(probs)).astype(np.float32)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.intp)


def effective(**given: object) -> EffectiveParams:
    return resolve(SamplingParams(**{"seed": 11, **given}), None, {}, lambda: 1)


def candidates(
    x: np.ndarray, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **given: object
) -> np.ndarray:
    """The row after S11."""
    params = effective(**given)
    history = History(prompt, output)
    for step in steps(params, history, prepare_bans(params, ENDS, x.size, lambda t: [1])):
        x = step.apply(x)
    return x


def run(
    x: np.ndarray,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    index: int | None = None,
    sample_index: int = 0,
    record: SamplingRecord | None = None,
    **given: object,
) -> Sampled:
    params = effective(**given)
    return sample(
        x,
        params,
        History(prompt, output),
        prepare_bans(params, ENDS, x.size, lambda t: [1]),
        output_index=len(output) if index is None else index,
        sample_index=sample_index,
        record=record,
    )


ORDER = [
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "logit_bias",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
]
EVERYTHING = {
    "allowed_token_ids": [0, 1, 2, 3, 4, 5, 6, 7],
    "bad_words_ids": [[7]],
    "min_tokens": 5,
    "logit_bias": {0: 1.0},
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "temperature": 0.9,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.01,
    "typical_p": 0.9,
}


def test_the_documented_order() -> None:
    record = SamplingRecord()
    run(np.linspace(0, 1, 10, dtype=np.float32), (1,), (0, 3), record=record, **EVERYTHING)
    assert [step.name for step in record.steps] == ORDER
    assert [step.stage for step in record.steps] == ["S10"] * 8 + ["S11"] * 4


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.allclose(a, b, rtol=1e-6, atol=1e-6)


def test_bans_come_before_bias() -> None:
    # The other order would give the banned token its bias too, with the same end; what must not
    # happen is that +100 brings it back.
    x = candidates(row(1, 2, 3), allowed_token_ids=[0, 1], logit_bias={2: 100.0})
    assert x.tolist() == [1, 2, -INF]


def test_bias_comes_before_repetition() -> None:
    x = row(1, 0)
    bias_first = adjust.repetition_penalty(adjust.logit_bias(x, {0: 3.0}), ids(0), 2.0)
    other = adjust.logit_bias(adjust.repetition_penalty(x, ids(0), 2.0), {0: 3.0})
    assert (bias_first[0], other[0]) == (2, 3.5)
    ours = candidates(x, (0,), logit_bias={0: 3.0}, repetition_penalty=2.0)
    assert ours.tolist() == bias_first.tolist()


def test_repetition_comes_before_presence_and_frequency() -> None:
    x = row(4, 0)
    ours = candidates(
        x, (), (0, 0), repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5
    )
    assert ours.tolist() == [4 / 2 - 1 - 2 * 0.5, 0]
    assert ours[0] != (4 - 1 - 1) / 2  # the other order


def test_penalties_come_before_temperature() -> None:
    x = row(4, 0)
    ours = candidates(x, (), (0,), presence_penalty=1.0, temperature=0.5)
    assert ours.tolist() == [0, -6]  # (4 - 1) / .5; the other order: 4 / .5 - 1 = 7 apart


def test_temperature_comes_before_truncation() -> None:
    x = log(0.5, 0.3, 0.2)
    hot = adjust.temperature(x, 4.0)
    assert np.isfinite(truncate.top_p(hot, 0.6)).sum() == 2
    assert np.isfinite(adjust.temperature(truncate.top_p(x, 0.45), 4.0)).sum() == 1
    # At T = 4 the first holds about .38 only, so .45 needs two; before temperature one would do.
    assert np.isfinite(candidates(x, temperature=4.0, top_p=0.45)).sum() == 2
    # min-p as well: 0.2/0.5 = .4 is below .5, but its fourth root is not.
    assert np.isfinite(candidates(x, temperature=4.0, min_p=0.5)).sum() == 3


def test_top_k_comes_before_top_p() -> None:
    # After top-k = 2, .4 of the remaining .7 is .571 > .55: one is kept. Top-p first would keep 2.
    x = log(0.4, 0.3, 0.2, 0.1)
    assert np.isfinite(candidates(x, top_k=2, top_p=0.55)).tolist() == [True, False, False, False]
    other = truncate.top_k(truncate.top_p(x, 0.55), 2)
    assert np.isfinite(other).tolist() == [True, True, False, False]


def test_top_p_comes_before_min_p_and_min_p_before_typical() -> None:
    # The share of the maximum is the same before and after top-p, but top-p after min-p sees less.
    x = log(0.4, 0.3, 0.2, 0.1)
    other = truncate.top_p(truncate.min_p(x, 0.6), 0.55)
    assert np.isfinite(candidates(x, top_p=0.55, min_p=0.6)).tolist() == [True, True, False, False]
    assert np.isfinite(other).tolist() == [True, False, False, False]
    # Typical: alone it prefers .25 (see test_truncate); after min-p .5 and .25 are left, whose
    # entropy is nearer to the surprise of .5.
    y = log(0.5, 0.25, 0.125, 0.125)
    assert np.isfinite(candidates(y, typical_p=0.2)).tolist() == [False, True, False, False]
    both = candidates(y, typical_p=0.2, min_p=0.5)
    assert np.isfinite(both).tolist() == [True, False, False, False]


def test_repetition_sees_prompt_and_output_the_others_only_output() -> None:
    # vllm-project/vllm-metal PR#69: prompt "A A B", and the first step already counts.
    x = row(1, 1, 1, 1)
    prompt, output = (0, 0, 1), (1, 2, 2)
    assert candidates(x, prompt, (), repetition_penalty=2.0).tolist() == [0.5, 0.5, 1, 1]
    assert candidates(x, prompt, output, repetition_penalty=2.0).tolist() == [0.5, 0.5, 0.5, 1]
    assert candidates(x, prompt, (), presence_penalty=1.0).tolist() == [1, 1, 1, 1]
    assert candidates(x, prompt, output, presence_penalty=1.0).tolist() == [1, 0, 0, 1]
    assert candidates(x, prompt, (), frequency_penalty=1.0).tolist() == [1, 1, 1, 1]
    assert candidates(x, prompt, output, frequency_penalty=1.0).tolist() == [1, 0, -1, 1]


@pytest.mark.parametrize("value", [1e-1, 1e-3, 1e-4, 1e-5, 1e-6, 1e-30, 5e-324])
def test_tiny_temperature_equals_greedy(value: float) -> None:
    # vllm-project/vllm#3063
    rng = np.random.default_rng(1)
    for index in range(30):
        x = (rng.permutation(500) * 2.0).astype(np.float32)
        assert run(x, index=index, temperature=value).token_id == run(x, temperature=0).token_id


EXTREMES = [
    {"temperature": 999999},
    {"temperature": 1e6, "top_k": 10**7, "top_p": 0, "min_p": 1, "typical_p": 5e-324},
    {"temperature": 5e-324, "typical_p": 5e-324},
    {"repetition_penalty": 1e6, "presence_penalty": -2, "frequency_penalty": -2},
    {"repetition_penalty": 5e-324},
    {"top_p": 0},
    {"top_p": 0, "temperature": 0},
    {"top_p": 1 - 2**-53, "min_p": 5e-324},
    {"logit_bias": {i: 100.0 if i % 2 else -100.0 for i in range(50)}},
]


@pytest.mark.parametrize("given", EXTREMES)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 3e37])
def test_extreme_values_give_a_valid_choice(given: dict[str, object], scale: float) -> None:
    # ggml-org/llama.cpp#19367
    x = (np.random.default_rng(2).normal(0, 1, 50) * scale).astype(np.float32)
    with np.errstate(all="raise", under="ignore"):
        for index in range(5):
            record = SamplingRecord()
            result = run(x, (1, 2), (3, 3), index=index, logprobs=5, record=record, **given)
            assert 0 <= result.token_id < 50
            assert record.prob > 0
            json.dumps(record.to_dict(), allow_nan=False)


@pytest.mark.parametrize("top_k", [-1, 0, 10**7])
def test_top_k_off_and_beyond_the_vocabulary(top_k: int) -> None:
    # torch-spyre/sendnn-inference#542, vllm-project/vllm PR#14234
    x = np.random.default_rng(3).normal(0, 1, 128).astype(np.float32)
    assert np.array_equal(candidates(x, top_k=top_k), x)
    assert run(x, top_k=top_k).token_id == run(x).token_id
    assert np.isfinite(candidates(x, top_k=1)).sum() == 1


def test_top_p_zero_is_the_best_token() -> None:
    # EvolvingLMMs-Lab/lmms-eval#1265
    x = np.random.default_rng(3).normal(0, 1, 128).astype(np.float32)
    for temperature in (0, 1, 5):
        assert run(x, top_p=0, temperature=temperature).token_id == int(x.argmax())


def test_greedy_draws_nothing_and_skips_truncation() -> None:
    x = log(0.5, 0.25, 0.125, 0.125)
    record = SamplingRecord()
    result = run(x, temperature=0, typical_p=0.2, top_k=3, record=record)
    assert (result.token_id, result.u, record.u) == (0, None, None)
    assert record.steps == []
    assert run(row(1, 2, 2), temperature=0).token_id == 1


def test_min_tokens_holds_the_ends_back_until_reached() -> None:
    # vllm-project/vllm#21987; ENDS is id 2, the request adds id 1.
    x = row(0, 1, 9, -5)
    given = {"temperature": 0, "stop_token_ids": [1], "min_tokens": 2}
    assert run(x, **given).token_id == 0
    assert run(x, (), (0,), **given).token_id == 0
    assert run(x, (), (0, 0), **given).token_id == 2
    assert run(x, ignore_eos=True, **given).token_id == 2  # id 2 ends nothing then
    assert run(row(0, 9, 1), ignore_eos=True, **given).token_id == 2
    # Whatever pulls at it: a bias is added to a ban in vain.
    assert run(x, logit_bias={2: 100.0}, **given).token_id == 0


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"allowed_token_ids": [3], "bad_words_ids": [[3]]}, "bad_words"),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "min_tokens"),
        ({"bad_words_ids": [[0], [1], [2], [3]]}, "bad_words"),
        ({"bad_words_ids": [[0], [1], [3]], "min_tokens": 1}, "min_tokens"),
    ],
)
def test_bans_that_leave_nothing_are_a_typed_error(given: dict[str, object], name: str) -> None:
    for temperature in (0, 1):
        with pytest.raises(NoCandidatesError, match=f"after {name} no token"):
            run(row(1, 2, 3, 4), temperature=temperature, **given)


def test_allowed_ids_that_the_model_itself_excludes() -> None:
    with pytest.raises(NoCandidatesError, match="allowed_token_ids"):
        run(row(1, -INF, 3), allowed_token_ids=[1])


def test_the_draw_is_the_documented_one() -> None:
    x = np.random.default_rng(5).normal(0, 1, 100).astype(np.float32)
    for index in range(50):
        result = run(x, index=index, sample_index=3, seed=2**63 + 5)
        assert result.u == uniform(2**63 + 5, index, 3)
        mass = np.cumsum(softmax(x))
        assert mass[result.token_id] > result.u
        assert result.token_id == 0 or mass[result.token_id - 1] <= result.u


def test_draws_depend_on_nothing_but_their_coordinates() -> None:
    x = np.random.default_rng(6).normal(0, 1, 1000).astype(np.float32)
    first = [run(x, index=i, sample_index=s) for i in range(10) for s in range(3)]
    again = [run(x.copy(), index=i, sample_index=s) for s in (2, 1, 0) for i in range(9, -1, -1)]
    again.sort(key=lambda r: [f.u for f in first].index(r.u))
    assert first == again
    strided = np.zeros((1000, 3), dtype=np.float32)
    strided[:, 1] = x
    assert run(strided[:, 1], top_p=0.9) == run(x, top_p=0.9)
    assert len({f.u for f in first}) == 30


def chi_square(x: np.ndarray, draws: int, **given: object) -> tuple[float, int]:
    expected = softmax(candidates(x, **given)) * draws
    params = effective(**given)
    bans = prepare_bans(params, ENDS, x.size, lambda t: [1])
    counts = np.zeros(x.size)
    for index in range(draws):
        counts[sample(x, params, History((), ()), bans, output_index=index).token_id] += 1
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert expected[possible].min() >= 5
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    return float(statistic), int(possible.sum()) - 1


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 2.0, "top_k": 7},
        {"top_p": 0.8, "min_p": 0.05},
        {"typical_p": 0.7, "logit_bias": {0: 2.0}, "seed": 2**64 - 1},
    ],
)
def test_draws_follow_the_computed_probabilities(given: dict[str, object]) -> None:
    x = np.random.default_rng(7).normal(0, 0.8, 12).astype(np.float32)
    statistic, freedom = chi_square(x, 5_000, **given)
    assert freedom >= 3
    # Mean `freedom`, variance 2 · freedom; 5 standard deviations above is far beyond p = .001.
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


# Every accepted parameter changes something here, or is listed as the engine's.

CHANGES: dict[str, dict[str, object]] = {
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.5},
    "typical_p": {"typical_p": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {1: 1.0}},
    "min_tokens": {"min_tokens": 9},
    "bad_words": {"bad_words": ["x"]},
    "bad_words_ids": {"bad_words_ids": [[4]]},
    "allowed_token_ids": {"allowed_token_ids": [1, 2, 3]},
    "stop_token_ids": {"stop_token_ids": [3], "min_tokens": 9},
    "ignore_eos": {"ignore_eos": True, "min_tokens": 9},
    "seed": {"seed": 12},
    "logprobs": {"logprobs": 2},
    "logprobs_mode": {"logprobs_mode": "raw_logits", "logprobs": 2},
}
ENGINE_CONSUMES = {
    "n",  # one call of `sample` per sample, by sample_index
    "max_tokens",
    "stop",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",  # by `prompt_logprobs` over the rows that the engine keeps
}


def test_every_field_is_either_used_here_or_the_engines() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields == {*CHANGES, *ENGINE_CONSUMES}


@pytest.mark.parametrize("name", CHANGES)
def test_every_parameter_changes_something(name: str) -> None:
    # sgl-project/sglang#28179: accepted, and then not wired to anything.
    x = np.random.default_rng(8).normal(0, 1, 10).astype(np.float32)
    given = CHANGES[name]
    without = {k: v for k, v in given.items() if k != name}

    def everything(**params: object) -> str:
        result = run(x, (1, 2), (3, 4, 4), **params)
        return repr((candidates(x, (1, 2), (3, 4, 4), **params).tolist(), result))

    assert everything(**given) != everything(**without)


# Records


def test_record_by_hand() -> None:
    record = SamplingRecord(top_n=2)
    x = log(0.5, 0.25, 0.125, 0.125)
    result = run(x, bad_words_ids=[[0]], top_k=2, record=record)
    ban, top_k = record.steps
    assert (ban.name, ban.stage, ban.params) == ("bad_words", "S10", {"banned": [0]})
    assert (ban.survivors, ban.changed) == (3, 1)
    assert ban.mass_kept == pytest.approx(0.5)
    assert [c.token_id for c in ban.before] == [0, 1]
    assert [c.prob for c in ban.before] == pytest.approx([0.5, 0.25])
    assert [c.token_id for c in ban.after] == [1, 2]
    assert [c.prob for c in ban.after] == pytest.approx([0.5, 0.25])
    assert (top_k.name, top_k.stage, top_k.params) == ("top_k", "S11", {"top_k": 2})
    assert (top_k.survivors, top_k.changed) == (2, 1)
    assert top_k.mass_kept == pytest.approx(0.75)
    assert [c.prob for c in record.candidates] == pytest.approx([2 / 3, 1 / 3])
    assert (record.u, record.token_id) == (result.u, result.token_id)
    assert record.prob == pytest.approx({1: 2 / 3, 2: 1 / 3}[result.token_id])


def test_mass_is_exactly_one_where_nothing_falls_out() -> None:
    record = SamplingRecord()
    x = np.random.default_rng(9).normal(0, 1, 1000).astype(np.float32)
    run(x, (1,), (2,), temperature=0.3, logit_bias={5: 1.0}, presence_penalty=1.0, record=record)
    assert [s.mass_kept for s in record.steps] == [1.0, 1.0, 1.0]
    assert [s.changed for s in record.steps[:2]] == [1, 1]


SOME = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0, 1e-30, 0.5, 1, 3]),
        "top_k": st.integers(-1, 12),
        "top_p": st.floats(0, 1),
        "min_p": st.floats(0, 1),
        "typical_p": st.floats(0.01, 1),
        "repetition_penalty": st.floats(0.1, 3),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(st.integers(0, 9), st.floats(-100, 100), max_size=3),
        "min_tokens": st.integers(0, 4),
        "bad_words_ids": st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=2), max_size=3),
        "allowed_token_ids": st.sets(st.integers(3, 9), min_size=4).map(sorted),
        "logprobs": st.integers(0, 20),
        "seed": st.integers(0, 2**64 - 1),
    },
)


@settings(deadline=None, max_examples=250)
@given(
    given=SOME,
    noise=st.integers(0, 2**32 - 1),
    prompt=st.lists(st.integers(0, 9), max_size=4),
    output=st.lists(st.integers(0, 9), max_size=4),
)
def test_recording_changes_nothing_and_survivors_only_fall(
    given: dict[str, object], noise: int, prompt: list[int], output: list[int]
) -> None:
    x = np.random.default_rng(noise).normal(0, 2, 10).astype(np.float32)
    before = x.copy()
    record = SamplingRecord()
    try:
        plain = run(x, tuple(prompt), tuple(output), **given)
    except NoCandidatesError:
        with pytest.raises(NoCandidatesError):
            run(x, tuple(prompt), tuple(output), record=record, **given)
        return
    assert run(x, tuple(prompt), tuple(output), record=record, **given) == plain
    assert np.array_equal(x, before)
    assert record.token_id == plain.token_id
    assert record.prob > 0
    survivors = [10, *(step.survivors for step in record.steps)]
    assert survivors == sorted(survivors, reverse=True)
    assert survivors[-1] >= 1
    assert all(0 <= step.mass_kept <= 1 for step in record.steps)
    assert [s.name for s in record.steps] == [
        n for n in ORDER if n in {s.name for s in record.steps}
    ]
    for first, second in zip(record.steps, record.steps[1:], strict=False):
        assert first.after == second.before
    json.dumps(record.to_dict(), allow_nan=False)


@pytest.mark.parametrize("size", [1, 2, 300_000])
def test_any_vocabulary_size(size: int) -> None:
    x = np.random.default_rng(0).normal(0, 2, size).astype(np.float32)
    for knobs in (
        {"temperature": 0},
        {"top_p": 0.9, "top_k": 50, "logprobs": 20},
        {"typical_p": 0.9},
    ):
        params = effective(**knobs)
        bans = prepare_bans(params, (), size, lambda t: [0])
        result = sample(x, params, History((0,), (0,)), bans, output_index=0)
        assert 0 <= result.token_id < size
