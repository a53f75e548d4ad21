"""XGLM: sinusoidal positions counted from 2, scaled embeddings, LayerNorm with biases."""

from __future__ import annotations

import math
from collections.abc import Mapping

from seethrough.model.config import MAX_LAYERS, ConfigReader
from seethrough.model.family import Family, linears, rename
from seethrough.model.spec import LayerSpec, NormSpec, TransformerSpec
from seethrough.weights.tensor import Tensor

_L = "model.layers.{i}."
NAMES = (
    rename("model.embed_tokens.weight", "embed.weight"),
    *linears(f"{_L}self_attn_layer_norm", "layers.{i}.attn_norm"),
    *linears(f"{_L}self_attn.q_proj", "layers.{i}.q"),
    *linears(f"{_L}self_attn.k_proj", "layers.{i}.k"),
    *linears(f"{_L}self_attn.v_proj", "layers.{i}.v"),
    *linears(f"{_L}self_attn.out_proj", "layers.{i}.o"),
    *linears(f"{_L}final_layer_norm", "layers.{i}.mlp_norm"),
    *linears(f"{_L}fc1", "layers.{i}.up"),
    *linears(f"{_L}fc2", "layers.{i}.down"),
    *linears("model.layer_norm", "final_norm"),
    rename("lm_head.weight", "head.weight"),
)
# The sinusoidal table is computed.
IGNORED = ("model.embed_positions.weights",)


def read_spec(config: ConfigReader, tensors: Mapping[str, Tensor]) -> TransformerSpec:
    """fairseq's numbering: position 0 is row 2, and the pad id's row is zero."""
    d_model, n_heads = config.integer("d_model", 1024), config.integer("attention_heads", 16)
    head_dim = max(1, d_model // n_heads)
    config.refuse("add_cross_attention", unless=False)
    n_layers = config.integer("num_layers", 24, most=MAX_LAYERS)
    scaled = config.boolean("scale_embedding", True)
    return TransformerSpec(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=head_dim,
        d_ff=config.integer("ffn_dim", 4096),
        vocab_size=config.integer("vocab_size", 256_008),
        max_positions=config.integer("max_position_embeddings", 2048),
        norm=NormSpec("layer", 1e-5),
        layers=(LayerSpec(head_dim**-0.5),) * n_layers,
        activation=config.activation("activation_function", "gelu"),
        gated_mlp=False,
        positions="sinusoidal",
        position_offset=2,
        sinusoid_pad=_pad_row(config),
        embed_scale=math.sqrt(d_model) if scaled else 1.0,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tied_head=config.boolean("tie_word_embeddings", True),
    )


def _pad_row(config: ConfigReader) -> int | None:
    """Absent means 1, null means none, as the family's own config has it."""
    if "pad_token_id" in config.values and config.get("pad_token_id") is None:
        return None
    return config.count("pad_token_id", 1)


XGLM = Family("xglm", read_spec, NAMES, IGNORED, optional_prefix="model.")
