"""y = x · Wᵀ + bias for every form of W: work is shared out by output groups and blocks of rows."""

from __future__ import annotations

from collections.abc import Callable

from seethrough.kernels.cpu.forms import FORMS
from seethrough.kernels.cpu.path import use
from seethrough.kernels.cpu.record import L, R, S
from seethrough.kernels.cpu.simd import addf, inline, load_i64, loadf, storef
from seethrough.kernels.cpu.threads import next_unit, sections_of
from seethrough.kernels.cpu.tiles import float_tile, quantized_tile

PATH = use()

TILE_ROWS = 8 if PATH == "avx512" else 4  # rows whose sums fit the registers
_PANEL = 192 * 1024  # bytes of activations that stay in the second-level cache
_UNIT = 64 * 1024  # bytes of weights that a thread takes at a time, at most about


_ROWS, _SHARES = 8 * R.ROWS, 8 * S.SHARES
_W, _GB, _G, _N = 8 * L.WEIGHTS, 8 * L.GROUP_BYTES, 8 * L.GROUPS, 8 * L.DEPTH
_X, _XS, _Y, _YS, _BIAS = 8 * L.X, 8 * L.X_STRIDE, 8 * L.Y, 8 * L.Y_STRIDE, 8 * L.BIAS


def linear_kernel(name: str) -> Callable[..., None]:
    """The kernel for weights of one type, by its name in files (Q4_1, F16, ...)."""
    if name in FORMS:
        tiles = {rows: quantized_tile(FORMS[name], rows) for rows in (1, 2, 4, 8)}
        first = quantized_tile(FORMS[name], TILE_ROWS, ahead=True)
    else:
        tiles = {rows: float_tile(name, rows) for rows in (1, 2, 4, 8)}
        first = tiles[TILE_ROWS]
    some, two, one = tiles[TILE_ROWS], tiles[2], tiles[1]
    four = tiles[4]

    @inline
    def group_rows(w: int, x: int, xs: int, y: int, ys: int, n: int, rows: int) -> None:
        """Sixteen outputs of some rows."""
        r = 0
        if rows >= TILE_ROWS:
            first(w, x, xs, y, ys, n)
            r = TILE_ROWS
        while rows - r >= TILE_ROWS:
            some(w, x + r * xs, xs, y + r * ys, ys, n)
            r += TILE_ROWS
        if rows - r >= 4:
            four(w, x + r * xs, xs, y + r * ys, ys, n)
            r += 4
        if rows - r >= 2:
            two(w, x + r * xs, xs, y + r * ys, ys, n)
            r += 2
        if rows - r == 1:
            one(w, x + r * xs, xs, y + r * ys, ys, n)

    def linear(record: int, step: int, counter: int, thread: int) -> None:
        rows = load_i64(step + 8 * load_i64(record + _ROWS))
        weights, group_bytes = load_i64(record + _W), load_i64(record + _GB)
        groups, n = load_i64(record + _G), load_i64(record + _N)
        x, xs = load_i64(record + _X), load_i64(record + _XS)
        y, ys, bias = load_i64(record + _Y), load_i64(record + _YS), load_i64(record + _BIAS)
        high = min(rows, max(8, _PANEL // xs // 8 * 8))  # rows of a block
        wide = max(1, min(groups // load_i64(step + _SHARES), _UNIT // group_bytes + 1))
        across = (groups + wide - 1) // wide
        units = across * ((rows + high - 1) // high)
        sections = sections_of(step)
        unit, turn = next_unit(counter, units, sections, thread, 0)
        while unit >= 0:
            row = unit // across * high
            count = min(high, rows - row)
            start = unit % across * wide
            for g in range(start, min(start + wide, groups)):
                out = y + row * ys + 64 * g
                group_rows(weights + g * group_bytes, x + row * xs, xs, out, ys, n, count)
                if bias != 0:
                    add_bias(out, ys, bias + 64 * g, count)
            unit, turn = next_unit(counter, units, sections, thread, turn)

    return linear


@inline
def add_bias(y: int, ys: int, bias: int, rows: int) -> None:
    """y + bias, sixteen outputs of some rows."""
    b = loadf(bias)
    for r in range(rows):
        storef(y + r * ys, addf(loadf(y + r * ys), b))
