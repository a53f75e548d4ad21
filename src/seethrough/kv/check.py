"""Do the books of the KV pool add up? Run when the engine is idle, and by every test's teardown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from seethrough.errors import KVIntegrityError
from seethrough.kv.pool import BlockTable, KVPool


def check_integrity(pool: KVPool, tables: Iterable[BlockTable]) -> None:
    """Every block is either free, once, or held by exactly one table; raise KVIntegrityError."""
    free = Counter(pool.free_list)
    held = Counter(block for table in tables for block in table.blocks)
    twice = [b for counts in (free, held) for b, n in counts.items() if n > 1]
    if twice:
        raise KVIntegrityError(f"blocks listed twice: {sorted(twice)}")
    if both := free.keys() & held.keys():
        raise KVIntegrityError(f"blocks both free and held: {sorted(both)}")
    if lost := set(range(pool.num_blocks)) - free.keys() - held.keys():
        raise KVIntegrityError(f"blocks that nobody holds and nobody can get: {sorted(lost)}")
    if foreign := (free.keys() | held.keys()) - set(range(pool.num_blocks)):
        raise KVIntegrityError(f"blocks that the pool does not have: {sorted(foreign)}")
    if pool.held != held.keys():
        raise KVIntegrityError(
            f"the pool counts {len(pool.held)} held blocks, the tables {len(held)}"
        )
