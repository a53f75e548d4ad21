"""Llama 1 to 3.x and what shares its layout: SmolLM2, TinyLlama, Yi, Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seethrough.model.config import MAX_LAYERS, MAX_POSITIONS, ConfigReader, rope_from_config
from seethrough.model.family import Family, linears, rename
from seethrough.model.spec import LayerSpec, NormSpec, TransformerSpec
from seethrough.weights.tensor import Tensor

Tensors = Mapping[str, Tensor]

NAMES = (
    rename("model.embed_tokens.weight", "embed.weight"),
    rename("model.layers.{i}.input_layernorm.weight", "layers.{i}.attn_norm.weight"),
    *linears("model.layers.{i}.self_attn.q_proj", "layers.{i}.q"),
    *linears("model.layers.{i}.self_attn.k_proj", "layers.{i}.k"),
    *linears("model.layers.{i}.self_attn.v_proj", "layers.{i}.v"),
    *linears("model.layers.{i}.self_attn.o_proj", "layers.{i}.o"),
    rename("model.layers.{i}.self_attn.q_norm.weight", "layers.{i}.q_norm.weight"),
    rename("model.layers.{i}.self_attn.k_norm.weight", "layers.{i}.k_norm.weight"),
    rename("model.layers.{i}.post_attention_layernorm.weight", "layers.{i}.mlp_norm.weight"),
    *linears("model.layers.{i}.mlp.gate_proj", "layers.{i}.gate"),
    *linears("model.layers.{i}.mlp.up_proj", "layers.{i}.up"),
    *linears("model.layers.{i}.mlp.down_proj", "layers.{i}.down"),
    rename("model.norm.weight", "final_norm.weight"),
    rename("lm_head.weight", "head.weight"),
)
# Rotary tables that older exports stored; they are computed from the config.
IGNORED = ("model.layers.{i}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")


def read_sizes(config: ConfigReader) -> dict[str, Any]:
    """The sizes that every config of this layout spells alike."""
    d_model = config.integer("hidden_size")
    n_heads = config.integer("num_attention_heads")
    return {
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": config.integer("num_key_value_heads", n_heads),
        "head_dim": config.integer("head_dim", max(1, d_model // n_heads)),
        "d_ff": config.integer("intermediate_size"),
        "vocab_size": config.integer("vocab_size"),
        "max_positions": config.integer("max_position_embeddings", most=MAX_POSITIONS),
    }


def same_layers(
    n_layers: int, head_dim: int, windows: list[int | None] | None = None
) -> tuple[LayerSpec, ...]:
    """Layers that share one rope and the usual scale, each with its window."""
    windows = windows or [None] * n_layers
    return tuple(LayerSpec(head_dim**-0.5, rope=0, window=window) for window in windows)


def llama_like(
    config: ConfigReader, windows: list[int | None] | None = None, **more: Any
) -> TransformerSpec:
    """RMSNorm before each branch, RoPE, gated MLP; `more` sets what a family has besides."""
    sizes = read_sizes(config)
    n_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    config.refuse("pretraining_tp", unless=1)
    fields: dict[str, Any] = {
        "norm": NormSpec("rms", config.number("rms_norm_eps", 1e-6)),
        "layers": same_layers(n_layers, sizes["head_dim"], windows),
        "activation": config.activation("hidden_act", "silu"),
        "gated_mlp": True,
        "positions": "rope",
        "ropes": (rope_from_config(config),),
        "tied_head": config.boolean("tie_word_embeddings", False),
    }
    return TransformerSpec(**(sizes | fields | more))


def read_spec(config: ConfigReader, tensors: Tensors) -> TransformerSpec:
    """Llama: no biases unless the config says so."""
    bias = config.boolean("attention_bias", False)
    mlp_bias = config.boolean("mlp_bias", False)
    return llama_like(config, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


LLAMA = Family("llama", read_spec, NAMES, IGNORED, optional_prefix="model.")
