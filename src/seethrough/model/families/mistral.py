"""Mistral and Ministral: Llama's layout with a sliding window on every layer, if it is set."""

from __future__ import annotations

from collections.abc import Mapping

from seethrough.model.config import MAX_LAYERS, MAX_POSITIONS, ConfigReader
from seethrough.model.families.llama import IGNORED, NAMES, llama_like
from seethrough.model.family import Family
from seethrough.model.spec import TransformerSpec
from seethrough.weights.tensor import Tensor


def read_spec(config: ConfigReader, tensors: Mapping[str, Tensor]) -> TransformerSpec:
    """`sliding_window` null means full attention; absent means 4096, as the first release had."""
    n_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    window: int | None = 4096
    if "sliding_window" in config.values:
        window = config.optional_integer("sliding_window", most=MAX_POSITIONS)
    config.refuse("layer_types", unless=None)
    heads = config.integer("num_key_value_heads", 8)
    return llama_like(config, [window] * n_layers, n_kv_heads=heads)


MISTRAL = Family("mistral", read_spec, NAMES, IGNORED, optional_prefix="model.")
