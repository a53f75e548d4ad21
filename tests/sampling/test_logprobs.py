"""Reported scores: raw views that no parameter touches, ranks, and numbers that JSON can hold."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seethrough.errors import NonFiniteLogitsError
from seethrough.sampling.bans import History, prepare_bans
from seethrough.sampling.logprobs import FLOOR, Logprob, prompt_logprobs, top_logprobs
from seethrough.sampling.params import LOGPROBS_MODES, SamplingParams, resolve
from seethrough.sampling.sampler import Sampled, sample
from seethrough.sampling.softmax import check_finite

INF = float("inf")


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def run(x: np.ndarray, output: tuple[int, ...] = (), **given: object) -> Sampled:
    params = resolve(SamplingParams(seed=1, **given), None, {}, lambda: 1)
    bans = prepare_bans(params, (), x.size, lambda text: [0])
    return sample(x, params, History((0, 1), output), bans, output_index=len(output))


RANDOM = np.random.default_rng(4).normal(0, 3, 200).astype(np.float32)
KNOBS = [
    {"temperature": 0},
    {"temperature": 0.5, "top_p": 0.1},
    {"top_k": 1},
    {"repetition_penalty": 3.0, "presence_penalty": 2.0},
    {"logit_bias": {7: 100.0}},
    {"allowed_token_ids": [3, 4]},
    {"typical_p": 0.2, "min_p": 0.1},
]


@pytest.mark.parametrize("knobs", KNOBS)
def test_raw_logprobs_are_log_softmax_whatever_the_knobs(knobs: dict[str, object]) -> None:
    # vllm-project/vllm#9453, EricLBuehler/mistral.rs#2329: greedy uses the same code.
    result = run(RANDOM, (5, 5), logprobs=20, **knobs)
    expected = torch.from_numpy(RANDOM).double().log_softmax(-1).numpy()
    best = np.argsort(-RANDOM)[:20]
    assert set(result.logprobs) == {*best.tolist(), result.token_id}
    for token_id, entry in result.logprobs.items():
        assert entry.logprob == pytest.approx(expected[token_id], abs=1e-6)
        assert entry.logprob <= 0
        assert entry.rank == 1 + np.count_nonzero(RANDOM[token_id] < RANDOM)


def test_four_views_by_hand() -> None:
    x = row(*np.log([0.5, 0.25, 0.125, 0.125]))
    given = {"logit_bias": {0: -100.0}, "temperature": 0.5, "top_k": 2, "logprobs": 2}

    def scores(mode: str) -> dict[int, float]:
        entries = run(x, logprobs_mode=mode, **given).logprobs
        return {i: e.logprob for i, e in entries.items()}

    # Bias takes id 0 out; T = .5 squares the rest (.25, .125) to 4 : 1.
    raw, processed = scores("raw_logprobs"), scores("processed_logprobs")
    token_id = run(x, **given).token_id
    assert token_id in (1, 2)
    assert raw == pytest.approx({i: np.log([0.5, 0.25, 0.125][i]) for i in {0, 1, token_id}})
    assert processed == pytest.approx({1: np.log(0.8), 2: np.log(0.2)})
    assert scores("raw_logits") == pytest.approx({i: float(x[i]) for i in {0, 1, token_id}})
    assert scores("processed_logits") == pytest.approx({1: 0.0, 2: -2 * np.log(2)}, abs=1e-6)


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
@pytest.mark.parametrize("knobs", KNOBS)
def test_every_mode_is_strict_json(mode: str, knobs: dict[str, object]) -> None:
    # vllm-project/vllm#10234: top_k=1 leaves -inf for all others, which JSON cannot say.
    result = run(RANDOM, logprobs=5, logprobs_mode=mode, **knobs)
    shown = {i: [e.logprob, e.rank, e.decoded_token] for i, e in result.logprobs.items()}
    json.dumps(shown, allow_nan=False)
    assert result.token_id in shown
    if mode.startswith("processed") and knobs == {"top_k": 1}:
        assert list(shown) == [result.token_id]


def test_the_sampled_token_is_first_and_always_there() -> None:
    # huggingface/text-generation-inference#1629
    x = row(9, 8, 7, 6)
    for k in (0, 1, 2, 20):
        result = run(x, allowed_token_ids=[3], logprobs=k)
        ids = list(result.logprobs)
        assert ids == [3, *[i for i in (0, 1, 2, 3)[:k] if i != 3]]
        assert [e.rank for e in result.logprobs.values()] == [i + 1 for i in ids]
    assert run(x).logprobs is None
    assert list(run(x, temperature=0, logprobs=0).logprobs) == [0]


def test_ranks_among_ties() -> None:
    x = row(1, 2, 2, 3, 2)
    entries = top_logprobs(x, 0.0, 4, 3)
    assert {i: e.rank for i, e in entries.items()} == {4: 4, 3: 1, 1: 2, 2: 3}
    assert [top_logprobs(x, 0.0, i, 0)[i].rank for i in range(5)] == [5, 2, 3, 1, 4]


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**32 - 1), st.integers(0, 20))
def test_ranks_are_one_order(seed: int, k: int) -> None:
    x = np.random.default_rng(seed).integers(0, 8, 30).astype(np.float32)
    order = sorted(range(30), key=lambda i: (-x[i], i))
    token_id = seed % 30
    entries = top_logprobs(x, 0.0, token_id, k)
    assert {i: e.rank for i, e in entries.items()} == {
        i: order.index(i) + 1 for i in {*order[:k], token_id}
    }


def test_prompt_logprobs() -> None:
    rows = np.random.default_rng(0).normal(0, 2, (3, 40)).astype(np.float32)
    expected = torch.from_numpy(rows).double().log_softmax(-1).numpy()
    entries = prompt_logprobs(rows, [7, 0, 39], 2)
    assert len(entries) == 3
    for j, token_id in enumerate((7, 0, 39)):
        assert next(iter(entries[j])) == token_id
        assert set(entries[j]) == {token_id, *np.argsort(-rows[j])[:2].tolist()}
        for i, entry in entries[j].items():
            assert entry.logprob == pytest.approx(expected[j, i], abs=1e-6)
    assert prompt_logprobs(rows[:0], [], 2) == []
    with pytest.raises(ValueError, match="zip"):
        prompt_logprobs(rows, [1, 2], 0)


def test_an_impossible_prompt_token_gets_the_floor() -> None:
    (entry,) = prompt_logprobs(row(0, -INF, 0)[None], [1], 1)
    assert entry[1] == Logprob(FLOOR, 3)
    assert entry[0].logprob == pytest.approx(-np.log(2))
    json.dumps([e.logprob for e in entry.values()], allow_nan=False)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 3, 6])
def test_non_finite_logits_are_named(bad: float, place: int) -> None:
    x = np.zeros(7, dtype=np.float32)
    x[place] = bad
    for call in (
        lambda: run(x),
        lambda: run(x, temperature=0),
        lambda: prompt_logprobs(x[None], [0], 0),
    ):
        with pytest.raises(NonFiniteLogitsError, match=f"logit {place} of 7 is {bad}"):
            call()


def test_minus_infinity_from_the_model_is_a_ban_unless_everywhere() -> None:
    x = row(-INF, 0, -INF)
    check_finite(x)
    assert run(x).token_id == 1
    with pytest.raises(NonFiniteLogitsError, match="every logit is -inf"):
        run(row(-INF, -INF))
