"""A named tensor as stored: element type, shape, raw bytes. Knows no file and no model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from seethrough.errors import CheckpointError
from seethrough.weights.gguf.blocks import DEQUANTIZE

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

MAX_RANK = 8
MAX_BYTES = 1 << 62  # shapes stay far inside NumPy's signed 64-bit index
_CHUNK_ELEMENTS = 1 << 18  # dequantize about 1 MB of floats at a time: temporaries stay in cache


@dataclass(frozen=True, slots=True)
class DType:
    """How elements lie: `block_size` neighbours of the last axis share `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        """Whether elements are packed in blocks with a shared scale."""
        return self.block_size > 1

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of `shape`; `ValueError` says why a shape cannot be stored."""
        if len(shape) > MAX_RANK:
            raise ValueError(f"it has {len(shape)} dimensions, at most {MAX_RANK} are read")
        if any(n < 0 for n in shape):
            raise ValueError(f"shape {list(shape)} has a negative dimension")
        # Zeros are left out of the bound: [0, 2**63] holds nothing, yet NumPy could not index it.
        if math.prod(n for n in shape if n) * self.block_bytes > MAX_BYTES:
            raise ValueError(f"shape {list(shape)} is larger than any file")
        if self.is_quantized and (not shape or shape[-1] % self.block_size):
            raise ValueError(
                f"rows of shape {list(shape)} are not a multiple of {self.name}'s "
                f"block of {self.block_size} elements"
            )
        return math.prod(shape) // self.block_size * self.block_bytes


F32 = DType("F32", 1, 4)
F16 = DType("F16", 1, 2)
BF16 = DType("BF16", 1, 2)
Q4_0 = DType("Q4_0", 32, 18)
Q4_1 = DType("Q4_1", 32, 20)
Q5_0 = DType("Q5_0", 32, 22)
Q5_1 = DType("Q5_1", 32, 24)
Q8_0 = DType("Q8_0", 32, 34)
Q4_K = DType("Q4_K", 256, 144)
Q5_K = DType("Q5_K", 256, 176)
Q6_K = DType("Q6_K", 256, 210)

DTYPES: dict[str, DType] = {
    t.name: t for t in (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K)
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """Raw weights. `shape` is in NumPy order (outputs first), `data` flat uint8 [nbytes].

    `data` is usually a view into a memory map. Changing the file while it is mapped is out of
    scope: the views would show the new bytes, and reading past a cut end ends the process.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    data: Bytes

    def __post_init__(self) -> None:
        try:
            expected = self.dtype.nbytes(self.shape)
        except ValueError as error:
            raise CheckpointError(f"tensor {self.name!r}: {error}") from None
        if self.data.dtype != np.uint8 or self.data.shape != (expected,):
            raise CheckpointError(
                f"tensor {self.name!r}: {self.dtype.name} {list(self.shape)} needs {expected} flat "
                f"bytes, got {self.data.dtype} of shape {list(self.data.shape)}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return int(self.data.size)

    def to_f32(self) -> Floats:
        """A new float32 array of `shape`: exact for F32, F16 and BF16, else dequantized."""
        if self.dtype is F32:
            return self.data.view("<f4").astype(np.float32).reshape(self.shape)
        if self.dtype is F16:
            return self.data.view("<f2").astype(np.float32).reshape(self.shape)
        if self.dtype is BF16:  # BF16 is the upper half of a float32
            bits = self.data.view("<u2").astype(np.uint32)
            return np.left_shift(bits, 16, out=bits).view(np.float32).reshape(self.shape)
        return self._dequantized()

    def _dequantized(self) -> Floats:
        function, size = DEQUANTIZE[self.dtype.name], self.dtype.block_size
        blocks = self.data.reshape(-1, self.dtype.block_bytes)
        out = np.empty((len(blocks), size), dtype=np.float32)
        step = _CHUNK_ELEMENTS // size
        # A damaged scale (inf, NaN) gives NaN weights, seen downstream; a warning adds nothing.
        with np.errstate(invalid="ignore"):
            for start in range(0, len(blocks), step):
                out[start : start + step] = function(blocks[start : start + step])
        return out.reshape(self.shape)

    def _rows(self) -> Bytes:
        """The bytes as [shape[0], bytes of a row]; rows are independent in every format."""
        if not self.shape or (self.dtype.is_quantized and len(self.shape) == 1):
            raise CheckpointError(
                f"tensor {self.name!r}: {self.dtype.name} {list(self.shape)} has no rows to take"
            )
        return self.data.reshape(self.shape[0], self.dtype.nbytes((1, *self.shape[1:])))

    def take_rows(self, index: Sequence[int] | NDArray[np.integer]) -> Tensor:
        """Rows of the first axis in the order of `index` (repeats allowed), a copy of raw bytes."""
        rows, picked = self._rows(), np.asarray(index)
        if picked.size == 0:
            picked = picked.astype(np.int64)
        if picked.ndim != 1 or picked.dtype.kind not in "iu":
            raise CheckpointError(
                f"tensor {self.name!r}: row numbers must be a flat list of integers"
            )
        if picked.size and (picked.min() < 0 or picked.max() >= len(rows)):
            raise CheckpointError(
                f"tensor {self.name!r}: row numbers span {picked.min()}..{picked.max()}, "
                f"but it has {len(rows)} rows"
            )
        shape = (picked.size, *self.shape[1:])
        return replace(self, shape=shape, data=rows[picked].reshape(-1))

    def slice_rows(self, start: int, stop: int) -> Tensor:
        """Rows start..stop-1 of the first axis, as a view."""
        rows = self._rows()
        if not 0 <= start <= stop <= len(rows):
            raise CheckpointError(
                f"tensor {self.name!r}: rows {start}..{stop} asked for, but it has {len(rows)} rows"
            )
        shape = (stop - start, *self.shape[1:])
        return replace(self, shape=shape, data=rows[start:stop].reshape(-1))

    def transpose(self) -> Tensor:
        """The transposed matrix, a copy. 2-D float types only: blocks run along rows."""
        if self.dtype.is_quantized:
            raise CheckpointError(
                f"tensor {self.name!r} is {self.dtype.name}: its blocks run along rows, so it "
                "cannot be transposed without quantizing again. Use the unquantized weights."
            )
        if len(self.shape) != 2:
            raise CheckpointError(f"tensor {self.name!r}: {list(self.shape)} is not a matrix")
        rows, columns = self.shape
        cells = self.data.reshape(rows, columns, self.dtype.block_bytes)
        data = np.ascontiguousarray(cells.transpose(1, 0, 2)).reshape(-1)
        return replace(self, shape=(columns, rows), data=data)

    def renamed(self, name: str) -> Tensor:
        """The same bytes under another name."""
        return replace(self, name=name)
