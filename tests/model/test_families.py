"""Every family against transformers in float32, for the program and for the naive pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from paged import greedy, prefill
from tiny_models import CASES, FAMILIES, TinyModel, TinyModels, prompt

from seethrough import pipeline
from seethrough.model.spec import LayerSpec, TransformerSpec

LENGTHS = (1, 7, 60)
TOLERANCE = 1e-4


@pytest.fixture(params=CASES)
def model(request: pytest.FixtureRequest, tiny: TinyModels) -> TinyModel:
    return tiny[request.param]


def naive(spec: TransformerSpec, weights: Any, ids: Any) -> Any:
    x = pipeline.forward(spec, weights, *pipeline.pad_and_mask([ids]))
    return pipeline.head(spec, weights, x)[0]


def test_logits_equal_transformers(model: TinyModel) -> None:
    spec, weights = model.weights.spec, model.program.weights
    for n in LENGTHS:
        ids = prompt(n)
        expected = model.oracle_logits(ids)
        assert np.abs(expected).max() > 3  # large enough to show an error
        assert np.abs(prefill(model.program, ids) - expected).max() <= TOLERANCE
        assert np.abs(naive(spec, weights, ids) - expected).max() <= TOLERANCE


def test_greedy_tokens_equal_transformers(model: TinyModel) -> None:
    spec, weights = model.weights.spec, model.program.weights
    ids = prompt(7, seed=1).tolist()
    expected, simple = list(ids), list(ids)
    for _ in range(20):
        expected.append(int(model.oracle_logits(np.array(expected))[-1].argmax()))
        simple.append(int(naive(spec, weights, simple)[-1].argmax()))
    assert greedy(model.program, ids, 20) == expected[7:]
    assert simple == expected


def test_nothing_is_left_aside_or_noted(model: TinyModel) -> None:
    """What transformers saves today is used whole."""
    assert model.weights.left_aside == ()
    assert model.weights.notes == ()


def _layers(spec: TransformerSpec, **change: Any) -> TransformerSpec:
    return replace(spec, layers=tuple(replace(layer, **change) for layer in spec.layers))


def _rope(spec: TransformerSpec, index: int, **change: Any) -> TransformerSpec:
    ropes = list(spec.ropes)
    ropes[index] = replace(ropes[index], **change)
    return replace(spec, ropes=tuple(ropes))


def _norm(spec: TransformerSpec, **change: Any) -> TransformerSpec:
    return replace(spec, norm=replace(spec.norm, **change))


WRONG = {
    "llama": {
        "theta": lambda s: _rope(s, 0, theta=5_000.0),
        "no rope": lambda s: _layers(s, rope=None),
        "scale": lambda s: _layers(s, attn_scale=s.layers[0].attn_scale * 1.05),
        "norm offset": lambda s: _norm(s, weight_offset=1.0),
        "norm eps": lambda s: _norm(s, eps=1e-2),
        "activation": lambda s: replace(s, activation="gelu_tanh"),
    },
    "llama-mha-tied-llama3": {"unscaled": lambda s: _rope(s, 0, kind="default")},
    "llama-mqa-old-linear-biases": {"factor": lambda s: _rope(s, 0, factor=2.0)},
    "mistral": {
        "window + 1": lambda s: _layers(s, window=9),
        "window - 1": lambda s: _layers(s, window=7),
        "no window": lambda s: _layers(s, window=None),
    },
    "qwen2-max-window-layers": {"all windows": lambda s: _layers(s, window=5)},
    "gemma3": {
        "local theta": lambda s: _rope(s, 0, theta=1_000_000.0),
        "global theta": lambda s: _rope(s, 1, theta=10_000.0),
        "embedding scale": lambda s: replace(s, embed_scale=7.0),
        "logit cap": lambda s: replace(s, logit_softcap=None),
    },
    "gpt2": {
        "same scale": lambda s: replace(s, layers=(s.layers[0],) * 3),
        "erf": lambda s: replace(s, activation="gelu"),
    },
    "bloom": {"fewer slopes": lambda s: replace(s, positions="rope")},
    "xglm": {
        "position offset": lambda s: replace(s, position_offset=1),
        "tanh": lambda s: replace(s, activation="gelu_tanh"),
    },
    "xglm-odd": {"zero row": lambda s: replace(s, sinusoid_pad=None)},
}


@pytest.mark.parametrize(
    ("name", "what"), [(name, what) for name, changes in WRONG.items() for what in changes]
)
def test_comparison_would_see_it(name: str, what: str, tiny: TinyModels) -> None:
    """A wrong detail moves the logits by more than the tolerance."""
    spec, weights, ids = tiny[name].weights.spec, tiny[name].program.weights, prompt(60)
    wrong = naive(WRONG[name][what](spec), weights, ids)
    assert np.abs(wrong - tiny[name].oracle_logits(ids)).max() > 2 * TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch_equals_each_alone(name: str, side: str, tiny: TinyModels) -> None:
    spec, weights = tiny[name].weights.spec, tiny[name].program.weights
    prompts = [prompt(n, seed=n) for n in (3, 1, 40, 17)]
    alone = [naive(spec, weights, ids) for ids in prompts]
    for pad_id in (0, 5, spec.vocab_size - 1):
        ids, mask = pipeline.pad_and_mask(prompts, side, pad_id)
        logits = pipeline.head(spec, weights, pipeline.forward(spec, weights, ids, mask))
        last = pipeline.take_last(logits, mask)
        for row, real, expected, final in zip(logits, mask, alone, last, strict=True):
            np.testing.assert_allclose(row[real], expected, rtol=0, atol=1e-5)
            np.testing.assert_array_equal(final, row[real][-1])


def test_spec_says_what_the_config_says(tiny: TinyModels) -> None:
    """Windows per layer and ropes per layer, as they were asked for."""
    windows = [layer.window for layer in tiny["qwen2-max-window-layers"].weights.spec.layers]
    assert windows == [None, None, 5]
    layers = tiny["gemma3"].weights.spec.layers
    scale = 16**-0.5
    local, everywhere = LayerSpec(scale, rope=0, window=8), LayerSpec(scale, rope=1)
    assert layers == (local,) * 5 + (everywhere, local)
    scales = {layer.attn_scale for layer in tiny["gemma3-query-scalar-biases"].weights.spec.layers}
    assert scales == {20**-0.5}
