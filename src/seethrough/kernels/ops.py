"""The contract of every operation that a model's program may name. No arithmetic lives here.

N rows (tokens of one step, all requests end to end), d model width, H query heads, Hkv key/value
heads, dh head size, V vocabulary. All activations are float32 and C-contiguous in their last axis.
An operation returns new arrays and never writes into its inputs; the one exception is `write_kv`.
A row of a result depends on that row of the inputs alone (and, in `attend`, on its own request).
`reference.py` says each of them in plain NumPy; another backend must agree within its tolerance.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from seethrough.kernels.batch import ForwardBatch

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


class KVCache(Protocol):
    """The part of a KV pool that operations see: pages of K and V for every layer."""

    k: NDArray[Any]  # [layers, blocks, block_size, Hkv, dh]; float32 or float16
    v: NDArray[Any]  # the same shape
    block_size: int


class Ops(Protocol):
    """What a backend provides: one function per operation."""

    def embed(self, token_ids: I64, table: Any, *, scale: float) -> F32:
        """Rows of the embedding table, times `scale`. [N], [V, d] -> [N, d]. (S4)"""
        ...

    def add_positions(self, x: F32, positions: I64, table: F32, *, offset: int) -> F32:
        """x plus row position + offset of a position table. [N, d] -> [N, d]. (S5)"""
        ...

    def rms_norm(self, x: F32, weight: F32, *, eps: float, weight_offset: float) -> F32:
        """x / √(mean(x²) + eps) · (weight + offset) over the last axis, any leading shape."""
        ...

    def layer_norm(
        self, x: F32, weight: F32, bias: F32, *, eps: float, weight_offset: float
    ) -> F32:
        """(x − mean) / √(var + eps) · (weight + offset) + bias over the last axis."""
        ...

    def linear(self, x: F32, weight: Any, bias: F32 | None = None) -> F32:
        """x · weightᵀ + bias. [N, in], [out, in] -> [N, out]."""
        ...

    def split_heads(self, x: F32, *, n_heads: int) -> F32:
        """[N, H·dh] -> [N, H, dh]; may be a view. (S6.2)"""
        ...

    def rotate(self, x: F32, positions: I64, cos: F32, sin: F32) -> F32:
        """Turn pair (i, i + dh/2) of every head by the row's angle i. (S6.3)

        [N, H, dh], tables [positions, dh/2] -> [N, H, dh]. Lengths of pairs stay as they are.
        """
        ...

    def write_kv(self, k: F32, v: F32, slots: I64, kv: KVCache, *, layer: int) -> None:
        """Round K and V to the cache's type and store them at `slots`. [N, Hkv, dh]. (S6.8)"""
        ...

    def attend(
        self,
        q: F32,
        kv: KVCache,
        batch: ForwardBatch,
        slopes: F32 | None = None,
        *,
        layer: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        scores: list[F32] | None = None,
    ) -> F32:
        """softmax(masked q·kᵀ·scale) · v, per request, K and V read from the cache only. (S6.4-5)

        [N, H, dh] -> [N, H, dh]. Query head h uses key/value head h // (H / Hkv). Order: scale,
        soft cap c·tanh(s/c), ALiBi slope·(key position − query position), then −∞ for keys after
        the query and for keys `window` or more positions before it. When `scores` is a list, the
        masked scores of each request, [H, n, t], are appended to it.
        """
        ...

    def merge_heads(self, x: F32) -> F32:
        """[N, H, dh] -> [N, H·dh]; may be a view. (S6.6)"""
        ...

    def add(self, x: F32, y: F32) -> F32:
        """x + y, the residual. [N, d]."""
        ...

    def activate(self, x: F32, *, kind: str) -> F32:
        """silu, gelu (erf form), gelu_tanh or relu, element by element. (S6.7)"""
        ...

    def gate(self, gate: F32, up: F32, *, kind: str) -> F32:
        """activate(gate) · up. [N, f] each. (S6.7)"""
        ...

    def take_rows(self, x: F32, rows: I64) -> F32:
        """Chosen rows. [N, d], [R] -> [R, d]. (S7)"""
        ...

    def softcap(self, x: F32, *, cap: float) -> F32:
        """cap · tanh(x / cap). (S9)"""
        ...
