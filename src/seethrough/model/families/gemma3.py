"""Gemma 3, text: sandwich norms that store w − 1, QK-norm, local and global layers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from seethrough.model.config import MAX_LAYERS, MAX_POSITIONS, ConfigReader, rope_spec
from seethrough.model.families.llama import IGNORED, NAMES, llama_like
from seethrough.model.family import Family, rename
from seethrough.model.spec import LayerSpec, NormSpec, RopeSpec, TransformerSpec
from seethrough.weights.tensor import Tensor

LOCAL_ROPE, GLOBAL_ROPE = 0, 1

_AFTER = "model.layers.{i}.post_attention_layernorm.weight"
GEMMA3_NAMES = (
    *(rule for rule in NAMES if rule.source != _AFTER),
    rename(_AFTER, "layers.{i}.attn_post_norm.weight"),
    rename("model.layers.{i}.pre_feedforward_layernorm.weight", "layers.{i}.mlp_norm.weight"),
    rename("model.layers.{i}.post_feedforward_layernorm.weight", "layers.{i}.mlp_post_norm.weight"),
)


def read_spec(config: ConfigReader, tensors: Mapping[str, Tensor]) -> TransformerSpec:
    """The text model; one global layer follows five local ones unless `layer_types` says else."""
    config.refuse("use_bidirectional_attention", unless=False)
    n_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    bias = config.boolean("attention_bias", False)
    scale = config.number("query_pre_attn_scalar", 256) ** -0.5
    return llama_like(
        config,
        head_dim=config.integer("head_dim", 256),
        norm=NormSpec("rms", config.number("rms_norm_eps", 1e-6), weight_offset=1.0),
        layers=gemma3_layers(n_layers, scale, _is_local(config, n_layers), _window(config)),
        ropes=_ropes(config),
        activation=config.activation("hidden_activation", "gelu_pytorch_tanh"),
        embed_scale=math.sqrt(config.integer("hidden_size")),
        sandwich_norm=True,
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        tied_head=config.boolean("tie_word_embeddings", True),
        attn_softcap=config.optional_number("attn_logit_softcapping"),
        logit_softcap=config.optional_number("final_logit_softcapping"),
    )


def gemma3_layers(
    n_layers: int, scale: float, is_local: list[bool], window: int
) -> tuple[LayerSpec, ...]:
    """Local layers see `window` positions and use the fast rope; global ones see everything."""
    return tuple(
        LayerSpec(scale, LOCAL_ROPE, window) if local else LayerSpec(scale, GLOBAL_ROPE)
        for local in is_local[:n_layers]
    )


def every_nth_is_global(n_layers: int, pattern: int) -> list[bool]:
    """Which layers are local when every `pattern`-th one is global."""
    return [(i + 1) % pattern != 0 for i in range(n_layers)]


def _is_local(config: ConfigReader, n_layers: int) -> list[bool]:
    kinds = config.layer_types("layer_types", n_layers)
    if kinds is not None:
        return [kind == "sliding_attention" for kind in kinds]
    pattern = config.integer("_sliding_window_pattern", config.integer("sliding_window_pattern", 6))
    return every_nth_is_global(n_layers, pattern)


def _window(config: ConfigReader) -> int:
    return config.integer("sliding_window", 4096, most=MAX_POSITIONS)


def _ropes(config: ConfigReader) -> tuple[RopeSpec, RopeSpec]:
    """New spelling: `rope_parameters` per layer type. Old: rope_theta, rope_local_base_freq,
    and a `rope_scaling` that means the global layers only."""
    length = config.get("max_position_embeddings")
    per_type = config.section("rope_parameters")
    if flat := per_type.values.keys() - {"sliding_attention", "full_attention"}:
        raise per_type.malformed(min(flat), "expected one mapping for each type of layer")
    local = per_type.section("sliding_attention")
    everywhere = per_type.section("full_attention")
    scaling = config.section("rope_scaling")
    far = scaling if scaling.values else everywhere
    local_theta = config.number("rope_local_base_freq", 10_000)
    global_theta = config.number("rope_theta", 1_000_000)
    return (
        rope_spec(local, local.number("rope_theta", local_theta), length),
        rope_spec(far, everywhere.number("rope_theta", global_theta), length),
    )


GEMMA3 = Family("gemma3_text", read_spec, GEMMA3_NAMES, IGNORED, optional_prefix="model.")
