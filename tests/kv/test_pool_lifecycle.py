"""The pool's books: blocks are free or held once, through every order of events."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from seethrough.errors import CapacityError, KVIntegrityError, SeethroughError
from seethrough.kv.check import check_integrity
from seethrough.kv.pool import BlockTable, KVPool, KVShape

SHAPE = KVShape(n_layers=2, n_kv_heads=1, head_dim=4, dtype=np.dtype("f4"))


def small(num_blocks: int = 6, block_size: int = 4) -> KVPool:
    return KVPool(SHAPE, num_blocks, block_size)


class Lifecycle(RuleBasedStateMachine):
    """Requests come, grow and go; a model in plain sets says what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = small(9, 4)
        self.tables: list[BlockTable] = []
        self.tokens: list[int] = []

    @rule()
    def arrive(self) -> None:
        self.tables.append(BlockTable(self.pool))
        self.tokens.append(0)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), more=st.integers(1, 20))
    def grow(self, data: st.DataObject, more: int) -> None:
        i = data.draw(st.integers(0, len(self.tables) - 1))
        table, before = self.tables[i], list(self.tables[i].blocks)
        wanted = -(-(self.tokens[i] + more) // 4) - len(before)
        free = self.pool.free_blocks
        if wanted > free:
            with pytest.raises(CapacityError):
                table.reserve(self.tokens[i] + more)
            assert table.blocks == before
            assert self.pool.free_blocks == free
        else:
            table.reserve(self.tokens[i] + more)
            self.tokens[i] += more
            assert table.blocks[: len(before)] == before  # what is cached stays where it is

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), twice=st.booleans())
    def leave(self, data: st.DataObject, twice: bool) -> None:
        i = data.draw(st.integers(0, len(self.tables) - 1))
        table = self.tables.pop(i)
        self.tokens.pop(i)
        table.release()
        if twice:
            table.release()
        assert table.blocks == []

    @invariant()
    def books_add_up(self) -> None:
        check_integrity(self.pool, self.tables)
        held = sum(len(table.blocks) for table in self.tables)
        assert self.pool.free_blocks == 9 - held
        assert sum(self.pool.holders.values()) == held

    @invariant()
    def slots_are_all_different(self) -> None:
        slots = np.concatenate(
            [np.empty(0, dtype=np.int64)]
            + [t.slots(0, n) for t, n in zip(self.tables, self.tokens, strict=True)]
        )
        assert len(np.unique(slots)) == len(slots) == sum(self.tokens)
        assert all(0 <= slot < 36 for slot in slots)


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_sizes() -> None:
    pool = small()
    assert pool.k.shape == pool.v.shape == (2, 6, 4, 1, 4)
    assert SHAPE.bytes_per_token == 2 * 2 * 1 * 4 * 4
    assert pool.nbytes == pool.k.nbytes + pool.v.nbytes
    assert [pool.blocks_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    half = KVPool(KVShape(2, 1, 4, np.dtype("f2")), 6, 4)
    assert half.nbytes * 2 == pool.nbytes
    assert half.k.dtype == np.float16


@given(start=st.integers(0, 23), count=st.integers(0, 23))
def test_slots_follow_the_table(start: int, count: int) -> None:
    pool = small()
    table = BlockTable(pool, [4, 0, 5, 1, 3, 2])
    stop = min(24, start + count)
    expected = [table.blocks[p // 4] * 4 + p % 4 for p in range(start, stop)]
    slots = table.slots(start, stop)
    assert slots.tolist() == expected
    assert slots.dtype == np.int64


def test_slots_beyond_the_table_are_an_error() -> None:
    pool = small()
    table = BlockTable(pool)
    table.reserve(4)
    with pytest.raises(IndexError):
        table.slots(3, 5)


def test_reserve_counts_tokens_in_all() -> None:
    pool = small()
    table = BlockTable(pool)
    for tokens, blocks in ((1, 1), (4, 1), (5, 2), (24, 6)):
        table.reserve(tokens)
        assert len(table.blocks) == blocks


def test_reserve_of_fewer_tokens_takes_nothing_and_gives_nothing() -> None:
    pool = small()
    table = BlockTable(pool)
    table.reserve(12)
    held = list(table.blocks)
    table.reserve(2)
    assert table.blocks == held
    check_integrity(pool, [table])


def test_a_released_block_is_used_again() -> None:
    pool = small(num_blocks=1)
    first, second = BlockTable(pool), BlockTable(pool)
    first.reserve(4)
    block = list(first.blocks)
    first.release()
    second.reserve(1)
    assert second.blocks == block


def test_capacity_error_has_the_numbers() -> None:
    pool = small()
    pool.require(24)
    with pytest.raises(CapacityError) as caught:
        pool.require(25)
    error = caught.value
    assert (error.needed, error.total, error.block_size) == (7, 6, 4)
    assert "needs 7 KV cache blocks of 4 tokens" in str(error)
    assert "has 6 in all" in str(error)
    assert isinstance(error, SeethroughError)


def test_require_asks_for_the_whole_pool_not_for_what_is_free() -> None:
    pool = small()
    pool.allocate(6)
    pool.require(24)


def test_allocation_beyond_what_is_free_takes_nothing() -> None:
    pool = small()
    pool.allocate(4)
    with pytest.raises(CapacityError) as caught:
        pool.allocate(3)
    assert caught.value.needed == 3
    assert pool.free_blocks == 2
    assert len(pool.holders) == 4


# ------------------------------------------------------------------ bugs that must be seen


def test_double_release_is_an_error_and_changes_nothing() -> None:
    pool = small()
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(KVIntegrityError, match="nobody holds it"):
        pool.release(blocks)
    assert pool.free_blocks == 6
    check_integrity(pool, [])


def test_release_of_a_block_that_never_was() -> None:
    pool = small()
    with pytest.raises(KVIntegrityError, match="nobody holds it"):
        pool.release([99])
    assert pool.free_blocks == 6


def test_two_tables_on_a_block_that_one_of_them_holds_are_found() -> None:
    pool = small()
    one = BlockTable(pool)
    one.reserve(8)
    other = BlockTable(pool, [one.blocks[0]])
    with pytest.raises(
        KVIntegrityError, match=rf"against the tables: {one.blocks[0]}: 1 against 2"
    ):
        check_integrity(pool, [one, other])


def test_one_table_with_a_block_twice_is_found() -> None:
    pool = small()
    table = BlockTable(pool)
    table.reserve(4)
    table.blocks *= 2
    with pytest.raises(KVIntegrityError, match="listed twice"):
        check_integrity(pool, [table])


def test_lost_block_is_found() -> None:
    pool = small()
    (block,) = pool.allocate(1)
    with pytest.raises(KVIntegrityError, match=rf"nobody can get: \[{block}\]"):
        check_integrity(pool, [])


def test_block_held_and_free_is_found() -> None:
    pool = small()
    table = BlockTable(pool)
    table.reserve(4)
    pool.release(list(table.blocks))
    with pytest.raises(KVIntegrityError, match="both free and held"):
        check_integrity(pool, [table])


def test_foreign_block_is_found() -> None:
    pool = small()
    with pytest.raises(KVIntegrityError, match=r"does not have: \[77\]"):
        check_integrity(pool, [BlockTable(pool, [77])])


def test_block_freed_twice_is_found() -> None:
    pool = small()
    pool._free.append(pool._free[0])
    with pytest.raises(KVIntegrityError, match="listed twice"):
        check_integrity(pool, [])


def test_pools_own_count_is_compared() -> None:
    pool = small()
    table = BlockTable(pool)
    table.reserve(4)
    pool._holders[table.blocks[0]] = 0
    with pytest.raises(KVIntegrityError, match=r"0: 0 against 1"):
        check_integrity(pool, [table])
