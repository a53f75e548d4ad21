"""Rotary settings in every spelling against transformers; what is not here is named."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from seethrough.errors import CheckpointError, UnsupportedModelError
from seethrough.model.config import ConfigReader, rope_from_config, shown
from seethrough.model.families import HF_FAMILIES
from seethrough.model.positions import inverse_frequencies, rotary_table
from seethrough.model.spec import RopeSpec, TransformerSpec

Json = dict[str, Any]
SIZES: Json = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
LLAMA3: Json = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 32}

SPELLINGS: dict[str, Json] = {
    "nothing": {},
    "null": {"rope_scaling": None, "rope_theta": None},
    "theta": {"rope_theta": 500_000},
    "old default": {"rope_theta": 2e4, "rope_scaling": {"type": "default"}},
    "new default": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "new without type": {"rope_parameters": {"rope_theta": 3e3}},
    "new without theta": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "new with theta outside": {
        "rope_theta": 777.0,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    },
    "old linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "old linear, integer": {
        "rope_theta": 1e5,
        "rope_scaling": {"rope_type": "linear", "factor": 4},
    },
    "both names": {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 3.0}},
    "names differ": {"rope_scaling": {"type": "llama3", "rope_type": "linear", "factor": 3.0}},
    "new linear": {"rope_parameters": {"rope_type": "linear", "factor": 1.5, "rope_theta": 1e4}},
    "old llama3": {
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3", **LLAMA3, **ORIGINAL},
    },
    "oldest llama3": {"rope_theta": 1e4, "rope_scaling": {"type": "llama3", **LLAMA3, **ORIGINAL}},
    "new llama3": {
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3, **ORIGINAL}
    },
    "llama3 without original length": {
        "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "llama3", **LLAMA3},
    },
    "llama3, other factors": {
        "rope_theta": 1e4,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32,
            "low_freq_factor": 2,
            "high_freq_factor": 3,
            "original_max_position_embeddings": 48,
        },
    },
    "whole rotary": {"partial_rotary_factor": 1.0},
    "head_dim": {"head_dim": 48},
}


def spec_of(config: Json, family: str = "llama") -> TransformerSpec:
    return HF_FAMILIES[family].read_spec(ConfigReader(config, "config.json"), {})


@pytest.mark.parametrize("name", SPELLINGS)
def test_frequencies_equal_transformers(name: str) -> None:
    config = SIZES | SPELLINGS[name]
    spec = spec_of(config)
    given_to_hf = {k: v for k, v in config.items() if not (k == "rope_theta" and v is None)}
    theirs = hf.LlamaConfig(**given_to_hf)
    kind = theirs.rope_parameters["rope_type"]
    rotary = LlamaRotaryEmbedding(theirs)
    assert rotary.attention_scaling == 1.0
    expected = rotary.inv_freq.numpy()
    if kind in ROPE_INIT_FUNCTIONS:
        np.testing.assert_array_equal(ROPE_INIT_FUNCTIONS[kind](theirs)[0].numpy(), expected)
    assert spec.ropes[0].kind == kind
    np.testing.assert_allclose(
        inverse_frequencies(spec.ropes[0], spec.head_dim), expected, rtol=3e-7
    )


def test_spellings_differ_where_they_should() -> None:
    """The comparison above would see a scaling that was passed over."""
    found = {
        name: tuple(inverse_frequencies((s := spec_of(SIZES | config)).ropes[0], s.head_dim))
        for name, config in SPELLINGS.items()
    }
    assert found["old linear"] != found["nothing"]
    assert found["new with theta outside"] != found["new without theta"]
    assert found["new llama3"] == found["oldest llama3"]
    assert found["llama3 without original length"] != found["oldest llama3"]


@settings(deadline=None, max_examples=60)
@given(
    theta=st.floats(10, 1e7),
    factor=st.floats(1, 64),
    low=st.floats(0.5, 4),
    gap=st.floats(0.5, 8),
    original=st.integers(8, 1 << 17),
    head_dim=st.integers(1, 64).map(lambda n: 2 * n),
)
def test_llama3_equals_transformers(
    theta: float, factor: float, low: float, gap: float, original: int, head_dim: int
) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": low + gap,
        "original_max_position_embeddings": original,
    }
    config = SIZES | {"rope_parameters": rope, "head_dim": head_dim}
    config["max_position_embeddings"] = 1 << 18
    expected = LlamaRotaryEmbedding(hf.LlamaConfig(**config)).inv_freq.numpy()
    # Near a border of the passage the two may choose its two sides, which nearly meet there.
    np.testing.assert_allclose(
        inverse_frequencies(spec_of(config).ropes[0], head_dim), expected, rtol=2e-5
    )


@pytest.mark.parametrize("name", ["old linear", "new llama3", "theta"])
def test_tables_equal_transformers(name: str) -> None:
    """cos and sin of all positions to the last; a longer table begins with the shorter one."""
    spec = spec_of(SIZES | SPELLINGS[name])
    rotary = LlamaRotaryEmbedding(hf.LlamaConfig(**SIZES | SPELLINGS[name]))
    cos, sin = rotary_table(spec.ropes[0], spec.head_dim, 64)
    theirs = rotary(torch.zeros(1), torch.arange(64)[None])
    for ours, expected in zip((cos, sin), theirs, strict=True):
        assert ours.shape == (64, spec.head_dim // 2)
        np.testing.assert_allclose(np.tile(ours, 2), expected[0].numpy(), atol=1e-5)
    longer = rotary_table(spec.ropes[0], spec.head_dim, 100)
    np.testing.assert_array_equal(longer[0][:64], cos)
    np.testing.assert_array_equal(longer[1][:64], sin)


def test_factors_divide_each_speed() -> None:
    factors = (1.0, 2.0, 4.0, 8.0)
    plain = inverse_frequencies(RopeSpec(theta=100.0), 8)
    scaled = inverse_frequencies(RopeSpec("factors", theta=100.0, factors=factors), 8)
    np.testing.assert_allclose(plain, [1, 100**-0.25, 100**-0.5, 100**-0.75], rtol=1e-6)
    np.testing.assert_allclose(scaled * factors, plain, rtol=1e-6)


@pytest.mark.parametrize(
    "kind",
    ["yarn", "dynamic", "longrope", "su", "mrope", "ntk", "proportional", "Linear", ["linear"], 3,
     {"a": 1}, True],
)  # fmt: skip
@pytest.mark.parametrize(
    "place", ["rope_scaling.type", "rope_scaling.rope_type", "rope_parameters"]
)
def test_unknown_type_is_named(kind: Any, place: str) -> None:
    section, _, key = place.partition(".")
    config = SIZES | {section: {key or "rope_type": kind, "factor": 2.0}}
    with pytest.raises(UnsupportedModelError) as caught:
        spec_of(config)
    assert repr(kind) in str(caught.value)
    assert "known: default, linear, llama3" in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
    ],
)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_partial_rotary_is_refused(config: Json, family: str) -> None:
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor"):
        spec_of(SIZES | config, family)


BAD_NUMBERS = [None, "2.0", [2.0], True, 0, -1.0, math.inf, math.nan, 1e300, 10**400]


@pytest.mark.parametrize("value", BAD_NUMBERS, ids=shown)
@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor"])
def test_missing_or_malformed_number_names_its_key(key: str, value: Any) -> None:
    rope = {"rope_type": "llama3", **LLAMA3, **ORIGINAL} | {key: value}
    with pytest.raises(CheckpointError, match=f"rope_scaling: {key}"):
        spec_of(SIZES | {"rope_scaling": rope})
    if key == "factor":
        with pytest.raises(CheckpointError, match="rope_parameters: factor"):
            spec_of(SIZES | {"rope_parameters": {"rope_type": "linear", "factor": value}})


@pytest.mark.parametrize("value", BAD_NUMBERS[1:], ids=shown)
def test_malformed_theta_names_its_key(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: rope_theta"):
        spec_of(SIZES | {"rope_theta": value})
    with pytest.raises(CheckpointError, match="rope_parameters: rope_theta"):
        spec_of(SIZES | {"rope_parameters": {"rope_theta": value}})


@pytest.mark.parametrize("value", ["8192", 0, -8, 32.5, True, 1 << 40], ids=repr)
def test_malformed_original_length(value: Any) -> None:
    rope = {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": value}
    with pytest.raises(CheckpointError, match="original_max_position_embeddings"):
        spec_of(SIZES | {"rope_scaling": rope})


def test_llama3_factors_in_the_wrong_order() -> None:
    rope = {"rope_type": "llama3", **LLAMA3, **ORIGINAL, "low_freq_factor": 4.0}
    with pytest.raises(CheckpointError, match="high_freq_factor"):
        spec_of(SIZES | {"rope_scaling": rope})


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", ["linear", 4, [1], True], ids=repr)
def test_section_that_is_no_mapping(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key):
        rope_from_config(ConfigReader({key: value}, "config.json"))


@pytest.mark.parametrize(
    ("config", "local", "everywhere"),
    [
        ({}, RopeSpec(theta=1e4), RopeSpec(theta=1e6)),
        ({"rope_local_base_freq": 5, "rope_theta": 7}, RopeSpec(theta=5), RopeSpec(theta=7)),
        (
            {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
            RopeSpec(theta=1e4),
            RopeSpec("linear", theta=1e6, factor=8.0),
        ),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 9.0},
                    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 8.0},
                }
            },
            RopeSpec(theta=9),
            RopeSpec("linear", theta=8, factor=2),
        ),
    ],
)
def test_gemma3_has_two_ropes(config: Json, local: RopeSpec, everywhere: RopeSpec) -> None:
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 16}
    assert spec_of(sizes | config, "gemma3_text").ropes == (local, everywhere)
    theirs = hf.Gemma3TextConfig(**sizes, **config).rope_parameters
    assert theirs["sliding_attention"]["rope_theta"] == local.theta
    assert theirs["full_attention"]["rope_theta"] == everywhere.theta
    assert theirs["full_attention"].get("factor", 1.0) == everywhere.factor


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_gemma3_unknown_type_is_named(layer_type: str) -> None:
    rope = {layer_type: {"rope_type": "yarn", "factor": 2.0}}
    with pytest.raises(UnsupportedModelError, match=f"{layer_type}.*yarn"):
        spec_of(SIZES | {"rope_parameters": rope}, "gemma3_text")


def test_gemma3_flat_rope_parameters_are_not_passed_over() -> None:
    """The flat form of other families does not say which layers it means."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}
    with pytest.raises((CheckpointError, UnsupportedModelError), match="rope_parameters"):
        spec_of(SIZES | {"rope_parameters": rope}, "gemma3_text")
