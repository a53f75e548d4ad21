"""The values of a trace: how they are named, which are derived, and what their axes are."""

from __future__ import annotations

Key = tuple[str, str, int | None]  # stage, value, layer

# What is computed from a kept value: derived name -> (its stage, source stage, source name).
DERIVED = {"A": ("S6.5", "S6.4", "S_masked"), "probs": ("S12", "S11", "candidate_logits")}

# Values that have one entry per head, with the axis where the heads are; the last few have one
# per key/value head, which several query heads share.
HEAD_AXIS = {
    "Q_heads": 1,
    "Q_pos": 1,
    "O_heads": 1,
    "S_masked": 0,
    "A": 0,
    "K_heads": 1,
    "V_heads": 1,
    "K_pos": 1,
    "kv_cache": 2,
}
KV_VALUES = ("K_heads", "V_heads", "K_pos", "kv_cache")


def row_axis(name: str) -> int:
    """The axis of a value that runs over tokens."""
    return 1 if name in ("S_masked", "A", "kv_cache", "padded_token_ids", "attention_mask") else 0
