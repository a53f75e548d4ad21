"""Row kernels of the `cpu` backend on arrays."""

from __future__ import annotations

import numpy as np
from cpu_harness import Call, kernels, padded
from numpy.typing import NDArray

from seethrough.kernels.cpu.forms import ACT_BYTES
from seethrough.kernels.cpu.memory import aligned
from seethrough.kernels.cpu.record import E

F32 = NDArray[np.float32]


def bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def quantize_rows(x: F32, threads: int = 1) -> tuple[NDArray[np.int8], F32]:
    """The whole numbers [n, width] and the scales [n, width / 32] of the quantizing kernel."""
    n, width = x.shape
    source = padded(x)
    stride = width // 32 * ACT_BYTES
    room = aligned(n * stride)
    words: dict[int, int] = {
        E.X: source.ctypes.data,
        E.X_STRIDE: source.strides[0],
        E.SIZE: width,
        E.Q: room.ctypes.data,
        E.Q_STRIDE: stride,
    }
    address = kernels().address("quantize")
    Call(address, words, n, {}).run(threads)
    blocks = room.reshape(n, -1, ACT_BYTES)
    q = np.ascontiguousarray(blocks[..., :32]).view(np.int8).reshape(n, width)
    scale = np.ascontiguousarray(blocks[..., 32:36]).view(np.float32)[..., 0]
    return q, scale


def norm(x: F32, weight: F32, eps: float, bias: F32 | None = None, threads: int = 1) -> F32:
    """RMSNorm, or LayerNorm where there is a bias."""
    n, width = x.shape
    source, out = padded(x), padded(np.zeros_like(x))
    scale = padded(weight[None])
    shift = None if bias is None else padded(bias[None])
    words: dict[int, int] = {
        E.X: source.ctypes.data,
        E.X_STRIDE: source.strides[0],
        E.Y: out.ctypes.data,
        E.Y_STRIDE: out.strides[0],
        E.SIZE: width,
        E.HEADS: 1,
        E.WEIGHT: scale.ctypes.data,
        E.BIAS: 0 if shift is None else shift.ctypes.data,
        E.NUMBER: bits(eps),
    }
    name = "rms_norm" if bias is None else "layer_norm"
    Call(kernels().address(name), words, n, {}).run(threads)
    return out[:, :width]


def activate(x: F32, kind: str, other: F32 | None = None, threads: int = 1) -> F32:
    """act(x), times `other` where given."""
    n, width = x.shape
    source, out = padded(x), padded(np.zeros_like(x))
    second = None if other is None else padded(other)
    words: dict[int, int] = {
        E.X: source.ctypes.data,
        E.X_STRIDE: source.strides[0],
        E.Y: out.ctypes.data,
        E.Y_STRIDE: out.strides[0],
        E.SIZE: width,
    }
    if second is not None:
        words |= {E.OTHER: second.ctypes.data, E.OTHER_STRIDE: second.strides[0]}
    gated = other is not None
    name = f"{'gate' if gated else 'activate'}_{kind}"
    Call(kernels().address(name), words, n, {}).run(threads)
    return out[:, :width]
