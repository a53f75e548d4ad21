"""The kinds of model that traces are made of: family and what its config says besides the sizes."""

from __future__ import annotations

from typing import Any

# What tells them apart: shared heads and RoPE; a window; a second norm, QK-norm, a mixed window and
# a scaled embedding; learned positions; ALiBi and a norm after the embedding.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "window": ("mistral", {"sliding_window": 5}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "initializer_range": 0.1,
        },
    ),
    "gpt2": ("gpt2", {"n_positions": 128, "num_key_value_heads": 4}),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2}),
}
