"""Generators of the matrix product's inner tiles: some rows times sixteen outputs.

One Python loop emits every variant, so a row goes through the same operations in the same order in
all of them. Quantized weights meet int8 activations:

    y = Σ_block  d·s · Σ q·a  +  m·s · Σ a          (d, m of the weight, s of the activation)

with the inner sums exact in integers. Float weights meet float32 activations: chains of 64 columns
by fused multiply-add, chains added in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from seethrough.kernels.cpu import forms
from seethrough.kernels.cpu.dot import INTS, WIDTH, ByteDot, quad_bits, quad_quants
from seethrough.kernels.cpu.forms import ACT_BYTES, LANES, SUPER, Form
from seethrough.kernels.cpu.simd import (
    F32,
    I8,
    I16,
    I32,
    I64,
    bf16_to_float,
    constant,
    fma,
    half_to_float,
    intrinsic,
    load,
    prefetch,
    splat,
    store,
)

CHAIN = 64  # columns of a float chain
_AHEAD = 2048  # bytes; 1,024 to 8,192 measured the same
_FLOATS = ir.VectorType(F32, WIDTH)
_HALVES = ir.VectorType(I16, WIDTH)
_SMALL = ir.VectorType(I8, WIDTH)
_PARTS = LANES // WIDTH  # registers that the sixteen outputs take


def _integer(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def _times(b: ir.IRBuilder, index: Any, size: int) -> Any:
    return b.mul(index, _integer(size))


def _accumulators(b: ir.IRBuilder, count: int) -> list[Any]:
    """Float vectors that start at zero; LLVM keeps them in registers."""
    cells = [cgutils.alloca_once(b, _FLOATS) for _ in range(count)]
    for cell in cells:
        b.store(constant(_FLOATS, 0.0), cell)
    return cells


def _passes(rows: int) -> list[list[int]]:
    """Which registers' worth of outputs one pass over the columns takes.

    One row waits for memory, so it takes all of them at once. More rows compute: one register of
    outputs at a time leaves room for the sums of more rows.
    """
    parts = list(range(_PARTS))
    return [parts] if rows == 1 else [[part] for part in parts]


def quantized_tile(form: Form, rows: int, ahead: bool = False) -> Any:
    """An intrinsic (weights, activations, activation stride, y, y stride, blocks) -> None.

    `weights` is the address of a group, `y` of the first of its sixteen outputs in the first row.
    With `ahead` it asks for the group behind this one meanwhile: several rows take so long over a
    block that the processor would not look that far by itself.
    """

    def emit(b: ir.IRBuilder, parts: list[int], args: Any) -> None:
        w, a, a_stride, y, y_stride, blocks = args
        acc = _accumulators(b, rows * len(parts))
        row = [b.add(a, _times(b, a_stride, r)) for r in range(rows)]
        units = blocks if form.levels == 1 else b.udiv(blocks, _integer(SUPER))
        with cgutils.for_range(b, units) as loop:
            at = [b.add(r, _times(b, loop.index, ACT_BYTES * form.unit_blocks)) for r in row]
            unit = b.add(w, _times(b, loop.index, form.unit_bytes))
            if ahead:
                next_group = b.add(unit, b.mul(units, _integer(form.unit_bytes)))
                for line in range(0, form.unit_bytes, 64):
                    prefetch(b, b.add(next_group, _integer(line)))
            block = _flat_block if form.levels == 1 else _super_block
            for i, part in enumerate(parts):
                block(b, form, part, unit, at, acc[i * rows : (i + 1) * rows])
        _write(b, acc, rows, parts, y, y_stride)

    return _intrinsic(rows, emit)


def _intrinsic(rows: int, emit: Callable[[ir.IRBuilder, list[int], Any], None]) -> Any:
    @intrinsic
    def tile(typing: Any, w: Any, a: Any, a_stride: Any, y: Any, y_stride: Any, n: Any) -> Any:
        def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
            for parts in _passes(rows):
                emit(b, parts, args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), code

    return tile


def _write(
    b: ir.IRBuilder, acc: list[Any], rows: int, parts: list[int], y: Any, y_stride: Any
) -> None:
    for i, part in enumerate(parts):
        for r in range(rows):
            at = b.add(y, _times(b, y_stride, r))
            store(b, b.load(acc[i * rows + r]), at, 4 * WIDTH * part)


def _flat_block(
    b: ir.IRBuilder, form: Form, part: int, block: Any, at: list[Any], acc: list[Any]
) -> None:
    if len(acc) == 1 and part == 0:
        _look_ahead(b, block, form.block_bytes)
    dots = _block_dots(b, form, part, block, at)
    d, m = _floats(b, form, part, b.add(block, _integer(form.quant_bytes)))
    for r, (whole, _) in enumerate(dots):
        _add_block(b, whole, d, m, at[r], acc[r])


def _look_ahead(b: ir.IRBuilder, address: Any, size: int) -> None:
    """Ask for as many bytes some way behind an address.

    One row goes through a block faster than some processors (Zen 1) look ahead by themselves.
    """
    for line in range(0, size, 64):
        prefetch(b, b.add(address, _integer(_AHEAD + line)))


def _floats(b: ir.IRBuilder, form: Form, part: int, address: Any) -> tuple[Any, Any]:
    """The float16 scales of sixteen outputs, and their minima or None."""
    d = half_to_float(b, load(b, address, _HALVES, 2 * WIDTH * part))
    if not form.has_min:
        return d, None
    return d, half_to_float(b, load(b, address, _HALVES, 2 * LANES + 2 * WIDTH * part))


def _add_block(b: ir.IRBuilder, dot: Any, d: Any, m: Any, at: Any, acc: Any) -> None:
    """acc += (d·s)·dot, then += m·(s·sum): the order is part of the result."""
    s = splat(b, load(b, at, F32, forms.ACT_SCALE), _FLOATS)
    total = fma(b, b.sitofp(dot, _FLOATS), b.fmul(d, s), b.load(acc))
    if m is not None:
        total = fma(b, m, splat(b, load(b, at, F32, forms.ACT_SCALED_SUM), _FLOATS), total)
    b.store(total, acc)


def _super_block(
    b: ir.IRBuilder, form: Form, part: int, unit: Any, first: list[Any], acc: list[Any]
) -> None:
    """Eight blocks under one super-scale; their own scales are whole numbers."""
    d, dmin = _floats(b, form, part, unit)
    with cgutils.for_range(b, _integer(SUPER)) as loop:
        at = [b.add(f, _times(b, loop.index, ACT_BYTES)) for f in first]
        block = b.add(unit, _times(b, loop.index, form.block_bytes))
        block = b.add(block, _integer(form.head_bytes))
        one = load(b, block, _SMALL, form.quant_bytes + WIDTH * part)
        two = load(b, block, _SMALL, form.quant_bytes + LANES + WIDTH * part)
        if len(acc) == 1 and part == 0:
            _look_ahead(b, block, form.block_bytes)
        dots = _block_dots(b, form, part, block, at)
        if dmin is None:  # signed scales of both halves; the sum of products fits 32 bits
            one, two = b.sext(one, INTS), b.sext(two, INTS)
            for r, (low, high) in enumerate(dots):
                joined = b.add(b.mul(low, one), b.mul(high, two))
                _add_block(b, joined, d, None, at[r], acc[r])
        else:
            scale = b.fmul(d, b.uitofp(b.zext(one, INTS), _FLOATS))
            minimum = b.fneg(b.fmul(dmin, b.uitofp(b.zext(two, INTS), _FLOATS)))
            for r, (whole, _) in enumerate(dots):
                _add_block(b, whole, scale, minimum, at[r], acc[r])


def _block_dots(
    b: ir.IRBuilder, form: Form, part: int, quants: Any, at: list[Any]
) -> list[tuple[Any, Any]]:
    """Per row the exact sums Σ (q - zero)·a, of the block or of its two halves."""
    dots = [ByteDot(b, form) for _ in at]
    quants = b.add(quants, _integer(4 * WIDTH * part))
    upper = quad_bits(b, form, quants)
    for quad in range(8):
        q = quad_quants(b, form, quants, upper, quad)
        for dot, row in zip(dots, at, strict=True):
            dot.add(q, splat(b, load(b, row, I32, 4 * quad), INTS), quad)
    return [dot.result(row) for dot, row in zip(dots, at, strict=True)]


def float_tile(name: str, rows: int) -> Any:
    """The same for float weights: (weights, x, x stride, y, y stride, columns) -> None."""

    def emit(b: ir.IRBuilder, parts: list[int], args: Any) -> None:
        w, x, x_stride, y, y_stride, columns = args
        acc = _accumulators(b, rows * len(parts))
        chains = b.udiv(b.add(columns, _integer(CHAIN - 1)), _integer(CHAIN))
        with cgutils.for_range(b, chains) as outer:
            first = _times(b, outer.index, CHAIN)
            left = b.sub(columns, first)
            count = b.select(b.icmp_signed("<", left, _integer(CHAIN)), left, _integer(CHAIN))
            chain = _accumulators(b, rows * len(parts))
            with cgutils.for_range(b, count) as inner:
                column = b.add(first, inner.index)
                _float_column(b, name, rows, parts, (w, x, x_stride, column), chain)
            for total, link in zip(acc, chain, strict=True):
                b.store(b.fadd(b.load(total), b.load(link)), total)
        _write(b, acc, rows, parts, y, y_stride)

    return _intrinsic(rows, emit)


def _float_column(
    b: ir.IRBuilder, name: str, rows: int, parts: list[int], args: Any, chain: list[Any]
) -> None:
    w, x, x_stride, column = args
    size = forms.FLOAT_BYTES[name]
    weights = b.add(w, _times(b, column, LANES * size))
    values = b.add(x, _times(b, column, 4))
    if rows == 1:
        _look_ahead(b, weights, LANES * size)
    for r in range(rows):
        at = b.add(values, _times(b, x_stride, r))
        value = splat(b, load(b, at, F32), _FLOATS)
        for i, part in enumerate(parts):
            link = chain[i * rows + r]
            weight = _float_weights(b, name, weights, WIDTH * part * size)
            b.store(fma(b, weight, value, b.load(link)), link)


def _float_weights(b: ir.IRBuilder, name: str, address: Any, offset: int) -> Any:
    if name == "F32":
        return load(b, address, _FLOATS, offset)
    half = load(b, address, _HALVES, offset)
    return half_to_float(b, half) if name == "F16" else bf16_to_float(b, half)
