"""Generators of attention's inner products: scores of cached keys, mixes of cached values.

Scores: K lies with sixteen positions side by side, so a lane is a position and the sum over the
head's n values is one chain per lane. Mix: V lies with the head's values side by side, so a lane is
a value and the sum runs over positions, in order. However many chains run at once, each is the
same, so a query's bits do not depend on who is computed with it.

Few queries (decoding) wait for memory: they take more pages or values at once, so that chains hide
one another's latency, and ask for the page after next while they work on this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from seethrough.kernels.cpu.dot import WIDTH
from seethrough.kernels.cpu.forms import LANES
from seethrough.kernels.cpu.record import KEYS, SCORE_ROW, VALUES
from seethrough.kernels.cpu.simd import (
    F32,
    I16,
    I32,
    I64,
    PATH,
    fma,
    half_to_float,
    intrinsic,
    load,
    prefetch,
    splat,
    store,
)
from seethrough.kernels.cpu.tiles import _PARTS, _integer, _times

MOST = 8 if PATH == "avx512" else 4  # queries of a tile: what its registers hold
_CHAINS = 16 if PATH == "avx512" else 8  # sums in registers
_FEW = 4  # queries that wait for memory
_AHEAD = 2  # pages
_FLOATS = ir.VectorType(F32, WIDTH)
_HALVES = ir.VectorType(I16, WIDTH)

Body = Callable[[Any, int], None]


def _at_once(queries: int) -> int:
    """How many registers' worth of sixteen outputs are computed for each query at once."""
    return max(1, min(4, _CHAINS // (queries * _PARTS)))


def _cached(b: ir.IRBuilder, size: int, address: Any, lane: int) -> Any:
    """A register of cached values that starts at `lane`."""
    if size == 4:
        return load(b, address, _FLOATS, 4 * lane)
    return half_to_float(b, load(b, address, _HALVES, 2 * lane))


def _in_steps(b: ir.IRBuilder, count: Any, step: int, body: Body) -> None:
    """body(first, step) for whole steps of `count`, then body(first, 1) for what is left."""
    whole = b.udiv(count, _integer(step))
    with cgutils.for_range(b, whole) as loop:
        body(_times(b, loop.index, step), step)
    if step > 1:
        with cgutils.for_range_slice(b, _times(b, whole, step), count, _integer(1)) as (index, _):
            body(index, 1)


def score_tile(size: int, queries: int) -> Any:
    """(key pages, count, stride, n, queries, scores, scores stride) -> None.

    `key pages` lists the address of each sixteen positions; values of a position lie `stride`
    bytes apart. Writes sixteen dot products per page and query. Up to four queries come as a list
    of addresses; more lie interleaved, value by value, for there are no registers for as many.
    """

    @intrinsic
    def tile(
        typing: Any, pages: Any, count: Any, stride: Any, n: Any, qs: Any, to: Any, to_stride: Any
    ) -> Any:
        def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
            pages, count, stride, n, qs, to, to_stride = args
            listed = [load(b, qs, I64, 8 * m) for m in range(queries)] if queries <= _FEW else []

            def query_values(i: Any) -> list[Any]:
                if listed:
                    places = [b.add(q, _times(b, i, 4)) for q in listed]
                    return [splat(b, load(b, place, F32), _FLOATS) for place in places]
                place = b.add(qs, _times(b, i, 4 * queries))
                return [splat(b, load(b, place, F32, 4 * m), _FLOATS) for m in range(queries)]

            def some(first: Any, taken: int) -> None:
                place = b.add(pages, _times(b, first, 8))
                keys = [load(b, place, I64, 8 * p) for p in range(taken)]
                # The keys after these, and the values that will be mixed.
                later = [load(b, place, I64, 8 * (p + taken)) for p in range(taken)]
                later += [load(b, place, I64, VALUES - KEYS + 8 * p) for p in range(taken)]
                cells = [(p, part) for p in range(taken) for part in range(_PARTS)]
                sums = [[_zero(b) for _ in range(queries)] for _ in cells]
                with cgutils.for_range(b, n) as loop:
                    down = b.mul(loop.index, stride)
                    values = query_values(loop.index)
                    for (p, part), row in zip(cells, sums, strict=True):
                        k = _cached(b, size, b.add(keys[p], down), WIDTH * part)
                        for value, cell in zip(values, row, strict=True):
                            b.store(fma(b, k, value, b.load(cell)), cell)
                    if queries <= _FEW:
                        for address in later:
                            prefetch(b, b.add(address, down))
                for (p, part), row in zip(cells, sums, strict=True):
                    out = b.add(to, _times(b, b.add(first, _integer(p)), 4 * LANES))
                    for m, cell in enumerate(row):
                        line = b.add(out, _times(b, to_stride, m))
                        store(b, b.load(cell), line, 4 * WIDTH * part)

            _in_steps(b, count, _at_once(queries), some)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), code

    return tile


def mix_tile(size: int, queries: int) -> Any:
    """(value pages, n, start, stop, weights, out, out stride) -> None.

    Adds weight · V for positions start .. stop - 1 (counted from the first page) to the n values
    of every query, in sixteens; a position's values lie together. Rows of weights lie SCORE_ROW
    bytes apart.
    """

    @intrinsic
    def tile(
        typing: Any,
        pages: Any,
        n: Any,
        start: Any,
        stop: Any,
        weights: Any,
        to: Any,
        to_stride: Any,
    ) -> Any:
        def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
            pages, n, start, stop, weights, to, to_stride = args
            out = [b.add(to, _times(b, to_stride, m)) for m in range(queries)]
            stride = _times(b, n, size)

            def some(first: Any, taken: int) -> None:
                cells = range(taken * _PARTS)
                lines = [b.add(row, _times(b, first, 4 * LANES)) for row in out]
                sums = [[_zero(b) for _ in lines] for _ in cells]
                for c, row in zip(cells, sums, strict=True):
                    for line, cell in zip(lines, row, strict=True):
                        b.store(load(b, line, _FLOATS, 4 * WIDTH * c), cell)
                offset = _times(b, first, size * LANES)
                with cgutils.for_range_slice(b, start, stop, _integer(1)) as (index, _):
                    place = b.add(pages, _times(b, b.lshr(index, _integer(4)), 8))
                    within = b.add(offset, b.mul(b.and_(index, _integer(15)), stride))
                    row_of = b.add(weights, _times(b, index, 4))
                    values = [
                        splat(b, load(b, row_of, F32, SCORE_ROW * m), _FLOATS)
                        for m in range(queries)
                    ]
                    at = b.add(load(b, place, I64), within)
                    for c, row in zip(cells, sums, strict=True):
                        v = _cached(b, size, at, WIDTH * c)
                        for value, cell in zip(values, row, strict=True):
                            b.store(fma(b, v, value, b.load(cell)), cell)
                    if queries <= _FEW:
                        later = b.add(load(b, place, I64, 8 * _AHEAD), within)
                        for line in range(-(-taken * LANES * size // 64)):
                            prefetch(b, b.add(later, _integer(64 * line)))
                for c, row in zip(cells, sums, strict=True):
                    for line, cell in zip(lines, row, strict=True):
                        store(b, b.load(cell), line, 4 * WIDTH * c)

            _in_steps(b, b.udiv(b.add(n, _integer(15)), _integer(16)), _at_once(queries), some)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), code

    return tile


@intrinsic
def weave(typing: Any, qs: Any, offset: Any, to: Any) -> Any:
    """(query list, offset, to) -> None: sixteen values of MOST queries, value by value."""

    def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
        qs, offset, to = args
        rows = [
            [load(b, b.add(load(b, qs, I64, 8 * m), offset), ir.VectorType(F32, LANES))]
            for m in range(MOST)
        ]
        while len(rows) > 1:  # query i with query i + half: in the end they stand in order
            half = len(rows) // 2
            rows = [_zip(b, rows[i], rows[i + half]) for i in range(half)]
        for i, vector in enumerate(rows[0]):
            store(b, vector, to, 4 * LANES * i)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), code


def _zip(b: ir.IRBuilder, first: list[Any], second: list[Any]) -> list[Any]:
    """Values of two sequences in turn; each is a list of vectors."""
    kind = ir.VectorType(I32, LANES)
    low = [lane for i in range(LANES // 2) for lane in (i, LANES + i)]
    high = [lane + LANES // 2 for lane in low]
    return [
        b.shuffle_vector(x, y, ir.Constant(kind, order))
        for x, y in zip(first, second, strict=True)
        for order in (low, high)
    ]


def _zero(b: ir.IRBuilder) -> Any:
    """A float vector that starts at zero; LLVM keeps it in a register."""
    cell = cgutils.alloca_once(b, _FLOATS)
    b.store(ir.Constant(_FLOATS, [0.0] * WIDTH), cell)
    return cell
