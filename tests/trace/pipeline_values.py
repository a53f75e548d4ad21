"""Every value of a sequence's stages as `pipeline.py` computes it, laid out as a trace lays it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from seethrough import LLM, pipeline
from seethrough.model.load import build_program

Key = tuple[str, str, int | None]


def float_weights(llm: LLM) -> Mapping[str, Any]:
    """Every weight as float32."""
    return build_program(llm.weights, llm.max_model_len).weights


def pipeline_values(llm: LLM, ids: Sequence[int]) -> dict[Key, np.ndarray]:
    """Stage, value and layer to the array over all positions; x_last, h and logits too."""
    spec, weights = llm.spec, float_weights(llm)
    padded, mask = pipeline.pad_and_mask([list(ids)])
    values: dict[Key, np.ndarray] = {("S3", "padded_token_ids", None): padded}
    values["S3", "attention_mask", None] = mask.astype(np.int8)
    x = pipeline.embed(spec, weights, padded)
    values["S4", "X", None] = x[0]
    moved, positions = pipeline.add_positions(spec, weights, x, mask)
    if spec.positions in ("learned", "sinusoidal"):
        values["S5", "X", None] = moved[0]
    values["S5", "positions", None] = positions[0]
    x = moved
    for i in range(spec.n_layers):
        x = _layer(llm, i, x, mask, positions, values)
    values["S6", "XL", None] = x[0]
    values["S7", "x_last", None] = x[0]
    h = pipeline.final_norm(spec, weights, x)
    values["S8", "h", None] = h[0]
    values["S9", "logits", None] = pipeline.lm_head(spec, weights, h)[0]
    return values


def _layer(
    llm: LLM,
    i: int,
    x: np.ndarray,
    mask: np.ndarray,
    positions: np.ndarray,
    values: dict[Key, np.ndarray],
) -> np.ndarray:
    spec, layer = llm.spec, llm.spec.layers[i]
    w = pipeline.layer_weights(float_weights(llm), i)

    def keep(stage: str, **arrays: np.ndarray) -> None:
        values.update({(stage, name, i): array for name, array in arrays.items()})

    q, k, v = pipeline.norm_and_project(spec, w, x)
    keep("S6.1", Q=q[0], K=k[0], V=v[0])
    q, k, v = pipeline.split_heads(spec, w, q, k, v)  # [B, H, n, dh]
    keep("S6.2", Q_heads=q[0].swapaxes(0, 1), K_heads=k[0].swapaxes(0, 1))
    keep("S6.2", V_heads=v[0].swapaxes(0, 1))
    q, k = pipeline.rotate(spec, layer, q, k, positions)
    if layer.rope is not None:
        keep("S6.3", Q_pos=q[0].swapaxes(0, 1), K_pos=k[0].swapaxes(0, 1))
    scores = pipeline.masked_scores(spec, layer, q, k, mask, positions)
    keep("S6.4", S_masked=scores[0])
    heads = pipeline.weigh_values(scores, v)
    keep("S6.5", A=pipeline.softmax(scores)[0], O_heads=heads[0].swapaxes(0, 1))
    keep("S6.8", kv_cache=np.stack([k[0].swapaxes(0, 1), v[0].swapaxes(0, 1)]))
    x_prime = pipeline.project_and_add(spec, w, heads, x)
    keep("S6.6", X_prime=x_prime[0])
    updated = pipeline.mlp_and_add(spec, w, x_prime)
    keep("S6.7", X_updated=updated[0])
    return updated
