"""The KV cache: a fixed pool of blocks, sized once; who holds which block; nothing of any model.

A block is held by any number of requests (a shared beginning), or idle (nobody holds it, but what
it holds may be asked for again), or free. Who asks for blocks gets the free ones first, then the
idle ones that were unused the longest.

block table of a request          pool (per layer, K and V alike)
positions  0..15 -> block 7       ┌────┬────┬────┬─   ─┬────┐
positions 16..31 -> block 2       │ 0  │ 1  │ 2  │ ... │ n-1│   each: [block_size, Hkv, dh]
positions 32..40 -> block 9       └────┴────┴────┴─   ─┴────┘
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seethrough.errors import CapacityError, KVIntegrityError
from seethrough.kv.prefix import PrefixCache

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one cached position takes."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    dtype: np.dtype[Any]

    @property
    def bytes_per_token(self) -> int:
        """K and V of one position over all layers."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """`num_blocks` blocks of `block_size` positions. Memory is touched only as blocks are used."""

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int = 16) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Both are seen as [layers, blocks, block_size, Hkv, dh]. In memory a block holds its heads
        # one after the other, K with its positions side by side (sixteen scores are one vector) and
        # V with a position's values side by side.
        heads, size = shape.n_kv_heads, shape.head_dim
        k = _pages((shape.n_layers, num_blocks, heads, size, block_size), shape.dtype)
        v = _pages((shape.n_layers, num_blocks, heads, block_size, size), shape.dtype)
        self.k: NDArray[Any] = k.transpose(0, 1, 4, 2, 3)
        self.v: NDArray[Any] = v.transpose(0, 1, 3, 2, 4)
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._holders: list[int] = [0] * num_blocks
        self.prefix = PrefixCache()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_blocks * self.block_size * self.shape.bytes_per_token

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds; the idle ones among them."""
        return len(self._free) + self.prefix.idle_count

    @property
    def free_list(self) -> tuple[int, ...]:
        """The free blocks, for the check of the books."""
        return tuple(self._free)

    @property
    def holders(self) -> dict[int, int]:
        """How many hold each block that anybody holds, for the check of the books."""
        return {block: count for block, count in enumerate(self._holders) if count}

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` positions take."""
        return -(-tokens // self.block_size)

    def require(self, tokens: int) -> None:
        """Refuse at the door what the whole pool could never hold."""
        needed = self.blocks_for(tokens)
        if needed > self.num_blocks:
            raise CapacityError(needed, self.num_blocks, self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks that nobody holds. The caller has asked `free_blocks` first."""
        if count > self.free_blocks:
            raise CapacityError(count, self.free_blocks, self.block_size)
        taken = [self._free.pop() if self._free else self.prefix.evict() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Hold blocks that `prefix` found, beside whoever holds them already."""
        for block in blocks:
            if self._holders[block] == 0:
                self.prefix.wake(block)
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back. Giving back a block that nobody holds is a bug and says so."""
        # From the end: the next to ask gets them in order (one run of memory), and of a text that
        # is remembered the end goes first, without which the beginning is still of use.
        for block in reversed(blocks):
            if not 0 <= block < self.num_blocks or self._holders[block] == 0:
                raise KVIntegrityError(f"block {block} is given back, but nobody holds it")
            self._holders[block] -= 1
            if self._holders[block] == 0 and not self.prefix.park(block):
                self._free.append(block)

    def forget(self) -> None:
        """Remember no text any more; blocks that are held stay where they are."""
        self._free += self.prefix.clear()


def _pages(size: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Zeros that start at a cache line, with room behind them for a vector that reads on."""
    nbytes = math.prod(size) * dtype.itemsize
    room = np.zeros(nbytes + 192, dtype=np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + nbytes].view(dtype).reshape(size)


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request, in order of position (S0 makes it empty)."""

    pool: KVPool
    blocks: list[int] = field(default_factory=list)
    _array: I64 = field(default_factory=lambda: np.empty(0, dtype=np.int64), repr=False)

    @property
    def array(self) -> I64:
        """The blocks as an array; made again only when there are more."""
        if len(self._array) != len(self.blocks):
            self._array = np.array(self.blocks, dtype=np.int64)
        return self._array

    def share(self, blocks: Sequence[int]) -> None:
        """Begin with blocks that others have filled."""
        self.pool.share(blocks)
        self.blocks += blocks

    def reserve(self, tokens: int) -> None:
        """Hold enough blocks for `tokens` positions in all."""
        self.blocks += self.pool.allocate(self.pool.blocks_for(tokens) - len(self.blocks))

    def release(self) -> None:
        """Give every block back; safe to call twice."""
        blocks, self.blocks = self.blocks, []
        self._array = np.empty(0, dtype=np.int64)
        self.pool.release(blocks)

    def slot(self, position: int) -> int:
        """Slot number of one position."""
        block, offset = divmod(position, self.pool.block_size)
        return self.blocks[block] * self.pool.block_size + offset

    def slots(self, start: int, stop: int) -> I64:
        """Slot numbers of positions start .. stop − 1."""
        positions = np.arange(start, stop)
        size = self.pool.block_size
        return self.array[positions // size] * size + positions % size
