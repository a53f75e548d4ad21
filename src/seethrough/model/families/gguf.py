"""GGUF files: every architecture spells its keys and tensors alike, so that one table serves all.

What differs from the original checkpoints: `llama` stores rotary pairs side by side (undone by row
order), Gemma's norms are stored as w, not w − 1, and `rope_freqs` holds a finished rope scaling.
Layout after the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from seethrough.errors import CheckpointError
from seethrough.model.config import MAX_LAYERS, MAX_POSITIONS, ConfigReader
from seethrough.model.families.gemma3 import every_nth_is_global, gemma3_layers
from seethrough.model.family import Family, Rule, linears, rename
from seethrough.model.spec import LayerSpec, NormSpec, RopeSpec, TransformerSpec
from seethrough.model.tensor_ops import keep, unpermute_k, unpermute_q
from seethrough.weights.tensor import Tensor

Tensors = Mapping[str, Tensor]
_B = "blk.{i}."


def _names(*, rotary_pairs: bool, sandwich: bool) -> tuple[Rule, ...]:
    q_op, k_op = (unpermute_q, unpermute_k) if rotary_pairs else (keep, keep)
    mlp_norm = (rename(f"{_B}ffn_norm.weight", "layers.{i}.mlp_norm.weight"),)
    after = (
        rename(f"{_B}post_attention_norm.weight", "layers.{i}.attn_post_norm.weight"),
        rename(f"{_B}post_ffw_norm.weight", "layers.{i}.mlp_post_norm.weight"),
    )
    return (
        rename("token_embd.weight", "embed.weight"),
        rename(f"{_B}attn_norm.weight", "layers.{i}.attn_norm.weight"),
        *linears(f"{_B}attn_q", "layers.{i}.q", op=q_op),
        *linears(f"{_B}attn_k", "layers.{i}.k", op=k_op),
        *linears(f"{_B}attn_v", "layers.{i}.v"),
        *linears(f"{_B}attn_output", "layers.{i}.o"),
        rename(f"{_B}attn_q_norm.weight", "layers.{i}.q_norm.weight"),
        rename(f"{_B}attn_k_norm.weight", "layers.{i}.k_norm.weight"),
        *(mlp_norm + after if sandwich else mlp_norm),
        *linears(f"{_B}ffn_gate", "layers.{i}.gate"),
        *linears(f"{_B}ffn_up", "layers.{i}.up"),
        *linears(f"{_B}ffn_down", "layers.{i}.down"),
        rename("output_norm.weight", "final_norm.weight"),
        rename("output.weight", "head.weight"),
    )


# Turned into the spec's rope by `_rope`.
_IGNORED = ("rope_freqs.weight", "blk.{i}.rope_freqs.weight")


def _fields(config: ConfigReader, tensors: Tensors) -> dict[str, Any]:
    """The fields that all architectures have."""
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{config.where}: token_embd.weight is missing or not a matrix")
    d_model, n_heads = config.integer("embedding_length"), config.integer("attention.head_count")
    head_dim = config.integer("attention.key_length", max(1, d_model // n_heads))
    config.refuse("attention.value_length", unless=head_dim)
    config.refuse("rope.dimension_count", unless=head_dim)
    n_layers = config.integer("block_count", most=MAX_LAYERS)
    window = config.optional_integer("attention.sliding_window", most=MAX_POSITIONS)
    return {
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": config.integer("attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "d_ff": config.integer("feed_forward_length"),
        "vocab_size": embedding.shape[0],
        "max_positions": config.integer("context_length", most=MAX_POSITIONS),
        "norm": NormSpec("rms", config.number("attention.layer_norm_rms_epsilon")),
        "layers": (LayerSpec(head_dim**-0.5, 0, window),) * n_layers,
        "activation": "silu",
        "gated_mlp": True,
        "positions": "rope",
        "ropes": (_rope(config, tensors, head_dim),),
        "tied_head": "output.weight" not in tensors,
    }


def _rope(config: ConfigReader, tensors: Tensors, head_dim: int, theta: float = 10_000) -> RopeSpec:
    theta = config.number("rope.freq_base", theta)
    config.refuse("rope.scale_linear", unless=1.0)  # what files said before rope.scaling.*
    factors = tensors.get("rope_freqs.weight", tensors.get("blk.0.rope_freqs.weight"))
    if factors is not None:
        config.refuse("rope.scaling.type", unless="none")
        return RopeSpec("factors", theta, factors=_factors(factors, head_dim // 2))
    kind = config.get("rope.scaling.type") or "none"
    if kind == "none":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec("linear", theta, factor=config.number("rope.scaling.factor"))
    raise config.unsupported("rope.scaling.type", kind, "known: none, linear")


def _factors(tensor: Tensor, count: int) -> tuple[float, ...]:
    if tensor.shape != (count,):
        raise CheckpointError(f"{tensor.name} has shape {list(tensor.shape)}, expected [{count}]")
    factors = tuple(tensor.to_f32().tolist())
    if not all(0 < factor < math.inf for factor in factors):
        raise CheckpointError(f"{tensor.name}: every factor must be positive and finite")
    return factors


def _read_llama(config: ConfigReader, tensors: Tensors) -> TransformerSpec:
    config.refuse("expert_count", unless=0)
    bias, o_bias = "blk.0.attn_q.bias" in tensors, "blk.0.attn_output.bias" in tensors
    mlp_bias = "blk.0.ffn_up.bias" in tensors
    fields = _fields(config, tensors)
    return TransformerSpec(**fields, qkv_bias=bias, o_bias=o_bias, mlp_bias=mlp_bias)


def _read_qwen2(config: ConfigReader, tensors: Tensors) -> TransformerSpec:
    return TransformerSpec(**_fields(config, tensors), qkv_bias=True)


def _read_qwen3(config: ConfigReader, tensors: Tensors) -> TransformerSpec:
    return TransformerSpec(**_fields(config, tensors), qk_norm=True)


def _read_gemma3(config: ConfigReader, tensors: Tensors) -> TransformerSpec:
    """The 27B model (62 layers) is the one whose scale is not 1/√head_dim; no key says so."""
    fields = _fields(config, tensors)
    d_model, n_heads, head_dim = fields["d_model"], fields["n_heads"], fields["head_dim"]
    n_layers = len(fields["layers"])
    scale = (d_model / n_heads if n_layers == 62 else head_dim) ** -0.5
    window = config.integer("attention.sliding_window", most=MAX_POSITIONS)
    pattern = config.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != n_layers or not all(isinstance(p, bool) for p in pattern):
            raise config.malformed(
                "attention.sliding_window_pattern", f"is not {n_layers} booleans"
            )
        local = pattern
    else:
        step = config.integer("attention.sliding_window_pattern", 6)
        local = every_nth_is_global(n_layers, step)
    near = RopeSpec(theta=config.number("rope.freq_base_swa", 10_000))
    far = _rope(config, tensors, head_dim, theta=1_000_000)
    more = {
        "layers": gemma3_layers(n_layers, scale, local, window),
        "ropes": (near, far),
        "activation": "gelu_tanh",
        "embed_scale": math.sqrt(d_model),
        "sandwich_norm": True,
        "qk_norm": True,
        "attn_softcap": config.optional_number("attn_logit_softcapping"),
        "logit_softcap": config.optional_number("final_logit_softcapping"),
    }
    return TransformerSpec(**(fields | more))


_PLAIN = _names(rotary_pairs=False, sandwich=False)
LLAMA = Family("llama", _read_llama, _names(rotary_pairs=True, sandwich=False), _IGNORED)
QWEN2 = Family("qwen2", _read_qwen2, _PLAIN, _IGNORED)
QWEN3 = Family("qwen3", _read_qwen3, _PLAIN, _IGNORED)
GEMMA3 = Family("gemma3", _read_gemma3, _names(rotary_pairs=False, sandwich=True), _IGNORED)
