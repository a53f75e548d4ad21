"""A weight matrix in the kernels' layout: packed once, at load, by all threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seethrough.kernels.cpu.compiled import Kernels
from seethrough.kernels.cpu.forms import BLOCK, FORMS, LANES, SUPER, packed_bytes
from seethrough.kernels.cpu.memory import Arena

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix [rows, columns] in groups of sixteen rows.

    Attributes:
        dtype: its type in the file, which names the kernel.
        depth: what the kernel counts along a row: blocks of 32 columns, or columns.
    """

    dtype: str
    rows: int
    columns: int
    groups: int
    group_bytes: int
    depth: int
    data: Bytes

    @property
    def quantized(self) -> bool:
        """Whether it meets int8 activations."""
        return self.dtype in FORMS

    @property
    def address(self) -> int:
        """Where its first group lies."""
        return int(self.data.ctypes.data)


class Packer:
    """Packs matrices with compiled code on all threads, one after the other, into one arena."""

    def __init__(self, kernels: Kernels, threads: int, nbytes: int) -> None:
        self._kernels, self._threads = kernels, threads
        self._pool = ThreadPoolExecutor(threads)
        self._arena = Arena(nbytes)

    def pack(self, dtype: str, shape: tuple[int, ...], data: Bytes) -> Packed:
        """Pack a matrix given by its bytes in the file, row by row."""
        rows, columns = shape
        groups = -(-rows // LANES)
        quantized = dtype in FORMS
        depth = columns // BLOCK if quantized else columns
        group_bytes = packed_bytes(dtype, (1, columns))
        target = self._arena.take(groups * group_bytes)
        packed = Packed(dtype, rows, columns, groups, group_bytes, depth, target)
        source = np.ascontiguousarray(data)
        call = self._quantized(packed, source) if quantized else self._floats(packed, source)
        edges = np.linspace(0, groups, min(groups, 4 * self._threads) + 1).astype(int).tolist()
        list(self._pool.map(call, edges[:-1], edges[1:]))
        return packed

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _quantized(self, packed: Packed, source: Bytes) -> Callable[[int, int], None]:
        form = FORMS[packed.dtype]
        function = self._kernels.callable(f"pack_{packed.dtype}", 9)
        units = packed.depth if form.levels == 1 else packed.depth // SUPER
        row_bytes = source.size // packed.rows
        words = (row_bytes, packed.rows, row_bytes // units, packed.depth)
        at, to = int(source.ctypes.data), (packed.address, packed.group_bytes)
        return lambda first, stop: function(at, *words, *to, first, stop)

    def _floats(self, packed: Packed, source: Bytes) -> Callable[[int, int], None]:
        function = self._kernels.callable(f"pack_{packed.dtype}", 6)
        words = (int(source.ctypes.data), packed.rows, packed.columns, packed.address)
        return lambda first, stop: function(*words, first, stop)
