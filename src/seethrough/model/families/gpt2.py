"""GPT-2: learned positions, LayerNorm with biases, fused and transposed projections, tied head."""

from __future__ import annotations

from collections.abc import Mapping

from seethrough.model.config import MAX_LAYERS, ConfigReader
from seethrough.model.family import Family, Rule, linears, rename
from seethrough.model.spec import LayerSpec, NormSpec, TransformerSpec
from seethrough.model.tensor_ops import transpose, transpose_split_qkv
from seethrough.weights.tensor import Tensor

_H = "transformer.h.{i}."
_QKV = ("layers.{i}.q", "layers.{i}.k", "layers.{i}.v")
NAMES = (
    rename("transformer.wte.weight", "embed.weight"),
    rename("transformer.wpe.weight", "positions.weight"),
    *linears(f"{_H}ln_1", "layers.{i}.attn_norm"),
    Rule(f"{_H}attn.c_attn.weight", tuple(f"{t}.weight" for t in _QKV), transpose_split_qkv),
    Rule(f"{_H}attn.c_attn.bias", tuple(f"{t}.bias" for t in _QKV), transpose_split_qkv),
    *linears(f"{_H}attn.c_proj", "layers.{i}.o", op=transpose),
    *linears(f"{_H}ln_2", "layers.{i}.mlp_norm"),
    *linears(f"{_H}mlp.c_fc", "layers.{i}.up", op=transpose),
    *linears(f"{_H}mlp.c_proj", "layers.{i}.down", op=transpose),
    *linears("transformer.ln_f", "final_norm"),
    rename("lm_head.weight", "head.weight"),
)
# Stored causal masks of older exports.
IGNORED = (f"{_H}attn.bias", f"{_H}attn.masked_bias")


def read_spec(config: ConfigReader, tensors: Mapping[str, Tensor]) -> TransformerSpec:
    """The sizes have names of their own (n_embd, n_head, n_layer, n_positions)."""
    d_model, n_heads = config.integer("n_embd", 768), config.integer("n_head", 12)
    head_dim = max(1, d_model // n_heads)
    n_layers = config.integer("n_layer", 12, most=MAX_LAYERS)
    config.refuse("add_cross_attention", unless=False)
    scale = head_dim**-0.5 if config.boolean("scale_attn_weights", True) else 1.0
    shrinking = config.boolean("scale_attn_by_inverse_layer_idx", False)
    return TransformerSpec(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=head_dim,
        d_ff=config.integer("n_inner", 4 * d_model),
        vocab_size=config.integer("vocab_size", 50257),
        max_positions=config.integer("n_positions", 1024),
        norm=NormSpec("layer", config.number("layer_norm_epsilon", 1e-5)),
        layers=tuple(LayerSpec(scale / (i + 1) if shrinking else scale) for i in range(n_layers)),
        activation=config.activation("activation_function", "gelu_new"),
        gated_mlp=False,
        positions="learned",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tied_head=config.boolean("tie_word_embeddings", True),
    )


GPT2 = Family("gpt2", read_spec, NAMES, IGNORED, optional_prefix="transformer.")
