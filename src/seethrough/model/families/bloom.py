"""BLOOM: ALiBi instead of position vectors, a norm after the embedding, Q, K, V fused per head."""

from __future__ import annotations

from collections.abc import Mapping

from seethrough.model.config import MAX_LAYERS, MAX_POSITIONS, ConfigReader
from seethrough.model.family import Family, Rule, linears, rename
from seethrough.model.spec import LayerSpec, NormSpec, TransformerSpec
from seethrough.model.tensor_ops import split_qkv_per_head
from seethrough.weights.tensor import Tensor

_H = "transformer.h.{i}."
_QKV = ("layers.{i}.q", "layers.{i}.k", "layers.{i}.v")
_FUSED = f"{_H}self_attention.query_key_value"
NAMES = (
    rename("transformer.word_embeddings.weight", "embed.weight"),
    *linears("transformer.word_embeddings_layernorm", "embed_norm"),
    *linears(f"{_H}input_layernorm", "layers.{i}.attn_norm"),
    Rule(f"{_FUSED}.weight", tuple(f"{t}.weight" for t in _QKV), split_qkv_per_head),
    Rule(f"{_FUSED}.bias", tuple(f"{t}.bias" for t in _QKV), split_qkv_per_head),
    *linears(f"{_H}self_attention.dense", "layers.{i}.o"),
    *linears(f"{_H}post_attention_layernorm", "layers.{i}.mlp_norm"),
    *linears(f"{_H}mlp.dense_h_to_4h", "layers.{i}.up"),
    *linears(f"{_H}mlp.dense_4h_to_h", "layers.{i}.down"),
    *linears("transformer.ln_f", "final_norm"),
    rename("lm_head.weight", "head.weight"),
)


def read_spec(config: ConfigReader, tensors: Mapping[str, Tensor]) -> TransformerSpec:
    """ALiBi has no table and no last position; the length it was trained at bounds the context."""
    d_model = config.integer("hidden_size", config.integer("n_embed", 64))
    n_heads = config.integer("n_head", config.integer("num_attention_heads", 8))
    head_dim = max(1, d_model // n_heads)
    n_layers = config.integer("n_layer", config.integer("num_hidden_layers", 2), most=MAX_LAYERS)
    config.refuse("apply_residual_connection_post_layernorm", unless=False)
    return TransformerSpec(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=head_dim,
        d_ff=4 * d_model,
        vocab_size=config.integer("vocab_size", 250_880),
        max_positions=config.integer("seq_length", 2048, most=MAX_POSITIONS),
        norm=NormSpec("layer", config.number("layer_norm_epsilon", 1e-5)),
        layers=(LayerSpec(head_dim**-0.5),) * n_layers,
        activation="gelu_tanh",
        gated_mlp=False,
        positions="alibi",
        embed_norm=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tied_head=config.boolean("tie_word_embeddings", True),
    )


BLOOM = Family("bloom", read_spec, NAMES, optional_prefix="transformer.")
