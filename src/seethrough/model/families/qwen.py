"""Qwen2, Qwen2.5 and Qwen3: Llama's layout; Qwen2 has Q, K, V biases, Qwen3 norms each head."""

from __future__ import annotations

from collections.abc import Mapping

from seethrough.model.config import MAX_LAYERS, MAX_POSITIONS, ConfigReader
from seethrough.model.families.llama import IGNORED, NAMES, llama_like
from seethrough.model.family import Family
from seethrough.model.spec import TransformerSpec
from seethrough.weights.tensor import Tensor

Tensors = Mapping[str, Tensor]


def _windows(config: ConfigReader) -> list[int | None]:
    """`use_sliding_window` switches; `layer_types`, or `max_window_layers` full layers first."""
    n_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    kinds = config.layer_types("layer_types", n_layers)
    if not config.boolean("use_sliding_window", False):
        return [None] * n_layers
    if "sliding_window" in config.values and config.get("sliding_window") is None:
        return [None] * n_layers
    window = config.integer("sliding_window", 4096, most=MAX_POSITIONS)
    if kinds is None:
        full = config.count("max_window_layers", 28)
        return [None if i < full else window for i in range(n_layers)]
    return [window if kind == "sliding_attention" else None for kind in kinds]


def read_qwen2(config: ConfigReader, tensors: Tensors) -> TransformerSpec:
    """Biases on Q, K and V, none on the output."""
    return llama_like(config, _windows(config), qkv_bias=True)


def read_qwen3(config: ConfigReader, tensors: Tensors) -> TransformerSpec:
    """QK-norm, a head size of its own (128 if not given), biases only if asked for."""
    bias = config.boolean("attention_bias", False)
    head_dim = config.integer("head_dim", 128)
    return llama_like(
        config, _windows(config), head_dim=head_dim, qk_norm=True, qkv_bias=bias, o_bias=bias
    )


QWEN2 = Family("qwen2", read_qwen2, NAMES, IGNORED, optional_prefix="model.")
QWEN3 = Family("qwen3", read_qwen3, NAMES, IGNORED, optional_prefix="model.")
