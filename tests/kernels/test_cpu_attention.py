"""Attention of the `cpu` backend against the plain twin, over long contexts and in every variant.

The pool is full of NaN and infinities where nothing was written, and its blocks are shuffled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cpu_harness import kernels, padded, team
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from seethrough.kernels import reference
from seethrough.kernels.batch import ForwardBatch
from seethrough.kernels.cpu.memory import aligned
from seethrough.kernels.cpu.record import (
    PIECE,
    RECORD_WORDS,
    STEP_WORDS,
    A,
    R,
    S,
    mix_bytes,
    scratch_bytes,
)
from seethrough.kv.pool import KVPool, KVShape
from seethrough.model.compiled import _tiles

F32 = NDArray[np.float32]


@dataclass
class Case:
    """Requests with their contexts in a pool: (rows of this step, positions before them)."""

    parts: list[tuple[int, int]]
    heads: int = 6
    kv_heads: int = 2
    size: int = 32
    block_size: int = 16
    dtype: str = "f2"
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    seed: int = 0

    def make(self) -> tuple[F32, KVPool, ForwardBatch]:
        rng = np.random.default_rng(self.seed)
        blocks = [-(-(n + before) // self.block_size) for n, before in self.parts]
        shape = KVShape(2, self.kv_heads, self.size, np.dtype(self.dtype))
        pool = KVPool(shape, sum(blocks) + 2, self.block_size)
        pool.k[:], pool.v[:] = np.nan, np.inf
        order = rng.permutation(pool.num_blocks)
        ends = np.cumsum(blocks)
        tables = tuple(
            order[stop - count : stop].astype(np.int64)
            for stop, count in zip(ends, blocks, strict=True)
        )
        for (n, before), table in zip(self.parts, tables, strict=True):
            positions = np.arange(n + before)
            block, offset = table[positions // self.block_size], positions % self.block_size
            for pages in (pool.k, pool.v):
                values = rng.standard_normal((len(positions), self.kv_heads, self.size))
                pages[1, block, offset] = values.astype(self.dtype)
        lengths = [n for n, _ in self.parts]
        rows = sum(lengths)
        batch = ForwardBatch(
            token_ids=np.zeros(rows, dtype=np.int64),
            positions=np.concatenate([np.arange(b, b + n) for n, b in self.parts]),
            slots=np.zeros(rows, dtype=np.int64),
            query_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            seq_lens=np.array([n + b for n, b in self.parts]),
            block_tables=tables,
            logit_rows=np.zeros(0, dtype=np.int64),
        )
        q = rng.standard_normal((rows, self.heads, self.size)).astype(np.float32) * 2
        return q, pool, batch

    @property
    def slopes(self) -> F32 | None:
        if not self.alibi:
            return None
        return (2.0 ** -np.arange(1, self.heads + 1)).astype(np.float32)

    def expected(self, q: F32, pool: KVPool, batch: ForwardBatch, scores: list[F32]) -> F32:
        return reference.attend(
            q,
            pool,
            batch,
            self.slopes,
            layer=1,
            scale=0.2,
            window=self.window,
            softcap=self.softcap,
            scores=scores,
        )

    def run(
        self,
        q: F32,
        pool: KVPool,
        batch: ForwardBatch,
        *,
        threads: int = 1,
        split: bool = False,
        scores: F32 | None = None,
    ) -> F32:
        rows, group = len(q), self.heads // self.kv_heads
        source = padded(q.reshape(rows, -1))
        out = padded(np.full((rows, self.heads * self.size), np.nan, dtype=np.float32))
        slopes, tables = self.slopes, np.concatenate(batch.block_tables)
        tiles = np.array(_tiles(batch, tables.ctypes.data)).T.copy()
        scratch = scratch_bytes(self.size, group)
        pieces = -(-int(batch.seq_lens.max()) // PIECE)
        partials = aligned(rows * self.heads * pieces * mix_bytes(self.size))
        room, workers = aligned(scratch * threads), team(threads)
        step = np.zeros(STEP_WORDS, dtype=np.int64)
        words: dict[int, Any] = {
            S.ROWS: rows,
            S.POSITIONS: batch.positions.ctypes.data,
            S.TILES: tiles.shape[1],
            S.TILE_ROW: tiles[0].ctypes.data,
            S.TILE_ROWS: tiles[1].ctypes.data,
            S.TILE_TABLE: tiles[2].ctypes.data,
            S.SPLIT: split,
            S.THREADS: threads,
            S.PARTIALS: partials.ctypes.data,
            S.PIECES: pieces,
            S.SCRATCH: room.ctypes.data,
            S.SCRATCH_BYTES: scratch,
            S.COUNTERS: workers.counters,
            S.BARRIER: workers.barrier,
            S.K: pool.k.ctypes.data,
            S.V: pool.v.ctypes.data,
            S.BLOCKS: pool.num_blocks,
            S.BLOCK_SIZE: self.block_size,
        }
        if scores is not None:
            words |= {S.SCORES: scores.ctypes.data, S.SCORE_KEYS: scores.shape[-1]}
        for word, value in words.items():
            step[word] = value
        records = np.zeros((2, RECORD_WORDS), dtype=np.int64)
        width = pool.k.dtype.itemsize
        addresses = (
            kernels().address(f"attend_{width}"),
            kernels().address("join_pieces"),
        )
        for record, address in zip(records, addresses, strict=True):
            record[R.KERNEL], record[R.BARRIER], record[R.ROWS] = address, 1, S.ROWS
            for word, value in {
                A.Q: source.ctypes.data,
                A.Q_STRIDE: source.strides[0],
                A.Y: out.ctypes.data,
                A.Y_STRIDE: out.strides[0],
                A.HEADS: self.heads,
                A.KV_HEADS: self.kv_heads,
                A.SIZE: self.size,
                A.LAYER: 1,
                A.SCALE: int(np.float32(0.2).view(np.uint32)),
                A.CAP: int(np.float32(self.softcap or 0).view(np.uint32)),
                A.WINDOW: self.window or 0,
                A.SLOPES: 0 if slopes is None else slopes.ctypes.data,
            }.items():
                record[word] = value
        workers.run(records.ctypes.data, 0, 2, step.ctypes.data)
        return out[:, : self.heads * self.size].reshape(q.shape).copy()


CASES = {
    "one token": Case([(1, 0)]),
    "one piece to the brim": Case([(1, 255)]),
    "first of the next piece": Case([(1, 256)]),
    "deep": Case([(1, 700)]),
    "prefill": Case([(300, 0)]),
    "chunk behind a context": Case([(40, 600)]),
    "mates": Case([(3, 250), (1, 511), (20, 0), (1, 5)]),
    "window": Case([(30, 500), (1, 300)], window=17),
    "window of a piece": Case([(300, 300)], window=256),
    "window beyond a piece": Case([(20, 700)], window=300),
    "soft cap": Case([(9, 300)], softcap=3.0),
    "alibi": Case([(9, 300)], alibi=True),
    "float32 cache": Case([(20, 300)], dtype="f4"),
    "one head each": Case([(5, 270)], heads=3, kv_heads=3),
    "seven to a head": Case([(5, 270)], heads=14, kv_heads=2),
    "all to a head": Case([(5, 270)], heads=5, kv_heads=1),
    "odd size": Case([(6, 260)], size=20),
    "wide": Case([(6, 260)], size=256),
    "large blocks": Case([(30, 290)], block_size=48),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_plain_twin(name: str) -> None:
    case = CASES[name]
    made, masked = case.make(), list[F32]()
    wanted = case.expected(*made, masked)
    got = case.run(*made)
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=1.5e-5)
    for threads, split in ((2, False), (1, True), (3, True)):
        again = case.run(*made, threads=threads, split=split)
        np.testing.assert_array_equal(again, got, err_msg=f"{threads} threads, split {split}")
    if len(case.parts) == 1:
        scores = np.full(masked[0].shape, -np.inf, dtype=np.float32)
        np.testing.assert_array_equal(case.run(*made, scores=scores), got)
        np.testing.assert_array_equal(np.isneginf(scores), np.isneginf(masked[0]))
        seen = np.isfinite(masked[0])
        np.testing.assert_allclose(scores[seen], masked[0][seen], rtol=0, atol=3e-5)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_row_depends_on_its_own_keys_alone(data: st.DataObject) -> None:
    """Its bits in any tile, beside any mates, equal its bits alone; what follows it is NaN."""
    case = Case(
        [
            (data.draw(st.integers(1, 40)), data.draw(st.sampled_from([0, 3, 100, 250, 256, 600])))
            for _ in range(data.draw(st.integers(1, 3)))
        ],
        heads=data.draw(st.sampled_from([2, 4, 6, 14])),
        dtype=data.draw(st.sampled_from(["f2", "f4"])),
        window=data.draw(st.sampled_from([None, 1, 16, 200, 256, 300])),
        softcap=data.draw(st.sampled_from([None, 5.0])),
        alibi=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
    )
    q, pool, batch = case.make()
    together = case.run(q, pool, batch, threads=data.draw(st.integers(1, 3)))
    part = data.draw(st.integers(0, len(case.parts) - 1))
    rows = batch.rows_of(part)
    row = data.draw(st.integers(rows.start, rows.stop - 1))
    place = int(batch.positions[row])
    table = batch.block_tables[part]
    later = np.arange(place + 1, int(batch.seq_lens[part]))
    block, offset = table[later // case.block_size], later % case.block_size
    pool.k[1, block, offset], pool.v[1, block, offset] = np.inf, np.nan
    alone = ForwardBatch(
        token_ids=np.zeros(1, dtype=np.int64),
        positions=np.array([place]),
        slots=np.zeros(1, dtype=np.int64),
        query_start=np.array([0, 1]),
        seq_lens=np.array([place + 1]),
        block_tables=(table,),
        logit_rows=np.zeros(0, dtype=np.int64),
    )
    split = data.draw(st.booleans())
    np.testing.assert_array_equal(
        case.run(q[row : row + 1], pool, alone, split=split)[0], together[row]
    )
