"""Blocks found again by what they hold: equal beginnings of texts share their K and V.

A full block's key is a SHA-256 over the key of the block before it and its own token ids, so it
names everything from position 0 on; the first is chained to a root that a caller may salt. K and V
of a position depend on the ids up to it and on nothing else, to the bit, so a block that is found
is the block that would be computed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

Key = bytes


def root_key(salt: str | None) -> Key:
    """What the first block's key is chained to. Without a salt and with an empty one are two."""
    tagged = b"plain" if salt is None else b"salt " + salt.encode("utf-8", "surrogatepass")
    return hashlib.sha256(b"seethrough kv " + tagged).digest()


class KeyChain:
    """The keys of one text's full blocks, made as the text grows."""

    def __init__(self, salt: str | None, block_size: int) -> None:
        self._size = block_size
        self._last = root_key(salt)
        self.keys: list[Key] = []

    def copy(self) -> KeyChain:
        """Another text that begins alike."""
        other = KeyChain(None, self._size)
        other._last, other.keys = self._last, self.keys.copy()
        return other

    @property
    def tokens(self) -> int:
        """How many ids the keys cover."""
        return len(self.keys) * self._size

    def extend(self, ids: Sequence[int]) -> None:
        """Go on with the ids behind `tokens`; what fills no block is left for the next call."""
        packed = array("q", ids).tobytes()
        step = 8 * self._size
        for start in range(0, len(packed) - step + 1, step):
            self._last = hashlib.sha256(self._last + packed[start : start + step]).digest()
            self.keys.append(self._last)


class PrefixCache:
    """Which block holds which key, and which of these blocks nobody uses, longest unused first.

    Knows a block only as long as the pool has not given it to somebody else, so its books never
    outgrow the pool.
    """

    def __init__(self) -> None:
        self._blocks: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def idle(self) -> tuple[int, ...]:
        """Blocks that are remembered and that nobody holds, in the order in which they will go."""
        return tuple(self._idle)

    @property
    def idle_count(self) -> int:
        """How many they are."""
        return len(self._idle)

    @property
    def books(self) -> tuple[dict[Key, int], dict[int, Key]]:
        """Blocks by key and keys by block, for the check."""
        return dict(self._blocks), dict(self._keys)

    def find(self, keys: Sequence[Key]) -> list[int]:
        """The blocks of the longest beginning of `keys` that is remembered without a gap."""
        found = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def is_idle(self, block: int) -> bool:
        """Whether it is remembered and nobody holds it."""
        return block in self._idle

    def remember(self, key: Key, block: int) -> None:
        """A block that somebody holds is full of this; the first to hold a key keeps it."""
        if key not in self._blocks and block not in self._keys:
            self._blocks[key] = block
            self._keys[block] = key

    def park(self, block: int) -> bool:
        """Nobody holds the block any more: whether it is worth keeping."""
        if block not in self._keys:
            return False
        self._idle[block] = None
        return True

    def wake(self, block: int) -> None:
        """Somebody holds an idle block again."""
        del self._idle[block]

    def evict(self) -> int:
        """Forget the block that was unused the longest, and give it away."""
        block, _ = self._idle.popitem(last=False)
        del self._blocks[self._keys.pop(block)]
        return block

    def clear(self) -> list[int]:
        """Forget everything; returns the blocks that were idle."""
        idle = list(self._idle)
        self._blocks.clear()
        self._keys.clear()
        self._idle.clear()
        return idle
