"""What is found by its key is what was put there, whatever comes and goes between."""

from __future__ import annotations

import hashlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from seethrough.errors import KVIntegrityError
from seethrough.kv.check import check_integrity
from seethrough.kv.pool import BlockTable, KVPool, KVShape
from seethrough.kv.prefix import KeyChain, root_key

IDS = st.lists(st.integers(0, 3), max_size=20)
SALTS = st.sampled_from([None, "", "a", "b", "plain", "salt a"])


def small(num_blocks: int = 6) -> KVPool:
    """A pool of blocks of four positions."""
    return KVPool(
        KVShape(n_layers=1, n_kv_heads=1, head_dim=4, dtype=np.dtype("f4")), num_blocks, 4
    )


def keys(ids: list[int], salt: str | None = None, size: int = 4) -> list[bytes]:
    chain = KeyChain(salt, size)
    chain.extend(ids)
    return chain.keys


# ------------------------------------------------------------------------------------ keys


@given(a=IDS, b=IDS, salts=st.tuples(SALTS, SALTS))
def test_a_key_names_the_whole_text_up_to_it(
    a: list[int], b: list[int], salts: tuple[str | None, str | None]
) -> None:
    """Equal exactly where salt and all ids up to the block's end are equal."""
    left, right = keys(a, salts[0]), keys(b, salts[1])
    assert len(left) == len(a) // 4
    for i, key in enumerate(left):
        for j, other in enumerate(right):
            same = salts[0] == salts[1] and i == j and a[: 4 * i + 4] == b[: 4 * j + 4]
            assert (key == other) == same


@given(ids=IDS, cuts=st.lists(st.integers(0, 20), max_size=4))
def test_a_chain_may_grow_in_any_pieces(ids: list[int], cuts: list[int]) -> None:
    chain = KeyChain(None, 4)
    for cut in sorted(cuts):
        chain.extend(ids[chain.tokens : cut])
    chain.extend(ids[chain.tokens :])
    assert chain.keys == keys(ids)
    assert chain.tokens == len(ids) // 4 * 4


@given(ids=IDS, cut=st.integers(0, 20), left=IDS, right=IDS)
def test_a_copy_goes_its_own_way(
    ids: list[int], cut: int, left: list[int], right: list[int]
) -> None:
    chain = KeyChain("a", 4)
    chain.extend(ids[:cut])
    kept = ids[: chain.tokens]
    other = chain.copy()
    chain.extend(left)
    other.extend(right)
    assert chain.keys == keys(kept + left, "a")
    assert other.keys == keys(kept + right, "a")


def test_keys_are_strong_and_start_from_the_same_place_in_every_process() -> None:
    """vllm-project/vllm PR#12621: hash() of a tuple can be made to collide; SHA-256 cannot."""
    assert all(len(key) == 32 for key in keys(list(range(16))))
    assert keys([1, 2, 3, 4])[0].hex() == (
        hashlib.sha256(
            root_key(None) + b"".join(i.to_bytes(8, "little") for i in (1, 2, 3, 4))
        ).hexdigest()
    )


def test_salts_have_a_namespace_of_their_own() -> None:
    """vllm-project/vllm#44701: what a salt says never equals what something else says."""
    roots = [root_key(salt) for salt in (None, "", "plain", "salt", "salt plain", "\ud800", "a")]
    assert len(set(roots)) == len(roots)


# ------------------------------------------------------------------------------------ the books


class Books(RuleBasedStateMachine):
    """Texts come, share, fill blocks, end; a dict of what each block holds says what is right."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = small(9)
        self.texts: list[tuple[BlockTable, list[int], KeyChain]] = []
        self.content: dict[int, tuple[int, ...]] = {}  # block -> all ids up to its end

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=16), fill=st.booleans())
    def arrive(self, ids: list[int], fill: bool) -> None:
        table, chain = BlockTable(self.pool), KeyChain(None, 4)
        chain.extend(ids)
        found = self.pool.prefix.find(chain.keys)
        for i, block in enumerate(found):
            assert self.content[block] == tuple(ids[: 4 * i + 4])
        idle = sum(self.pool.prefix.is_idle(block) for block in found)
        if self.pool.blocks_for(len(ids)) - len(found) > self.pool.free_blocks - idle:
            return
        table.share(found)
        table.reserve(len(ids))
        assert table.blocks[: len(found)] == found
        for block in table.blocks[len(found) :]:
            self.content.pop(block, None)
        if fill:
            for i, key in enumerate(chain.keys):
                self.content.setdefault(table.blocks[i], tuple(ids[: 4 * i + 4]))
                self.pool.prefix.remember(key, table.blocks[i])
        self.texts.append((table, ids, chain))

    @precondition(lambda self: self.texts)
    @rule(which=st.integers(0, 8))
    def leave(self, which: int) -> None:
        table, _, _ = self.texts.pop(which % len(self.texts))
        table.release()

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        assert len(self.pool.prefix) == 0
        assert self.pool.prefix.idle == ()

    @invariant()
    def books_add_up(self) -> None:
        check_integrity(self.pool, [table for table, _, _ in self.texts])
        by_key, _ = self.pool.prefix.books
        assert len(by_key) <= self.pool.num_blocks
        for block in by_key.values():
            assert block in self.content

    def teardown(self) -> None:
        for table, _, _ in self.texts:
            table.release()
        check_integrity(self.pool, [])
        assert self.pool.free_blocks == self.pool.num_blocks


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def filled(pool: KVPool, ids: list[int]) -> BlockTable:
    """A text whose blocks are full, and remembered."""
    table = BlockTable(pool)
    table.reserve(len(ids))
    for key, block in zip(keys(ids), table.blocks, strict=False):
        pool.prefix.remember(key, block)
    return table


def test_the_end_of_the_text_that_was_unused_the_longest_goes_first() -> None:
    pool = small(num_blocks=4)
    old, new = filled(pool, [1] * 8), filled(pool, [2] * 8)
    old.release()
    new.release()
    for taken, (olds, news) in enumerate([(1, 2), (0, 2), (0, 1), (0, 0)], start=1):
        pool.allocate(1)
        assert len(pool.prefix.find(keys([1] * 8))) == olds, taken
        assert len(pool.prefix.find(keys([2] * 8))) == news, taken


def test_use_makes_a_text_young_again() -> None:
    pool = small(num_blocks=4)
    for ids in ([1] * 8, [2] * 8):
        filled(pool, ids).release()
    again = BlockTable(pool)
    again.share(pool.prefix.find(keys([1] * 8)))
    again.release()
    pool.allocate(2)
    assert len(pool.prefix.find(keys([1] * 8))) == 2
    assert pool.prefix.find(keys([2] * 8)) == []


def test_free_blocks_go_before_remembered_ones_and_held_ones_never() -> None:
    pool = small(num_blocks=4)
    kept = filled(pool, [1] * 4)
    filled(pool, [2] * 4).release()
    pool.allocate(2)
    assert len(pool.prefix.find(keys([2] * 4))) == 1
    pool.allocate(1)
    assert pool.prefix.find(keys([2] * 4)) == []
    assert pool.prefix.find(keys([1] * 4)) == kept.blocks
    assert pool.free_blocks == 0


def test_a_block_used_again_is_found_under_its_new_text_only() -> None:
    """Wenyueh/MinivLLM PR#87: an old hash still led to a block that had been given away."""
    pool = small(num_blocks=1)
    filled(pool, [1] * 4).release()
    table = filled(pool, [2] * 4)
    assert pool.prefix.find(keys([1] * 4)) == []
    assert pool.prefix.find(keys([2] * 4)) == table.blocks


def test_two_that_computed_the_same_text_leave_one_behind() -> None:
    pool = small()
    first, second = filled(pool, [1] * 8), filled(pool, [1] * 8)
    assert pool.prefix.find(keys([1] * 8)) == first.blocks
    assert not set(first.blocks) & set(second.blocks)
    second.release()
    check_integrity(pool, [first])
    assert pool.prefix.idle_count == 0
    first.release()
    assert pool.prefix.idle_count == 2


def test_the_books_stay_small_over_many_texts() -> None:
    """vllm-project/vllm#28726: the cache's own memory grew without bound."""
    pool = small(num_blocks=16)

    def serve(count: int) -> None:
        for i in range(count):
            filled(pool, [i, *range(31)]).release()

    serve(500)
    tracemalloc.start()
    serve(200)
    before = tracemalloc.get_traced_memory()[0]
    serve(5000)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 20_000
    assert len(pool.prefix) == 16
    check_integrity(pool, [])


# ------------------------------------------------------------------------------------ bugs seen


def test_a_key_that_leads_to_a_free_block_is_found() -> None:
    pool = small()
    table = filled(pool, [1] * 4)
    pool._holders[table.blocks[0]] = 0
    pool._free.append(table.blocks[0])
    with pytest.raises(KVIntegrityError, match="both free and remembered"):
        check_integrity(pool, [])


def test_an_idle_block_without_a_key_is_found() -> None:
    pool = small()
    filled(pool, [1] * 4).release()
    block = pool.prefix.idle[0]
    del pool.prefix._blocks[pool.prefix._keys.pop(block)]
    with pytest.raises(KVIntegrityError, match=rf"nothing can find: \[{block}\]"):
        check_integrity(pool, [])


def test_keys_that_do_not_lead_back_are_found() -> None:
    pool = small()
    table = filled(pool, [1] * 4)
    pool.prefix._keys[table.blocks[0]] = b"other"
    with pytest.raises(KVIntegrityError, match="mirror"):
        check_integrity(pool, [table])


def test_idle_and_held_is_found() -> None:
    pool = small()
    table = filled(pool, [1] * 4)
    pool.prefix._idle[table.blocks[0]] = None
    with pytest.raises(KVIntegrityError, match="both free and held"):
        check_integrity(pool, [table])


def test_idle_and_free_is_found() -> None:
    pool = small()
    filled(pool, [1] * 4).release()
    pool._free.append(pool.prefix.idle[0])
    with pytest.raises(KVIntegrityError, match="both free and idle"):
        check_integrity(pool, [])
