"""Every operation of `ops.py` in plain NumPy: right and readable; compared by tolerance, not bits.

Weights are float32 arrays here, whatever the file holds. Nothing knows a model.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from seethrough.kernels.batch import ForwardBatch
from seethrough.kernels.ops import KVCache

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


def embed(token_ids: I64, table: F32, *, scale: float) -> F32:
    """Rows of the embedding table, times `scale`."""
    x: F32 = table[token_ids] * np.float32(scale)  # [N, d]
    return x


def add_positions(x: F32, positions: I64, table: F32, *, offset: int) -> F32:
    """x plus each row's position vector."""
    return x + table[positions + offset]  # [N, d]


def rms_norm(x: F32, weight: F32, *, eps: float, weight_offset: float) -> F32:
    """Divide by the root mean square, then scale (arXiv:1910.07467)."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(eps)) * (weight + np.float32(weight_offset))


def layer_norm(x: F32, weight: F32, bias: F32, *, eps: float, weight_offset: float) -> F32:
    """Subtract the mean, divide by the standard deviation, scale and shift (arXiv:1607.06450)."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(np.square(centred), axis=-1, keepdims=True)
    scale = weight + np.float32(weight_offset)
    return centred / np.sqrt(variance + np.float32(eps)) * scale + bias


@np.errstate(invalid="ignore")  # inf from a float16 cache becomes NaN; the logits' check names it
def linear(x: F32, weight: F32, bias: F32 | None = None) -> F32:
    """x · weightᵀ + bias."""
    y: F32 = x @ weight.T  # [N, in] · [in, out]
    return y if bias is None else y + bias


def split_heads(x: F32, *, n_heads: int) -> F32:
    """[N, H·dh] seen as [N, H, dh]."""
    return x.reshape(len(x), n_heads, -1)


def rotate(x: F32, positions: I64, cos: F32, sin: F32) -> F32:
    """Turn each pair (i, i + dh/2) like a point in the plane (arXiv:2104.09864)."""
    cos, sin = cos[positions][:, None, :], sin[positions][:, None, :]  # [N, 1, dh/2]
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def write_kv(k: F32, v: F32, slots: I64, kv: KVCache, *, layer: int) -> None:
    """Store K and V at their slots, rounded to the cache's type."""
    block, offset = np.divmod(slots, kv.block_size)
    with np.errstate(over="ignore"):  # float16 overflow gives inf; the logits' check names it
        kv.k[layer, block, offset] = k
        kv.v[layer, block, offset] = v


@np.errstate(invalid="ignore")  # as above
def attend(
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
    """Attention of every request over its own cached positions."""
    out = np.empty_like(q)  # [N, H, dh]
    for b in range(batch.n_requests):
        rows = batch.rows_of(b)
        keys = _gather(kv.k[layer], batch.block_tables[b], int(batch.seq_lens[b]))  # [Hkv, t, dh]
        values = _gather(kv.v[layer], batch.block_tables[b], int(batch.seq_lens[b]))
        s = _scores(q[rows], keys, np.float32(scale))  # [H, n, t]
        if softcap is not None:
            s = np.float32(softcap) * np.tanh(s / np.float32(softcap))
        distance = batch.positions[rows][:, None] - np.arange(s.shape[-1])[None, :]  # [n, t]
        if slopes is not None:
            s = s - slopes[:, None, None] * distance.astype(np.float32)
        s = np.where(_hidden(distance, window), np.float32(-np.inf), s)
        if scores is not None:
            scores.append(s)
        out[rows] = _weigh(softmax(s), values)
    return out


def _gather(pages: NDArray[np.floating], table: I64, length: int) -> F32:
    """The first `length` cached vectors of one request. [blocks, block, Hkv, dh] -> [Hkv, t, dh]"""
    block_size = pages.shape[1]
    blocks = pages[table[: -(-length // block_size)]]
    flat = blocks.reshape(-1, *pages.shape[2:])[:length]  # [t, Hkv, dh]
    return np.ascontiguousarray(flat.transpose(1, 0, 2), dtype=np.float32)


def _scores(q: F32, keys: F32, scale: np.float32) -> F32:
    """Dot products of every query head with its key head. [n, H, dh], [Hkv, t, dh] -> [H, n, t]"""
    n, n_heads, head_dim = q.shape
    n_kv, t, _ = keys.shape
    grouped = q.transpose(1, 0, 2).reshape(n_kv, -1, head_dim)  # [Hkv, H/Hkv · n, dh]
    return (grouped @ keys.transpose(0, 2, 1) * scale).reshape(n_heads, n, t)


def _hidden(distance: I64, window: int | None) -> NDArray[np.bool_]:
    """Which keys a query must not see: the future, and what lies outside its window."""
    hidden = distance < 0
    return hidden if window is None else hidden | (distance >= window)


def softmax(s: F32) -> F32:
    """Softmax over the last axis; −∞ entries become exactly 0."""
    e = np.exp(s - np.max(s, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


def _weigh(weights: F32, values: F32) -> F32:
    """Weighted sum of values. [H, n, t], [Hkv, t, dh] -> [n, H, dh]"""
    n_heads, n, t = weights.shape
    n_kv, _, head_dim = values.shape
    mixed = weights.reshape(n_kv, -1, t) @ values  # [Hkv, H/Hkv · n, dh]
    return mixed.reshape(n_heads, n, head_dim).transpose(1, 0, 2)


def merge_heads(x: F32) -> F32:
    """[N, H, dh] seen as [N, H·dh]."""
    return x.reshape(len(x), -1)


def add(x: F32, y: F32) -> F32:
    """The residual sum."""
    return x + y


def activate(x: F32, *, kind: str) -> F32:
    """The MLP's non-linearity."""
    return _ACTIVATIONS[kind](x)


def gate(gate: F32, up: F32, *, kind: str) -> F32:
    """A gated MLP's product (arXiv:2002.05202)."""
    return _ACTIVATIONS[kind](gate) * up


def take_rows(x: F32, rows: I64) -> F32:
    """Chosen rows."""
    return x[rows]


def softcap(x: F32, *, cap: float) -> F32:
    """Press values softly into (−cap, cap)."""
    return np.float32(cap) * np.tanh(x / np.float32(cap))


def _silu(x: F32) -> F32:
    # x · sigmoid(x), with the sigmoid through tanh: no overflow at either end.
    return x * (np.float32(0.5) * np.tanh(np.float32(0.5) * x) + np.float32(0.5))


def _gelu(x: F32) -> F32:
    # NumPy has no erf; the standard library's is exact to the last digit, one value at a time.
    erf = np.array([math.erf(v) for v in (x.ravel() * math.sqrt(0.5)).tolist()], dtype=np.float32)
    return np.float32(0.5) * x * (1 + erf.reshape(x.shape))


def _gelu_tanh(x: F32) -> F32:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


def _relu(x: F32) -> F32:
    return np.maximum(x, np.float32(0))


_ACTIVATIONS = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "relu": _relu}
