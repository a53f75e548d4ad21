"""Runs single kernels of the `cpu` backend on arrays, and says what they should give, plainly."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seethrough.kernels.cpu.compiled import Kernels
from seethrough.kernels.cpu.forms import ACT_BYTES, FORMS, packed_bytes
from seethrough.kernels.cpu.memory import aligned
from seethrough.kernels.cpu.record import RECORD_WORDS, STEP_WORDS, L, R, S
from seethrough.kernels.cpu.weights import Packed, Packer
from seethrough.kernels.cpu.workers import Workers
from seethrough.weights.catalog import default_cache_dir
from seethrough.weights.tensor import DTYPES, Tensor

Array = NDArray[Any]
F32 = NDArray[np.float32]


@cache
def kernels() -> Kernels:
    return Kernels(default_cache_dir().parent / "kernels")


@cache
def team(threads: int) -> Workers:
    return Workers(threads, kernels(), 4)


def padded(x: F32) -> F32:
    """Rows that start at a cache line, padded to sixteen values."""
    rows, width = x.shape
    stride = -(-width // 16) * 16
    room = aligned(4 * rows * stride).view(np.float32).reshape(rows, stride)
    room[:, :width] = x
    return room


@dataclass
class Call:
    """One kernel, its words, and the rows of the step."""

    kernel: int
    words: dict[int, int]
    rows: int
    step: dict[int, int]

    def run(self, threads: int = 1) -> None:
        record = np.zeros(RECORD_WORDS, dtype=np.int64)
        step = np.zeros(STEP_WORDS, dtype=np.int64)
        record[R.KERNEL], record[R.ROWS] = self.kernel, S.ROWS
        for word, value in self.words.items():
            record[word] = value
        workers = team(threads)
        step[S.ROWS], step[S.SHARES], step[S.THREADS] = self.rows, 8 * threads, threads
        step[S.COUNTERS], step[S.BARRIER] = workers.counters, workers.barrier
        for word, value in self.step.items():
            step[word] = value
        workers.run(record.ctypes.data, 0, 1, step.ctypes.data)


def random_tensor(dtype: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    """A tensor of any stored type with random bits everywhere, and scales of a sane size."""
    kind, rng = DTYPES[dtype], np.random.default_rng(seed)
    if not kind.is_quantized:
        values = rng.standard_normal((rows, columns)).astype(np.float32)
        raw = {"F32": values, "F16": values.astype(np.float16)}.get(dtype)
        if raw is None:  # BF16: the upper half of a float32
            raw = (values.view(np.uint32) >> 16).astype(np.uint16)
        return Tensor("t", kind, (rows, columns), np.ascontiguousarray(raw).view(np.uint8).ravel())
    count = rows * columns // kind.block_size
    blocks = rng.integers(0, 256, (count, kind.block_bytes), dtype=np.uint8)
    places = {"Q6_K": [208]}.get(
        dtype, [0, 2] if dtype in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [0]
    )
    for place in places:
        scale = rng.uniform(-0.02, 0.02, count).astype("<f2")
        blocks[:, place : place + 2] = scale.view(np.uint8).reshape(count, 2)
    return Tensor("t", kind, (rows, columns), blocks.reshape(-1))


def packed(tensor: Tensor, threads: int = 2) -> Packed:
    rows, columns = tensor.shape
    packer = Packer(kernels(), threads, packed_bytes(tensor.dtype.name, (rows, columns)) + 64)
    result = packer.pack(tensor.dtype.name, (rows, columns), tensor.data)
    packer.close()
    return result


def quantized(x: F32) -> tuple[Array, NDArray[np.int8], F32]:
    """int8 activations as the kernels define them: bytes, the whole numbers, the scales."""
    rows, columns = x.shape
    blocks = x.reshape(rows, -1, 32)
    top = np.abs(blocks).max(axis=-1)
    with np.errstate(divide="ignore"):
        inverse = np.where(top > 0, np.float32(127) / top, np.float32(0))
    q = np.rint(blocks * inverse[..., None]).astype(np.int8)
    scale = top / np.float32(127)
    low, high = (half.sum(axis=-1, dtype=np.int32) for half in (q[..., :16], q[..., 16:]))
    room = aligned(rows * columns // 32 * ACT_BYTES).reshape(rows, -1, ACT_BYTES)
    room[..., :32] = q.view(np.uint8)
    scaled = (scale * (low + high).astype(np.float32)).astype(np.float32)
    for place, part in ((32, scale), (36, scaled), (40, low), (44, high)):
        room[..., place : place + 4] = np.ascontiguousarray(part)[..., None].view(np.uint8)
    return room.reshape(rows, -1), q.reshape(rows, columns), scale


def linear(matrix: Packed, x: F32, bias: F32 | None = None, threads: int = 1) -> F32:
    """x · Wᵀ + bias by the kernel of the matrix's type."""
    rows = len(x)
    out = aligned(4 * rows * matrix.groups * 16).view(np.float32).reshape(rows, -1)
    out[:] = np.nan
    source = quantized(x)[0] if matrix.quantized else padded(x)
    shift = None if bias is None else padded(bias[None])
    words: dict[int, int] = {
        L.WEIGHTS: matrix.address,
        L.GROUP_BYTES: matrix.group_bytes,
        L.GROUPS: matrix.groups,
        L.DEPTH: matrix.depth,
        L.X: source.ctypes.data,
        L.X_STRIDE: source.strides[0],
        L.Y: out.ctypes.data,
        L.Y_STRIDE: out.strides[0],
        L.BIAS: 0 if shift is None else shift.ctypes.data,
    }
    kernel = kernels().address(f"linear_{matrix.dtype}")
    Call(kernel, words, rows, {}).run(threads)
    return out[:, : matrix.rows]


def expected_linear(tensor: Tensor, x: F32) -> NDArray[np.float64]:
    """What the kernel approximates: the file's weights times the activations it sees."""
    weights = tensor.to_f32().astype(np.float64)
    if tensor.dtype.name not in FORMS:
        return x.astype(np.float64) @ weights.T
    _, q, scale = quantized(x)
    seen = q.reshape(len(x), -1, 32) * scale.astype(np.float64)[..., None]
    return seen.reshape(x.shape) @ weights.T
