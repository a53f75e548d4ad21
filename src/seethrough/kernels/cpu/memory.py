"""Memory for kernels: zeroed, from a cache line on, in large pages where the system has them."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_LARGE_PAGE = 2 << 20


def aligned(nbytes: int) -> Bytes:
    """So many zero bytes that start at a cache line, with a line of slack behind them."""
    room = np.zeros(nbytes + 128, dtype=np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + nbytes]


def _private(nbytes: int) -> mmap.mmap:
    """Anonymous memory. What Python maps by default is shared, and gets no large pages."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)


class Arena:
    """One block of memory, handed out piece by piece: weights are read from end to end.

    Matrices of half a megabyte each would lie in small pages; the processor then spends a good part
    of a decode step looking up addresses (docs/log.md).
    """

    def __init__(self, nbytes: int) -> None:
        size = -(-nbytes // _LARGE_PAGE) * _LARGE_PAGE
        room = _private(size + _LARGE_PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            room.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(room, dtype=np.uint8)
        start = -memory.ctypes.data % _LARGE_PAGE
        self._left: Bytes = memory[start : start + size]

    def take(self, nbytes: int) -> Bytes:
        """The next `nbytes`, zero, starting at a cache line."""
        size = -(-nbytes // 64) * 64
        if size > self._left.size:
            raise ValueError(f"{nbytes} bytes asked for, {self._left.size} are left")
        piece, self._left = self._left[:nbytes], self._left[size:]
        return piece
