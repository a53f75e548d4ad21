"""Do the books of the KV pool add up? Run when the engine is idle, and by every test's teardown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from seethrough.errors import KVIntegrityError
from seethrough.kv.pool import BlockTable, KVPool


def check_integrity(pool: KVPool, tables: Iterable[BlockTable]) -> None:
    """Every block is free, or idle, or held by exactly the tables that list it.

    Raises:
        KVIntegrityError: names the blocks for which that is not so.
    """
    tables = list(tables)
    free, idle = Counter(pool.free_list), Counter(pool.prefix.idle)
    held = Counter(block for table in tables for block in table.blocks)
    within = [b for table in tables for b, n in Counter(table.blocks).items() if n > 1]
    twice = [b for counts in (free, idle) for b, n in counts.items() if n > 1]
    if within or twice:
        raise KVIntegrityError(f"blocks listed twice: {sorted({*within, *twice})}")
    if both := (free.keys() | idle.keys()) & held.keys():
        raise KVIntegrityError(f"blocks both free and held: {sorted(both)}")
    if both := free.keys() & idle.keys():
        raise KVIntegrityError(f"blocks both free and idle: {sorted(both)}")
    known = free.keys() | idle.keys() | held.keys()
    if lost := set(range(pool.num_blocks)) - known:
        raise KVIntegrityError(f"blocks that nobody holds and nobody can get: {sorted(lost)}")
    if foreign := known - set(range(pool.num_blocks)):
        raise KVIntegrityError(f"blocks that the pool does not have: {sorted(foreign)}")
    counted = pool.holders
    if wrong := [b for b in counted.keys() | held.keys() if counted.get(b, 0) != held[b]]:
        shown = ", ".join(f"{b}: {counted.get(b, 0)} against {held[b]}" for b in sorted(wrong)[:8])
        raise KVIntegrityError(f"holders as the pool counts them against the tables: {shown}")
    _check_prefix(pool, free)


def _check_prefix(pool: KVPool, free: Counter[int]) -> None:
    """A key leads to a block and back, to one that is not free; what is idle has a key."""
    blocks, keys = pool.prefix.books
    if {block: key for key, block in blocks.items()} != keys:
        raise KVIntegrityError("the prefix cache's keys and blocks do not mirror each other")
    if both := free.keys() & keys.keys():
        raise KVIntegrityError(f"blocks both free and remembered: {sorted(both)}")
    if nameless := set(pool.prefix.idle) - keys.keys():
        raise KVIntegrityError(f"idle blocks that nothing can find: {sorted(nameless)}")
