"""A config.json that is malformed, hostile or asks for what is not here: named by its key."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf
from forged import Json, opened, refused, with_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged import prefill
from tiny_models import CASES, FAMILIES, Case, TinyModel, TinyModels, prompt, save

from seethrough.errors import SeethroughError
from seethrough.model.load import understand
from seethrough.weights.checkpoint import Checkpoint


@pytest.mark.parametrize("value", [None, "", "gpt_neox", "Llama", "llama ", 3, ["llama"], {}, True])
def test_unknown_model_type(value: Any, tiny: TinyModels) -> None:
    refused(
        with_config(opened(tiny["llama"]), model_type=value), "model_type", repr(value), "llama"
    )


def test_missing_model_type(tiny: TinyModels) -> None:
    refused(replace(opened(tiny["llama"]), config={}), "model_type", "None")


@pytest.mark.parametrize("value", [{"quant_method": "gptq", "bits": 4}, {"x": 1}, "awq", [1]])
def test_quantized_checkpoint_is_refused(value: Any, tiny: TinyModels) -> None:
    refused(with_config(opened(tiny["llama"]), quantization_config=value), "quantization_config")


ACTIVATION = {
    "llama": "hidden_act",
    "mistral": "hidden_act",
    "qwen2": "hidden_act",
    "qwen3": "hidden_act",
    "gemma3": "hidden_activation",
    "gpt2": "activation_function",
    "xglm": "activation_function",
}


@pytest.mark.parametrize("name", ACTIVATION)
@pytest.mark.parametrize("value", ["mish", "quick_gelu", "SiLU", " ", 3, ["silu"], {"a": 1}, True])
def test_unknown_activation_is_named(name: str, value: Any, tiny: TinyModels) -> None:
    found = with_config(opened(tiny[name]), **{ACTIVATION[name]: value})
    refused(found, ACTIVATION[name], repr(value), "silu")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gpt2", "add_cross_attention", True),
        ("xglm", "add_cross_attention", True),
        ("bloom", "apply_residual_connection_post_layernorm", True),
        ("gemma3", "use_bidirectional_attention", True),
        ("llama", "pretraining_tp", 2),
        ("mistral", "layer_types", ["sliding_attention", "full_attention", "full_attention"]),
        ("qwen3", "layer_types", ["chunked_attention"] * 3),
        ("gemma3", "layer_types", ["linear_attention"] * 7),
    ],
)
def test_unsupported_option_is_named(name: str, key: str, value: Any, tiny: TinyModels) -> None:
    refused(with_config(opened(tiny[name]), **{key: value}), key)


SIZES = {
    "llama": [
        "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "vocab_size", "num_hidden_layers", "max_position_embeddings",
    ],
    "gpt2": ["n_embd", "n_head", "n_layer", "n_positions", "n_inner", "vocab_size"],
    "bloom": ["hidden_size", "n_head", "n_layer", "vocab_size", "seq_length"],
    "xglm": [
        "d_model", "attention_heads", "num_layers", "ffn_dim", "vocab_size",
        "max_position_embeddings",
    ],
}  # fmt: skip
HOSTILE = [0, -1, 1.5, "64", True, [64], {"a": 1}, 10**9, 2**60, 10**400]


@pytest.mark.parametrize(("name", "key"), [(n, k) for n, keys in SIZES.items() for k in keys])
def test_malformed_size_is_named(name: str, key: str, tiny: TinyModels) -> None:
    checkpoint = opened(tiny[name])
    for value in HOSTILE:
        if value == 10**9 and key in ("max_position_embeddings", "seq_length") and name != "xglm":
            continue  # long, yet no table of that length is made before a context is chosen
        refused(with_config(checkpoint, **{key: value}), key)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "vocab_size",
                                 "num_hidden_layers", "intermediate_size"])  # fmt: skip
@pytest.mark.parametrize("absent", [True, False])
def test_size_without_default_must_be_there(key: str, absent: bool, tiny: TinyModels) -> None:
    checkpoint = with_config(opened(tiny["llama"]), **{key: None})
    if absent:
        checkpoint.config.pop(key)
    refused(checkpoint, key, "missing")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "rms_norm_eps", "1e-6"),
        ("llama", "rms_norm_eps", -1e-6),
        ("llama", "tie_word_embeddings", "false"),
        ("llama", "attention_bias", 1),
        ("mistral", "sliding_window", 0),
        ("mistral", "sliding_window", "8"),
        ("qwen2", "use_sliding_window", "yes"),
        ("qwen2", "max_window_layers", -1),
        ("qwen3", "layer_types", ["full_attention"]),
        ("qwen3", "layer_types", "full_attention"),
        ("gemma3", "query_pre_attn_scalar", 0),
        ("gemma3", "final_logit_softcapping", -30.0),
        ("gemma3", "sliding_window", -8),
        ("gpt2", "layer_norm_epsilon", [1e-5]),
        ("gpt2", "scale_attn_weights", 0),
        ("xglm", "pad_token_id", "1"),
        ("xglm", "pad_token_id", -1),
        ("xglm", "pad_token_id", [1]),
        ("xglm", "scale_embedding", "true"),
    ],
)
def test_malformed_option_is_named(name: str, key: str, value: Any, tiny: TinyModels) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
    refused(with_config(opened(tiny[name]), **(windows | {key: value})), key)


def test_heads_that_do_not_fit(tiny: TinyModels) -> None:
    refused(with_config(opened(tiny["llama"]), num_key_value_heads=3), "4 query heads", "3")
    refused(with_config(opened(tiny["llama"]), head_dim=15), "15", "odd")
    refused(with_config(opened(tiny["llama"]), num_attention_heads=8), "shape")
    refused(with_config(opened(tiny["gpt2"]), n_head=5), "shape")
    refused(with_config(opened(tiny["xglm"]), d_model=2), "d_model")


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", {"num_hidden_layers": 10**9}),
        ("llama", {"num_hidden_layers": 400}),
        ("llama", {"vocab_size": 2**60}),
        ("llama", {"vocab_size": 1 << 24, "hidden_size": 1 << 24}),
        ("llama", {"num_attention_heads": 1 << 24, "head_dim": 1 << 24}),
        ("llama", {"num_attention_heads": 1 << 24, "num_key_value_heads": 1 << 24}),
        ("qwen3", {"head_dim": 1 << 24}),
        ("gpt2", {"n_layer": 10**9}),
        ("gpt2", {"n_head": 1 << 24, "n_embd": 1 << 24}),
        ("bloom", {"n_head": 1 << 24}),
        ("bloom", {"hidden_size": 1 << 24, "n_head": 1 << 20}),
        ("xglm", {"d_model": 1 << 24, "attention_heads": 1}),
    ],
)
def test_hostile_sizes_cost_nothing(name: str, config: Json, tiny: TinyModels) -> None:
    checkpoint = with_config(opened(tiny[name]), **config)
    tracemalloc.start()
    started = time.process_time()
    try:
        refused(checkpoint)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 5
    assert peak < 100 << 20


def test_long_values_do_not_flood_the_message(tiny: TinyModels) -> None:
    for value in ("x" * 10**6, [0] * 10**5, 10**4000):
        for key in ("model_type", "hidden_size", "hidden_act", "rms_norm_eps", "attention_bias"):
            refused(with_config(opened(tiny["llama"]), **{key: value}), key)


OPTIONAL = {
    "llama": ["num_key_value_heads", "head_dim", "rope_scaling", "rope_theta", "rope_parameters",
              "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "tie_word_embeddings",
              "pretraining_tp", "partial_rotary_factor", "quantization_config"],
    "gpt2": ["n_inner", "layer_norm_epsilon", "activation_function", "scale_attn_weights",
             "scale_attn_by_inverse_layer_idx", "add_cross_attention", "tie_word_embeddings"],
    "qwen2": ["head_dim", "use_sliding_window", "sliding_window", "max_window_layers",
              "layer_types", "rope_scaling"],
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONAL)
def test_null_equals_absent(name: str, tiny: TinyModels) -> None:
    """tenstorrent/vllm PR#148: `head_dim: null` is no head size."""
    checkpoint = opened(tiny[name])
    absent = {k: v for k, v in checkpoint.config.items() if k not in OPTIONAL[name]}
    null = absent | dict.fromkeys(OPTIONAL[name])
    for extra in ({}, {"num_key_value_heads": 2}):
        one, other = (understandable(replace(checkpoint, config=c | extra)) for c in (absent, null))
        assert one == other


def understandable(checkpoint: Checkpoint) -> Any:
    """The spec, or the message of the error: to be equal for two configs."""
    try:
        return understand(checkpoint).spec
    except SeethroughError as error:
        return str(error)


def test_mistral_window_absent_is_not_null(tiny: TinyModels) -> None:
    """The first release's config had no such key and a window of 4096; null means none."""
    checkpoint = opened(tiny["mistral"])
    absent = {k: v for k, v in checkpoint.config.items() if k != "sliding_window"}
    for config, window in ((absent, 4096), (absent | {"sliding_window": None}, None)):
        assert hf.MistralConfig(**config).sliding_window == window
        spec = understand(replace(checkpoint, config=config)).spec
        assert {layer.window for layer in spec.layers} == {window}


@pytest.mark.parametrize("pad", [None, 0, 1, 5, 127])
def test_xglm_pad_row(pad: int | None, tmp_path: Path) -> None:
    """The pad id's row of the position table is zero; null means that none is."""

    def config() -> Any:
        made = CASES["xglm"].config()
        made.pad_token_id = pad
        return made

    save(Case(config), tmp_path)
    model, ids = TinyModel(tmp_path), prompt(20)
    expected = model.oracle_logits(ids)
    np.testing.assert_allclose(prefill(model.program, ids), expected, rtol=0, atol=1e-4)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_config_gives_a_model_or_a_typed_error(tiny: TinyModels, data: st.DataObject) -> None:
    checkpoint = opened(tiny[data.draw(st.sampled_from(FAMILIES))])
    keys = [*checkpoint.config, "rope_scaling", "rope_theta", "sliding_window", "layer_types"]
    change = data.draw(st.dictionaries(st.sampled_from(keys), JSON, min_size=1, max_size=3))
    assert understandable(with_config(checkpoint, **change))
