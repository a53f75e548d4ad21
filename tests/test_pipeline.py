"""The naive pipeline's own loop and sampling against the parts that do it for real."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from paged import greedy
from tiny_models import FAMILIES, TinyModels, prompt

from seethrough import pipeline
from seethrough.errors import NoCandidatesError
from seethrough.sampling import History, SamplingParams, prepare_bans, resolve, sample
from seethrough.sampling.params import EffectiveParams
from seethrough.sampling.sampler import steps

Array = np.ndarray[Any, Any]


class Letters:
    """A tokenizer whose id i is the character of code 256 + i."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 256 for c in text]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [chr(256 + i) for i in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces(ids))


TEXT = Letters()


def effective(**given_params: Any) -> EffectiveParams:
    return resolve(SamplingParams(**given_params), None, {}, lambda: 1234)


def model_of(tiny: TinyModels, name: str, end_ids: frozenset[int] = frozenset()) -> pipeline.Model:
    program = tiny[name].program
    return pipeline.Model(program.spec, program.weights, TEXT, end_ids)


# ------------------------------------------------------------------ generate


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text_equals_the_program(name: str, side: str, tiny: TinyModels) -> None:
    prompts = [prompt(n, seed=n).tolist() for n in (3, 11, 1)]
    params = effective(temperature=0, max_tokens=6)
    texts = pipeline.generate(
        model_of(tiny, name), [TEXT.decode(ids) for ids in prompts], params, side
    )
    expected = [TEXT.decode(greedy(tiny[name].program, ids, 6)) for ids in prompts]
    assert texts == expected


def test_sampled_text_is_each_prompts_own(tiny: TinyModels) -> None:
    """A draw depends on seed and index alone: the same text alone and beside others."""
    model, params = model_of(tiny, "llama"), effective(temperature=1.0, seed=7, max_tokens=8)
    prompts = [TEXT.decode(prompt(n, seed=n).tolist()) for n in (5, 2, 9)]
    together = pipeline.generate(model, prompts, params)
    assert together == [pipeline.generate(model, [p], params)[0] for p in prompts]
    other = effective(temperature=1.0, seed=8, max_tokens=8)
    assert pipeline.generate(model, prompts, other) != together


def test_end_token_ends_and_ignore_eos_does_not(tiny: TinyModels) -> None:
    ids = prompt(5, seed=5).tolist()
    whole = greedy(tiny["llama"].program, ids, 8)
    end = whole[3]
    cut = whole[: whole.index(end) + 1]
    model = model_of(tiny, "llama", frozenset({end}))
    text = TEXT.decode(ids)

    def run(**more: Any) -> str:
        return pipeline.generate(model, [text], effective(temperature=0, max_tokens=8, **more))[0]

    assert run() == TEXT.decode(cut)
    assert run(ignore_eos=True) == TEXT.decode(whole)
    assert run(ignore_eos=True, stop_token_ids=[end]) == TEXT.decode(cut)
    assert end not in TEXT.encode(run(min_tokens=8))[:8]


def test_finish_reasons() -> None:
    def run(tokens: list[int], **more: Any) -> pipeline.Running:
        sequence = pipeline.Running([1], effective(max_tokens=2, **more), [], frozenset({9}))
        for token in tokens:
            pipeline.append(sequence, token, frozenset({9}))
        return sequence

    assert run([5]).finish_reason is None
    assert run([5, 5]).finish_reason == "length"
    assert run([9]).finish_reason == "stop"
    assert run([5, 9]).finish_reason == "stop"  # an end on the last allowed token is an end
    assert run([9], ignore_eos=True).finish_reason is None
    assert run([4], stop_token_ids=[4]).finish_reason == "stop"
    assert run([5, 6]).ids == [1, 5, 6]


def test_first_stages() -> None:
    assert pipeline.tokenize(TEXT, "ĀāĂ") == ["Ā", "ā", "Ă"]
    ids, mask = pipeline.pad_and_mask([[1, 2, 3], [4]], "left", pad_id=9)
    assert_array_equal(ids, [[1, 2, 3], [9, 9, 4]])
    assert_array_equal(mask, [[True, True, True], [False, False, True]])
    ids, mask = pipeline.pad_and_mask([[1, 2, 3], [4]], "right", pad_id=9)
    assert_array_equal(ids, [[1, 2, 3], [4, 9, 9]])
    assert_array_equal(pipeline.take_last(ids[..., None], mask), [[3], [4]])


# ------------------------------------------------------------------ parts against torch


def test_activations_equal_torch() -> None:
    x = np.concatenate([np.linspace(-9, 9, 500), [-1e4, 1e4]]).astype(np.float32)
    functional = torch.nn.functional
    for kind, theirs in {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda t: functional.gelu(t, approximate="tanh"),
        "relu": functional.relu,
    }.items():
        ours = pipeline.activation(kind)(x)
        assert ours.dtype == np.float32
        assert_allclose(ours, theirs(torch.tensor(x)).numpy(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("n_heads", [1, 2, 3, 6, 8, 12, 16, 20, 112])
def test_alibi_slopes_equal_transformers(n_heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    from seethrough.model.positions import alibi_slopes

    mask = torch.ones(1, 2)
    theirs = build_alibi_tensor(mask, n_heads, torch.float32)[:, 0, 1].numpy()
    assert_allclose(alibi_slopes(n_heads), theirs, rtol=1e-6)
    distance = np.array([[[[1]]]])
    assert_allclose(pipeline.alibi(n_heads, distance).ravel(), theirs, rtol=1e-6)


# ------------------------------------------------------------------ sampling

VOCAB = 24
IDS = st.integers(0, VOCAB - 1)
LOGITS = st.one_of(
    st.lists(st.floats(-12, 12, width=32), min_size=VOCAB, max_size=VOCAB),
    # Ties, and probabilities that meet their limits exactly.
    st.lists(st.sampled_from([-4.0, -1.0, 0.0, 1.0, 2.0]), min_size=VOCAB, max_size=VOCAB),
    st.integers(0, 2**32 - 1).map(lambda s: np.random.default_rng(s).normal(0, 3, VOCAB).tolist()),
)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0, 1]) | st.floats(0.05, 5),
        "top_k": st.integers(-1, VOCAB + 3),
        "top_p": st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]) | st.floats(0, 1),
        "min_p": st.sampled_from([0.0, 1.0]) | st.floats(0, 1),
        "typical_p": st.sampled_from([0.5, 1.0]) | st.floats(0.01, 1),
        "repetition_penalty": st.floats(0.25, 4),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(IDS, st.floats(-20, 20), max_size=4),
        "min_tokens": st.integers(0, 6),
        "max_tokens": st.just(50),
        "stop_token_ids": st.lists(IDS, max_size=3),
        "ignore_eos": st.booleans(),
        "bad_words_ids": st.lists(st.lists(IDS, min_size=1, max_size=3), max_size=3),
        "allowed_token_ids": st.lists(IDS, min_size=1, max_size=12),
        "seed": st.integers(0, 2**64 - 1),
    },
)


def for_real(
    row: Array, sequence: pipeline.Running, output_index: int
) -> tuple[Array, Array, int] | None:
    """Adjusted logits, candidates and id of the sampling package; None if nothing is left."""
    params, history = sequence.params, History(sequence.prompt_ids, sequence.output_ids)
    bans = prepare_bans(params, sequence.end_ids, VOCAB, lambda text: [])
    try:
        chosen = sample(row, params, history, bans, output_index=output_index)
    except NoCandidatesError:
        return None
    adjusted = candidates = row
    for step in steps(params, history, bans):
        candidates = step.apply(candidates)
        if step.stage == "S10":
            adjusted = candidates
    return adjusted, candidates, chosen.token_id


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    logits=LOGITS,
    params=PARAMS,
    prompt_ids=st.lists(IDS, min_size=1, max_size=6),
    output_ids=st.lists(IDS, max_size=6),
    end_ids=st.frozensets(IDS, max_size=2),
)
def test_adjust_truncate_and_choose_equal_the_sampler(
    logits: list[float],
    params: dict[str, Any],
    prompt_ids: list[int],
    output_ids: list[int],
    end_ids: frozenset[int],
) -> None:
    row = np.array(logits, dtype=np.float32)
    sequence = pipeline.Running(prompt_ids, effective(**params), output_ids, end_ids)
    expected = for_real(row, sequence, len(output_ids))
    if expected is None:
        with pytest.raises(NoCandidatesError):
            pipeline.adjust(row, sequence)
        return
    adjusted = pipeline.adjust(row, sequence)
    assert_array_equal(np.isneginf(adjusted), np.isneginf(expected[0]))
    assert_allclose(adjusted, expected[0], rtol=1e-4, atol=1e-4)
    # The two round their logits differently, and a border may then fall between two equal ones:
    # from here on both work on the same row.
    candidates = pipeline.truncate(expected[0], sequence.params)
    assert_array_equal(candidates, expected[1])
    assert pipeline.choose(candidates, sequence) == expected[2]


@pytest.mark.parametrize("temperature", [0, 0.5, 1])
@pytest.mark.parametrize(
    "bans",
    [
        {"allowed_token_ids": [3], "bad_words_ids": [[3]]},
        {"allowed_token_ids": [3], "stop_token_ids": [3], "min_tokens": 1, "max_tokens": 9},
        {"bad_words_ids": [[i] for i in range(VOCAB)]},
    ],
)
def test_bans_that_leave_nothing_are_an_error_in_both(
    bans: dict[str, Any], temperature: float
) -> None:
    row = np.zeros(VOCAB, dtype=np.float32)
    sequence = pipeline.Running([1], effective(temperature=temperature, **bans), [], frozenset())
    assert for_real(row, sequence, 0) is None
    with pytest.raises(NoCandidatesError):
        pipeline.adjust(row, sequence)


@pytest.mark.parametrize(
    ("params", "survivors"),
    [({"top_p": 0.75}, 3), ({"top_p": 0.74}, 2), ({"min_p": 0.5}, 3), ({"top_k": 2}, 2)],
)
def test_a_mass_that_meets_its_limit(params: dict[str, Any], survivors: int) -> None:
    """.5/.25/.25 on paper; float32 logits know their probabilities only nearly."""
    row = np.full(VOCAB, -200, dtype=np.float32)
    row[:3] = np.log([0.5, 0.25, 0.25])
    sequence = pipeline.Running([1], effective(**params), [], frozenset())
    expected = for_real(row, sequence, 0)
    assert expected is not None
    candidates = pipeline.truncate(row, sequence.params)
    assert_array_equal(candidates, expected[1])
    assert np.isfinite(candidates).sum() == survivors
