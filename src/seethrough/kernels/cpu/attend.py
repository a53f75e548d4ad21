"""Attention over the paged cache: by tile of rows, by key/value head, by piece of 256 positions.

A piece starts at a multiple of 256. In each, a row's scores, their maximum, their exponentials and
the mix of values depend on that row and its keys alone; pieces are then joined in order of
position. So a row's bits do not depend on its neighbours, nor on who computed which piece. What a
row must not see is never read as a value, and counts exactly zero as a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from seethrough.kernels.cpu import lanes
from seethrough.kernels.cpu.attend_tiles import MOST, mix_tile, score_tile, weave
from seethrough.kernels.cpu.forms import LANES
from seethrough.kernels.cpu.record import (
    KEYS,
    LIST,
    MIX,
    NUMBERS,
    PIECE,
    QUERIES,
    SCORE_ROW,
    SPANS,
    VALUES,
    WEIGHTS,
    A,
    S,
)
from seethrough.kernels.cpu.simd import (
    addf,
    divf,
    float_of,
    fmaf,
    inline,
    load_f32,
    load_i64,
    loadf,
    maxf,
    mulf,
    splatf,
    store_f32,
    store_i64,
    storef,
    storef_upto,
    subf,
    sumf,
    topf,
    upto,
)
from seethrough.kernels.cpu.threads import next_unit, sections_of

_F: Any = np.float32
_NONE = np.float32(-np.inf)


_Q, _QS, _Y, _YS, _H, _KVH = (
    8 * A.Q,
    8 * A.Q_STRIDE,
    8 * A.Y,
    8 * A.Y_STRIDE,
    8 * A.HEADS,
    8 * A.KV_HEADS,
)
_N, _LAYER, _SCALE, _CAP = 8 * A.SIZE, 8 * A.LAYER, 8 * A.SCALE, 8 * A.CAP
_WINDOW, _SLOPES = 8 * A.WINDOW, 8 * A.SLOPES


@inline
def _width(n: int) -> int:
    return 4 * ((n + 15) // 16 * 16 + 16)


@inline
def _clear(at: int, n: int) -> None:
    """An empty state: nothing mixed, maximum -inf, sum 0."""
    values = _width(n) - 64
    for i in range(0, values, 64):
        storef(at + i, splatf(_F(0)))
    store_f32(at + values, _NONE)
    store_f32(at + values + 4, _F(0))


@inline
def join(state: int, piece: int, n: int) -> None:
    """Add a piece's mix to the state: both are scaled to the larger maximum."""
    values = _width(n) - 64
    old, new = load_f32(state + values), load_f32(piece + values)
    if old == _NONE:  # the first piece is the state
        for i in range(0, values + 64, 64):
            storef(state + i, loadf(piece + i))
        return
    top = max(old, new)
    a = lanes.exp(splatf(old - top))
    b = lanes.exp(splatf(new - top))
    for i in range(0, values, 64):
        storef(state + i, fmaf(loadf(piece + i), b, mulf(loadf(state + i), a)))
    total = fmaf(
        splatf(load_f32(piece + values + 4)), b, mulf(splatf(load_f32(state + values + 4)), a)
    )
    store_f32(state + values, top)
    store_f32(state + values + 4, topf(total))


@inline
def finish(state: int, to: int, n: int) -> None:
    """Divide the mix by the sum of weights."""
    total = splatf(load_f32(state + _width(n) - 60))
    for i in range(0, n, LANES):
        storef_upto(to + 4 * i, divf(loadf(state + 4 * i), total), n - i)


@inline
def weigh(
    scores: int,
    first: int,
    stop: int,
    scale: float,
    cap: float,
    slope: float,
    distance: int,
    tap: int,
) -> None:
    """Raw dot products of keys first .. stop - 1 of a piece to weights e^(s - max), in place.

    `distance` is query position minus the piece's first key. The maximum and the sum of weights
    are left behind the scores (at PIECE floats). `tap`: where the masked scores go as well, or 0.
    """
    begin = first // LANES * LANES
    top = splatf(_NONE)
    for i in range(begin, stop, LANES):
        s = mulf(loadf(scores + 4 * i), splatf(scale))
        if cap != _F(0):
            s = mulf(splatf(cap), lanes.tanh(divf(s, splatf(cap))))
        if slope != _F(0):
            away = subf(splatf(_F(distance)), lanes.indices(i))
            s = subf(s, mulf(splatf(slope), away))
        if i < first or stop - i < LANES:
            s = upto(s, stop - i, splatf(_NONE))
            s = upto(splatf(_NONE), first - i, s)
        storef(scores + 4 * i, s)
        if tap != 0:
            storef_upto(tap + 4 * i, s, stop - i)
        top = maxf(s, top)
    most = topf(top)
    total = splatf(_F(0))
    for i in range(begin, stop, LANES):
        e = lanes.exp(subf(loadf(scores + 4 * i), splatf(most)))
        storef(scores + 4 * i, e)
        total = addf(total, e)
    store_f32(scores + 4 * PIECE, most)
    store_f32(scores + 4 * PIECE + 4, sumf(total))


def attend_kernel(size: int) -> Callable[..., None]:
    """Attention with a cache of `size`-byte values; what it writes, see `finish` and `join`."""
    score1, score2, score3, score4 = (score_tile(size, m) for m in (1, 2, 3, 4))
    mix1, mix2, mix3, mix4 = (mix_tile(size, m) for m in (1, 2, 3, 4))
    most = MOST
    score_most, mix_most = score_tile(size, most), mix_tile(size, most)

    @inline
    def scores_of(
        m: int, pages: int, count: int, stride: int, n: int, qs: int, woven: int, to: int, ts: int
    ) -> None:
        if m == most and most > 4:
            score_most(pages, count, stride, n, woven, to, ts)
            return
        if m > 4:
            score4(pages, count, stride, n, qs, to, ts)
            m, qs, to = m - 4, qs + 8 * 4, to + 4 * ts
        if m == 4:
            score4(pages, count, stride, n, qs, to, ts)
        elif m == 3:
            score3(pages, count, stride, n, qs, to, ts)
        elif m == 2:
            score2(pages, count, stride, n, qs, to, ts)
        else:
            score1(pages, count, stride, n, qs, to, ts)

    @inline
    def mix_of(m: int, pages: int, n: int, start: int, stop: int, w: int, to: int, ts: int) -> None:
        if m == most:
            mix_most(pages, n, start, stop, w, to, ts)
            return
        if m > 4:
            mix4(pages, n, start, stop, w, to, ts)
            m, w, to = m - 4, w + 4 * SCORE_ROW, to + 4 * ts
        if m == 4:
            mix4(pages, n, start, stop, w, to, ts)
        elif m == 3:
            mix3(pages, n, start, stop, w, to, ts)
        elif m == 2:
            mix2(pages, n, start, stop, w, to, ts)
        else:
            mix1(pages, n, start, stop, w, to, ts)

    @inline
    def mix_piece(scratch: int, m: int, n: int) -> None:
        """The mixes of m queries over a piece.

        Where they see different keys, each takes on its own what not all see: a weight of zero
        would not do, for what lies there may be infinite.
        """
        width, pages, spans = _width(n), scratch + VALUES, scratch + SPANS
        low, high = 0, PIECE
        for i in range(m):
            low = max(low, load_i64(spans + 16 * i))
            high = min(high, load_i64(spans + 16 * i + 8))
            _clear(scratch + MIX + width * i, n)
        high = max(low, high)
        for i in range(m):
            first = load_i64(spans + 16 * i)
            stop = min(low, load_i64(spans + 16 * i + 8))
            if first < stop:
                w, to = scratch + WEIGHTS + SCORE_ROW * i, scratch + MIX + width * i
                mix1(pages, n, first, stop, w, to, width)
        mix_of(m, pages, n, low, high, scratch + WEIGHTS, scratch + MIX, width)
        for i in range(m):
            first = max(high, load_i64(spans + 16 * i))
            stop = load_i64(spans + 16 * i + 8)
            if first < stop:
                w, to = scratch + WEIGHTS + SCORE_ROW * i, scratch + MIX + width * i
                mix1(pages, n, first, stop, w, to, width)

    @inline
    def list_pages(
        record: int, step: int, scratch: int, table: int, head: int, base: int, end: int
    ) -> None:
        """Addresses of the pages of positions base .. end, sixteen positions each."""
        n, block_size = load_i64(record + _N), load_i64(step + 8 * S.BLOCK_SIZE)
        heads = load_i64(record + _KVH)
        layer = load_i64(record + _LAYER) * load_i64(step + 8 * S.BLOCKS)
        keys, values = load_i64(step + 8 * S.K), load_i64(step + 8 * S.V)
        for j in range(min(PIECE // LANES, (end - base) // LANES + 1)):
            position = base + LANES * j
            block = layer + load_i64(table + 8 * (position // block_size))
            page = (block * heads + head) * n * block_size * size
            offset = position % block_size
            store_i64(scratch + KEYS + 8 * j, keys + page + offset * size)
            store_i64(scratch + VALUES + 8 * j, values + page + offset * n * size)

    @inline
    def query_of(record: int, row: int, query_head: int) -> int:
        return (
            load_i64(record + _Q)
            + row * load_i64(record + _QS)
            + 4 * load_i64(record + _N) * query_head
        )

    @inline
    def list_queries(
        record: int, scratch: int, row: int, place: int, head: int, first: int, stop: int, base: int
    ) -> int:
        """Of queries first .. stop - 1 of a tile, those that see a key of the piece: how many."""
        window, group = load_i64(record + _WINDOW), load_i64(record + _H) // load_i64(record + _KVH)
        m, at, inside = 0, first // group, first % group
        for number in range(first, stop):
            position = place + at
            begin = 0
            if window != 0:
                begin = max(0, position - window + 1 - base)
            end = min(PIECE, position + 1 - base)
            if begin < end:
                q = query_of(record, row + at, head * group + inside)
                store_i64(scratch + LIST + 8 * m, q)
                store_i64(scratch + SPANS + 16 * m, begin)
                store_i64(scratch + SPANS + 16 * m + 8, end)
                store_i64(scratch + NUMBERS + 8 * m, number)
                m += 1
            inside += 1
            if inside == group:
                at, inside = at + 1, 0
        return m

    @inline
    def weave_tiles(record: int, scratch: int, to: int, row: int, queries: int, head: int) -> None:
        """Full tiles of queries once more, value by value, as `score_tile` takes them."""
        n, group = load_i64(record + _N), load_i64(record + _H) // load_i64(record + _KVH)
        for first in range(0, queries // most * most if most > 4 else 0, most):
            for m in range(most):
                number = first + m
                q = query_of(record, row + number // group, head * group + number % group)
                store_i64(scratch + LIST + 8 * m, q)
            for i in range(0, n, LANES):
                weave(scratch + LIST, 4 * i, to + 4 * (first * n + most * i))

    @inline
    def score_piece(
        record: int,
        step: int,
        scratch: int,
        woven: int,
        m: int,
        row: int,
        place: int,
        head: int,
        base: int,
    ) -> None:
        """Weights of m listed queries over a piece, with their maxima and sums."""
        n, group = load_i64(record + _N), load_i64(record + _H) // load_i64(record + _KVH)
        scale, cap = float_of(load_i64(record + _SCALE)), float_of(load_i64(record + _CAP))
        slopes, tap = load_i64(record + _SLOPES), load_i64(step + 8 * S.SCORES)
        low, high = PIECE, 0
        for i in range(m):
            low = min(low, load_i64(scratch + SPANS + 16 * i) // LANES)
            high = max(high, (load_i64(scratch + SPANS + 16 * i + 8) + LANES - 1) // LANES)
        stride = load_i64(step + 8 * S.BLOCK_SIZE) * size
        keys, to = scratch + KEYS + 8 * low, scratch + WEIGHTS + 64 * low
        scores_of(m, keys, high - low, stride, n, scratch + LIST, woven, to, SCORE_ROW)
        for i in range(m):
            slope, shown, at = _F(0), 0, 0
            if slopes != 0 or tap != 0:
                number = load_i64(scratch + NUMBERS + 8 * i)
                query_head, at = head * group + number % group, number // group
            if slopes != 0:
                slope = load_f32(slopes + 4 * query_head)
            if tap != 0:
                line = query_head * load_i64(step + 8 * S.ROWS) + row + at
                shown = tap + 4 * (line * load_i64(step + 8 * S.SCORE_KEYS) + base)
            first = load_i64(scratch + SPANS + 16 * i)
            stop = load_i64(scratch + SPANS + 16 * i + 8)
            scores = scratch + WEIGHTS + SCORE_ROW * i
            weigh(scores, first, stop, scale, cap, slope, place + at - base, shown)

    @inline
    def tile_piece(
        record: int, step: int, scratch: int, row: int, rows: int, table: int, head: int, piece: int
    ) -> None:
        """One piece for all queries of a tile: joined to their states, or left as a partial."""
        n, heads = load_i64(record + _N), load_i64(record + _H)
        group, width = heads // load_i64(record + _KVH), _width(load_i64(record + _N))
        place = load_i64(load_i64(step + 8 * S.POSITIONS) + 8 * row)
        split, base = load_i64(step + 8 * S.SPLIT), PIECE * piece
        partials, pieces = load_i64(step + 8 * S.PARTIALS), load_i64(step + 8 * S.PIECES)
        list_pages(record, step, scratch, table, head, base, place + rows - 1)
        woven = scratch + MIX + width * (QUERIES + rows * group)
        for first in range(0, rows * group, most):
            stop = min(first + most, rows * group)
            m = list_queries(record, scratch, row, place, head, first, stop, base)
            if m == 0:
                continue
            score_piece(record, step, scratch, woven + 4 * n * first, m, row, place, head, base)
            mix_piece(scratch, m, n)
            for i in range(m):
                number = load_i64(scratch + NUMBERS + 8 * i)
                mix, scores = scratch + MIX + width * i, scratch + WEIGHTS + SCORE_ROW * i
                store_i64(mix + width - 64, load_i64(scores + 4 * PIECE))  # maximum and sum
                if split == 0:
                    join(scratch + MIX + width * (QUERIES + number), mix, n)
                else:
                    line = (row + number // group) * heads + head * group + number % group
                    to = partials + (line * pieces + piece) * width
                    for k in range(0, width, 64):
                        storef(to + k, loadf(mix + k))

    def attend(record: int, step: int, counter: int, thread: int) -> None:
        n, kv_heads = load_i64(record + _N), load_i64(record + _KVH)
        group, window = load_i64(record + _H) // kv_heads, load_i64(record + _WINDOW)
        width = _width(n)
        scratch = load_i64(step + 8 * S.SCRATCH) + thread * load_i64(step + 8 * S.SCRATCH_BYTES)
        split = load_i64(step + 8 * S.SPLIT)
        shares = 1 if split == 0 else load_i64(step + 8 * S.PIECES)
        units = load_i64(step + 8 * S.TILES) * shares * kv_heads
        # Heads of a piece lie side by side in memory, and so do pieces: each thread walks along.
        sections = sections_of(step)
        unit, turn = next_unit(counter, units, sections, thread, 0)
        while unit >= 0:
            head, share, tile = (
                unit % kv_heads,
                unit // kv_heads % shares,
                unit // kv_heads // shares,
            )
            row = load_i64(load_i64(step + 8 * S.TILE_ROW) + 8 * tile)
            rows = load_i64(load_i64(step + 8 * S.TILE_ROWS) + 8 * tile)
            table = load_i64(load_i64(step + 8 * S.TILE_TABLE) + 8 * tile)
            place = load_i64(load_i64(step + 8 * S.POSITIONS) + 8 * row)
            lowest = 0 if window == 0 else max(0, place - window + 1) // PIECE
            highest = (place + rows - 1) // PIECE
            woven = scratch + MIX + width * (QUERIES + rows * group)
            weave_tiles(record, scratch, woven, row, rows * group, head)
            if split != 0:
                if lowest <= share <= highest:
                    tile_piece(record, step, scratch, row, rows, table, head, share)
            else:
                states = scratch + MIX + width * QUERIES
                for number in range(rows * group):
                    _clear(states + width * number, n)
                for piece in range(lowest, highest + 1):
                    tile_piece(record, step, scratch, row, rows, table, head, piece)
                for number in range(rows * group):
                    y = load_i64(record + _Y) + (row + number // group) * load_i64(record + _YS)
                    y += 4 * n * (head * group + number % group)
                    finish(states + width * number, y, n)
            unit, turn = next_unit(counter, units, sections, thread, turn)

    return attend


def join_pieces(record: int, step: int, counter: int, thread: int) -> None:
    """Where pieces were shared out: join each row's, in order of position."""
    if load_i64(step + 8 * S.SPLIT) == 0:
        return
    n, heads, window = load_i64(record + _N), load_i64(record + _H), load_i64(record + _WINDOW)
    width, pieces = _width(n), load_i64(step + 8 * S.PIECES)
    scratch = load_i64(step + 8 * S.SCRATCH) + thread * load_i64(step + 8 * S.SCRATCH_BYTES)
    units = load_i64(step + 8 * S.ROWS) * heads
    sections = sections_of(step)
    unit, turn = next_unit(counter, units, sections, thread, 0)
    while unit >= 0:
        row, head = unit // heads, unit % heads
        place = load_i64(load_i64(step + 8 * S.POSITIONS) + 8 * row)
        lowest = 0 if window == 0 else max(0, place - window + 1) // PIECE
        _clear(scratch + MIX, n)
        for piece in range(lowest, place // PIECE + 1):
            at = load_i64(step + 8 * S.PARTIALS) + (unit * pieces + piece) * width
            join(scratch + MIX, at, n)
        y = load_i64(record + _Y) + row * load_i64(record + _YS) + 4 * n * head
        finish(scratch + MIX, y, n)
        unit, turn = next_unit(counter, units, sections, thread, turn)
