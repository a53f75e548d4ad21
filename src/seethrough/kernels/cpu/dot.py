"""The byte dot product, per processor path: a lane per output row, four columns at a time, exact.

Quants are unsigned (0 .. 255), activations signed (-127 .. 127); the result is Σ (q - zero)·a.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from seethrough.kernels.cpu import forms
from seethrough.kernels.cpu.forms import Form
from seethrough.kernels.cpu.path import use
from seethrough.kernels.cpu.simd import I8, I16, I32, call, constant, load, splat

PATH = use()

WIDTH = 8 if PATH == "avx2" else 16  # lanes of one register, where the processor has one

BYTES = ir.VectorType(I8, 4 * WIDTH)
SHORTS = ir.VectorType(I16, 2 * WIDTH)
INTS = ir.VectorType(I32, WIDTH)


def quad_bits(b: ir.IRBuilder, form: Form, quants: Any) -> list[Any]:
    """The vectors that hold the quants' bits above the fourth (none for 4 and 8 bits)."""
    count = {4: 0, 5: 1, 6: 2, 8: 0}[form.bits]
    return [load(b, quants, BYTES, 256 + 64 * i) for i in range(count)]


def quad_quants(b: ir.IRBuilder, form: Form, quants: Any, upper: list[Any], quad: int) -> Any:
    """The quants of one quad of columns, unsigned bytes."""
    if form.bits == 8:
        return load(b, quants, BYTES, 64 * quad)
    packed = load(b, quants, BYTES, 64 * (quad // 2))
    q = b.and_(_shift(b, packed, 4 * (quad % 2)), constant(BYTES, 15))
    if form.bits == 5:
        return b.or_(q, b.and_(_shift(b, upper[0], quad - 4), constant(BYTES, 16)))
    if form.bits == 6:
        moved = _shift(b, upper[quad // 4], 2 * (quad % 4) - 4)
        return b.or_(q, b.and_(moved, constant(BYTES, 48)))
    return q


def _shift(b: ir.IRBuilder, x: Any, right: int) -> Any:
    """Bytes shifted right (left where negative); bits of neighbours must be masked off after."""
    if right == 0:
        return x
    words = b.bitcast(x, SHORTS)  # no processor shifts bytes
    by = constant(SHORTS, abs(right))
    return b.bitcast(b.lshr(words, by) if right > 0 else b.shl(words, by), BYTES)


class ByteDot:
    """Collects one row's dot products over the eight quads of a block."""

    def __init__(self, b: ir.IRBuilder, form: Form) -> None:
        self.b, self.form = b, form
        self._sums: list[Any] = [None, None]
        self._pairs: Any = None  # pair sums that still fit 16 bits
        self._held = 0

    def add(self, q: Any, a: Any, quad: int) -> None:
        """Add quad number `quad`: q bytes, `a` the same four int8 in every lane."""
        part = quad // 4 if self.form.halves or PATH == "avx512" else 0
        if PATH == "avx512":
            # Two chains even where one sum is wanted: a single row waits for them less.
            before = constant(INTS, 0) if self._sums[part] is None else self._sums[part]
            name = "llvm.x86.avx512.vpdpbusd.512"
            self._sums[part] = call(self.b, name, INTS, before, self.b.bitcast(q, INTS), a)
            return
        if self.form.bits == 8 and PATH == "portable":
            for products in _products(self.b, q, a):
                self._widen(part, products)
            return
        pairs = self._pair_sums(q, a)
        self._pairs = pairs if self._held == 0 else self.b.add(self._pairs, pairs)
        self._held += 1
        # |pair sum| <= 2 · (2^bits - 1) · 127, so that many of them fit 16 bits. For 8 bits the
        # weight is taken as signed, at most 128 in size, and one fits.
        full = self._held == {4: 8, 5: 4, 6: 2, 8: 1}[self.form.bits]
        if full or quad == 7 or (self.form.halves and quad == 3):
            self._widen(part, self._pairs)
            self._held = 0

    def result(self, row: Any) -> tuple[Any, Any]:
        """The block's sum and None, or the sums of both halves; `zero` is taken off."""
        low, high = self._sums
        if self.form.halves:
            return (
                self._less_zero(low, row, (forms.ACT_SUM_LOW,)),
                self._less_zero(high, row, (forms.ACT_SUM_HIGH,)),
            )
        total = low if high is None else self.b.add(low, high)
        return self._less_zero(total, row, (forms.ACT_SUM_LOW, forms.ACT_SUM_HIGH)), None

    def _less_zero(self, total: Any, row: Any, sums: tuple[int, ...]) -> Any:
        if self.form.has_min or (self.form.bits == 8 and PATH == "avx2"):
            return total
        b = self.b
        parts = [load(b, row, I32, at) for at in sums]
        activations = parts[0] if len(parts) == 1 else b.add(*parts)
        return b.sub(total, splat(b, b.mul(activations, ir.Constant(I32, self.form.zero)), INTS))

    def _pair_sums(self, q: Any, a: Any) -> Any:
        """q·a summed over neighbouring bytes."""
        b = self.b
        if PATH == "portable":
            return b.add(*_products(b, q, a))
        a = b.bitcast(a, BYTES)
        if self.form.bits == 8:  # q - 128 is signed; its sign moves to the activation
            signed = b.xor(q, constant(BYTES, 128))
            negative = b.icmp_signed("<", signed, constant(BYTES, 0))
            q = b.select(negative, b.neg(signed), signed)
            a = call(b, "llvm.x86.avx2.psign.b", BYTES, a, signed)
        return call(b, "llvm.x86.avx2.pmadd.ub.sw", SHORTS, q, a)

    def _widen(self, part: int, pairs: Any) -> None:
        """Add 16-bit values to a 32-bit sum, two neighbours to a lane."""
        b = self.b
        if PATH == "portable":
            wide = b.bitcast(pairs, INTS)
            sixteen = constant(INTS, 16)
            low = b.ashr(b.shl(wide, sixteen), sixteen)
            total = b.add(low, b.ashr(wide, sixteen))
        else:
            total = call(b, "llvm.x86.avx2.pmadd.wd", INTS, pairs, constant(SHORTS, 1))
        before = self._sums[part]
        self._sums[part] = total if before is None else b.add(before, total)


def _products(b: ir.IRBuilder, q: Any, a: Any) -> tuple[Any, Any]:
    """q·a of the even and of the odd bytes: 255 · 127 fits 16 bits."""
    q, a = b.bitcast(q, SHORTS), b.bitcast(a, SHORTS)
    eight = constant(SHORTS, 8)
    even = b.mul(b.and_(q, constant(SHORTS, 255)), b.ashr(b.shl(a, eight), eight))
    return even, b.mul(b.lshr(q, eight), b.ashr(a, eight))
