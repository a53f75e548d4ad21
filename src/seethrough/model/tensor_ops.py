"""The named operations that turn a file's tensor into canonical ones; all work on whole rows.

Rows of a quantized matrix are independent, so that picking and ordering rows needs no arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from seethrough.errors import CheckpointError
from seethrough.model.spec import TransformerSpec
from seethrough.weights.tensor import Tensor

TensorOp = Callable[[Tensor, TransformerSpec], tuple[Tensor, ...]]


def keep(tensor: Tensor, spec: TransformerSpec) -> tuple[Tensor, ...]:
    """As it is."""
    return (tensor,)


def transpose(tensor: Tensor, spec: TransformerSpec) -> tuple[Tensor, ...]:
    """[in, out] to [out, in] (GPT-2's Conv1D); a bias stays."""
    return (tensor.transpose() if len(tensor.shape) == 2 else tensor,)


def split_qkv(tensor: Tensor, spec: TransformerSpec) -> tuple[Tensor, ...]:
    """Rows [Q; K; V] on top of each other, into three."""
    q, kv = spec.q_size, spec.kv_size
    _need_rows(tensor, q + 2 * kv)
    ends = (0, q, q + kv, q + 2 * kv)
    return tuple(tensor.slice_rows(a, b) for a, b in pairwise(ends))


def transpose_split_qkv(tensor: Tensor, spec: TransformerSpec) -> tuple[Tensor, ...]:
    """[in, Q + K + V] to three [out, in] (GPT-2's c_attn)."""
    (rows,) = transpose(tensor, spec)
    return split_qkv(rows, spec)


def split_qkv_per_head(tensor: Tensor, spec: TransformerSpec) -> tuple[Tensor, ...]:
    """Rows ordered head by head as q, k, v of head 0, q, k, v of head 1, … (BLOOM), into three."""
    _need_rows(tensor, 3 * spec.q_size)
    rows = np.arange(3 * spec.q_size).reshape(spec.n_heads, 3, spec.head_dim)
    return tuple(tensor.take_rows(rows[:, part].reshape(-1)) for part in range(3))


def unpermute_q(tensor: Tensor, spec: TransformerSpec) -> tuple[Tensor, ...]:
    """GGUF's llama keeps rotary pairs next to each other; back to halves (i, i + dh/2)."""
    return (_unpermute(tensor, spec.n_heads, spec.head_dim),)


def unpermute_k(tensor: Tensor, spec: TransformerSpec) -> tuple[Tensor, ...]:
    """The same for keys, which may have fewer heads."""
    return (_unpermute(tensor, spec.n_kv_heads, spec.head_dim),)


def _unpermute(tensor: Tensor, n_heads: int, head_dim: int) -> Tensor:
    _need_rows(tensor, n_heads * head_dim)
    rows = np.arange(n_heads * head_dim).reshape(n_heads, head_dim // 2, 2)
    return tensor.take_rows(rows.swapaxes(1, 2).reshape(-1))


def _need_rows(tensor: Tensor, rows: int) -> None:
    if not tensor.shape or tensor.shape[0] != rows:
        raise CheckpointError(
            f"tensor {tensor.name} has shape {list(tensor.shape)}; "
            f"the config asks for {rows} in its first dimension"
        )
