"""S10, one step at a time, against rows computed by hand and against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from seethrough.sampling import adjust
from seethrough.sampling.softmax import softmax

INF = float("inf")


def row(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.intp)


def test_keep_only_and_ban() -> None:
    x = row(1, -2, 3, 0)
    assert adjust.keep_only(x, ids(3, 1)).tolist() == [-INF, -2, -INF, 0]
    assert adjust.ban(x, ids(0, 0, 2)).tolist() == [-INF, -2, -INF, 0]
    assert adjust.ban(x, ids()).tolist() == x.tolist()
    assert x.tolist() == [1, -2, 3, 0]


def test_logit_bias_adds() -> None:
    assert adjust.logit_bias(row(1, 2, 3), {2: -1.5, 0: 100.0}).tolist() == [101, 2, 1.5]


def test_repetition_divides_positive_and_multiplies_negative_once() -> None:
    x = row(2, -2, 0, 4, -4)
    # Ids 0 and 1 are seen three times each: still once. sgl-project/sglang-omni#1360
    seen = ids(0, 1, 0, 1, 0, 1, 2)
    assert adjust.repetition_penalty(x, seen, 2.0).tolist() == [1, -4, 0, 4, -4]
    assert adjust.repetition_penalty(x, seen, 0.5).tolist() == [4, -1, 0, 4, -4]


def test_presence_once_and_frequency_per_occurrence() -> None:
    x = row(1, 1, 1, -1)
    output = ids(0, 3, 0, 0)
    assert adjust.presence_penalty(x, output, 0.5).tolist() == [0.5, 1, 1, -1.5]
    assert adjust.frequency_penalty(x, output, 0.5).tolist() == [-0.5, 1, 1, -1.5]
    assert adjust.frequency_penalty(x, output, -2.0).tolist() == [7, 1, 1, 1]


def test_temperature_subtracts_the_maximum_then_divides() -> None:
    assert adjust.temperature(row(1, 3, -1), 2.0).tolist() == [-1, 0, -2]
    assert adjust.temperature(row(1, 3, -1), 0.5).tolist() == [-4, 0, -8]


STEPS = {
    "logit_bias": lambda x: adjust.logit_bias(x, {1: 100.0, 2: -100.0}),
    "repetition_penalty": lambda x: adjust.repetition_penalty(x, ids(0, 1, 2, 3), 1.3),
    "presence_penalty": lambda x: adjust.presence_penalty(x, ids(0, 1, 2, 3), -2.0),
    "frequency_penalty": lambda x: adjust.frequency_penalty(x, ids(0, 1, 2, 3), 2.0),
    "temperature": lambda x: adjust.temperature(x, 1e-30),
    "ban": lambda x: adjust.ban(x, ids(0)),
    "keep_only": lambda x: adjust.keep_only(x, ids(1, 2, 3)),
}


@pytest.mark.parametrize("name", STEPS)
def test_no_step_brings_a_banned_token_back_or_writes_to_its_input(name: str) -> None:
    x = row(1, -INF, 2, -INF)
    before = x.copy()
    after = STEPS[name](x)
    assert np.isneginf(after[[1, 3]]).all()
    assert after.dtype == np.float32
    assert np.array_equal(x, before)


TINY_TO_HUGE = [5e-324, 1e-300, 1e-45, 1e-30, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e3, 999999, 1e6]


@pytest.mark.parametrize("value", TINY_TO_HUGE)
def test_extreme_temperature_stays_finite_and_keeps_the_order(value: float) -> None:
    # vllm-project/vllm#3063: overflow to NaN; ggml-org/llama.cpp#19367: extreme finite values.
    x = row(-30000, 5, 5.000001, -INF, 30000, 0)
    after = adjust.temperature(x, value)
    assert np.isfinite(after[[0, 1, 2, 4, 5]]).all()
    assert np.isneginf(after[3])
    assert after.argmax() == 4
    order = np.argsort(x, kind="stable")
    assert (np.diff(after[order][1:]) >= 0).all()
    assert softmax(after).sum() == pytest.approx(1)
    if value <= 1:
        assert softmax(after)[4] == 1
    if value == 1e6:
        assert softmax(after)[1] == pytest.approx(softmax(after)[5], rel=1e-4)


@pytest.mark.parametrize("penalty", [5e-324, 1e-30, 1e-6, 1e6])
def test_extreme_repetition_penalty_stays_finite(penalty: float) -> None:
    x = row(3e38, -3e38, 1e-30, -1e-30, 0, 7)
    after = adjust.repetition_penalty(x, ids(0, 1, 2, 3, 4), penalty)
    assert np.isfinite(after).all()
    assert after[5] == 7
    assert after[4] == 0


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.floats(0.05, 20))
def test_temperature_gives_the_probabilities_of_transformers(seed: int, value: float) -> None:
    x = np.random.default_rng(seed).normal(0, 4, 50).astype(np.float32)
    theirs = TemperatureLogitsWarper(value)(None, torch.from_numpy(x)[None].double()).softmax(-1)
    assert np.allclose(
        softmax(adjust.temperature(x, value)), theirs[0].numpy(), rtol=1e-4, atol=1e-9
    )


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 10))
def test_repetition_equals_transformers(seed: int, penalty: float) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 4, 50).astype(np.float32)
    seen = rng.integers(0, 50, 20)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.from_numpy(seen)[None], torch.from_numpy(x)[None]
    )
    assert np.allclose(adjust.repetition_penalty(x, seen, penalty), theirs[0].numpy(), rtol=1e-6)
