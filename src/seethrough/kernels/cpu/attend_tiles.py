"""Generators of attention's inner products: sixteen scores, or sixteen mixed values, at once.

Scores: K lies with sixteen positions side by side, so a lane is a position and the sum over the
head's n values is one chain per lane. Mix: V lies with the head's values side by side, so a lane is
a value and the sum runs over positions, in order. Queries come as a list of addresses.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from seethrough.kernels.cpu.dot import WIDTH
from seethrough.kernels.cpu.forms import LANES
from seethrough.kernels.cpu.simd import (
    F32,
    I16,
    I64,
    fma,
    half_to_float,
    intrinsic,
    load,
    splat,
    store,
)
from seethrough.kernels.cpu.tiles import _PARTS, _accumulators, _integer, _times

_FLOATS = ir.VectorType(F32, WIDTH)
_HALVES = ir.VectorType(I16, WIDTH)


def _cached(b: ir.IRBuilder, size: int, address: Any, lane: int) -> Any:
    """A register of cached values that starts at `lane`."""
    if size == 4:
        return load(b, address, _FLOATS, 4 * lane)
    return half_to_float(b, load(b, address, _HALVES, 2 * lane))


def score_tile(size: int, queries: int) -> Any:
    """(key pages, vectors, stride, n, query list, scores, scores stride) -> None.

    `key pages` lists the address of each sixteen positions; values of a position lie `stride`
    bytes apart. Writes sixteen dot products per page and query.
    """

    @intrinsic
    def tile(
        typing: Any, pages: Any, count: Any, stride: Any, n: Any, qs: Any, to: Any, to_stride: Any
    ) -> Any:
        def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
            pages, count, stride, n, qs, to, to_stride = args
            query = [load(b, qs, I64, 8 * m) for m in range(queries)]
            with cgutils.for_range(b, count) as page:
                keys = load(b, b.add(pages, _times(b, page.index, 8)), I64)
                out = b.add(to, _times(b, page.index, 4 * LANES))
                for parts in (range(_PARTS),):
                    acc = _accumulators(b, queries * len(parts))
                    with cgutils.for_range(b, n) as loop:
                        at = b.add(keys, b.mul(loop.index, stride))
                        for i, part in enumerate(parts):
                            k = _cached(b, size, at, WIDTH * part)
                            for m in range(queries):
                                value = load(b, b.add(query[m], _times(b, loop.index, 4)), F32)
                                cell = acc[i * queries + m]
                                b.store(fma(b, k, splat(b, value, _FLOATS), b.load(cell)), cell)
                    for i, part in enumerate(parts):
                        for m in range(queries):
                            row = b.add(out, _times(b, to_stride, m))
                            store(b, b.load(acc[i * queries + m]), row, 4 * WIDTH * part)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), code

    return tile


def mix_tile(size: int, queries: int) -> Any:
    """(value pages, offset, start, stop, stride, weights, weights stride, out, out stride) -> None.

    Adds weight · V for positions start .. stop - 1 (counted from the first page) to sixteen values
    of every query: those at `offset` bytes into a position; positions lie `stride` bytes apart.
    """

    @intrinsic
    def tile(
        typing: Any,
        pages: Any,
        offset: Any,
        start: Any,
        stop: Any,
        stride: Any,
        weights: Any,
        w_stride: Any,
        to: Any,
        to_stride: Any,
    ) -> Any:
        def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
            pages, offset, start, stop, stride, weights, w_stride, to, to_stride = args
            weight = [b.add(weights, _times(b, w_stride, m)) for m in range(queries)]
            for parts in (range(_PARTS),):
                acc = []
                for part in parts:
                    for m in range(queries):
                        cell = cgutils.alloca_once(b, _FLOATS)
                        row = b.add(to, _times(b, to_stride, m))
                        b.store(load(b, row, _FLOATS, 4 * WIDTH * part), cell)
                        acc.append(cell)
                with cgutils.for_range_slice(b, start, stop, _integer(1)) as (index, _):
                    page = load(b, b.add(pages, _times(b, b.lshr(index, _integer(4)), 8)), I64)
                    place = b.mul(b.and_(index, _integer(15)), stride)
                    at = b.add(b.add(page, offset), place)
                    for i, part in enumerate(parts):
                        v = _cached(b, size, at, WIDTH * part)
                        for m in range(queries):
                            value = load(b, b.add(weight[m], _times(b, index, 4)), F32)
                            cell = acc[i * queries + m]
                            b.store(fma(b, v, splat(b, value, _FLOATS), b.load(cell)), cell)
                for i, part in enumerate(parts):
                    for m in range(queries):
                        row = b.add(to, _times(b, to_stride, m))
                        store(b, b.load(acc[i * queries + m]), row, 4 * WIDTH * part)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), code

    return tile
