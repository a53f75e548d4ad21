"""Elementary functions in lanes: the same operations in every lane, wherever a value stands.

exp after Cephes' expf (S. L. Moshier): reduce by multiples of ln 2, a polynomial on +-ln(2)/2,
scale in two steps (AVX-512 has one) so that results down to the smallest subnormal and up to the
largest float are right, rounded once. erf is a rational approximation (Eigen's coefficients).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from seethrough.kernels.cpu.simd import (
    I32,
    PATH,
    VF,
    VI,
    constant,
    f32x16,
    fma,
    intrinsic,
    make,
    splat,
    times_power,
)

_MAGIC = 12582912.0  # 1.5 * 2^23: adding it leaves a rounded integer in the low bits
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_TANH = (
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
)
_ERF_TOP = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
_ERF_BOTTOM = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)


def emit_exp(b: ir.IRBuilder, x: Any) -> Any:
    """e^x; 0 below about -104, infinity above 88.7, NaN stays NaN."""
    x = _at_least(b, x, -110.0)
    x = b.select(b.fcmp_ordered(">", x, constant(VF, 89.0)), constant(VF, 89.0), x)
    shifted = b.fadd(b.fmul(x, constant(VF, 1.44269504088896341)), constant(VF, _MAGIC))
    n = b.fsub(shifted, constant(VF, _MAGIC))
    r = fma(b, n, constant(VF, -0.693359375), x)
    r = fma(b, n, constant(VF, 2.12194440e-4), r)
    p = _horner(b, r, _EXP)
    y = b.fadd(fma(b, p, b.fmul(r, r), r), constant(VF, 1.0))
    if PATH == "avx512":
        return times_power(b, y, n)
    whole = b.sub(b.bitcast(shifted, VI), constant(VI, 0x4B400000))
    half = b.ashr(whole, constant(VI, 1))
    return b.fmul(b.fmul(y, _power(b, half)), _power(b, b.sub(whole, half)))


def _at_least(b: ir.IRBuilder, x: Any, least: float) -> Any:
    return b.select(b.fcmp_ordered("<", x, constant(VF, least)), constant(VF, least), x)


def _power(b: ir.IRBuilder, n: Any) -> Any:
    """2^n for n in -126 .. 127."""
    return b.bitcast(b.shl(b.add(n, constant(VI, 127)), constant(VI, 23)), VF)


def _horner(b: ir.IRBuilder, x: Any, coefficients: tuple[float, ...]) -> Any:
    total = constant(VF, coefficients[0])
    for coefficient in coefficients[1:]:
        total = fma(b, total, x, constant(VF, coefficient))
    return total


def _magnitude(b: ir.IRBuilder, x: Any) -> tuple[Any, Any]:
    """|x|, and the sign bit of every lane."""
    bits = b.bitcast(x, VI)
    sign = b.and_(bits, constant(VI, 0x80000000))
    return b.bitcast(b.xor(bits, sign), VF), sign


def emit_tanh(b: ir.IRBuilder, x: Any) -> Any:
    """tanh: a polynomial below 0.625 (Cephes), 1 - 2 / (e^2|x| + 1) above."""
    one, two = constant(VF, 1.0), constant(VF, 2.0)
    size, sign = _magnitude(b, x)
    large = b.fsub(one, b.fdiv(two, b.fadd(emit_exp(b, b.fadd(size, size)), one)))
    square = b.fmul(x, x)
    small = fma(b, b.fmul(_horner(b, square, _TANH), square), x, x)
    signed = b.bitcast(b.or_(b.bitcast(large, VI), sign), VF)
    return b.select(b.fcmp_ordered("<", size, constant(VF, 0.625)), small, signed)


def emit_erf(b: ir.IRBuilder, x: Any) -> Any:
    """erf, to about 2 ulp; from 3.8325 on it is 1 to within half an ulp of float32."""
    size, sign = _magnitude(b, x)
    square = b.fmul(x, x)
    inner = b.fdiv(b.fmul(x, _horner(b, square, _ERF_TOP)), _horner(b, square, _ERF_BOTTOM))
    one = b.bitcast(b.or_(b.bitcast(constant(VF, 1.0), VI), sign), VF)
    return b.select(b.fcmp_ordered(">", size, constant(VF, 3.8325)), one, inner)


def emit_silu(b: ir.IRBuilder, x: Any) -> Any:
    """x / (1 + e^-x)."""
    return b.fdiv(x, b.fadd(emit_exp(b, b.fneg(x)), constant(VF, 1.0)))


def emit_gelu(b: ir.IRBuilder, x: Any) -> Any:
    """x/2 · (1 + erf(x / √2))."""
    inner = emit_erf(b, b.fmul(x, constant(VF, 0.7071067811865476)))
    return b.fmul(b.fmul(x, constant(VF, 0.5)), b.fadd(inner, constant(VF, 1.0)))


def emit_gelu_tanh(b: ir.IRBuilder, x: Any) -> Any:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))."""
    cube = b.fmul(b.fmul(x, x), x)
    inner = b.fmul(fma(b, cube, constant(VF, 0.044715), x), constant(VF, 0.7978845608028654))
    return b.fmul(b.fmul(x, constant(VF, 0.5)), b.fadd(emit_tanh(b, inner), constant(VF, 1.0)))


def emit_relu(b: ir.IRBuilder, x: Any) -> Any:
    """x where it is positive (or NaN), else 0."""
    return b.select(b.fcmp_ordered("<", x, constant(VF, 0.0)), constant(VF, 0.0), x)


ACTIVATIONS = {
    "silu": (0, emit_silu),
    "gelu": (1, emit_gelu),
    "gelu_tanh": (2, emit_gelu_tanh),
    "relu": (3, emit_relu),
}


@intrinsic
def exp(typing: Any, x: Any) -> Any:
    """e^x in lanes."""
    return make(f32x16(f32x16), emit_exp)


@intrinsic
def tanh(typing: Any, x: Any) -> Any:
    """tanh in lanes."""
    return make(f32x16(f32x16), emit_tanh)


@intrinsic
def silu(typing: Any, x: Any) -> Any:
    """x · sigmoid(x) in lanes."""
    return make(f32x16(f32x16), emit_silu)


@intrinsic
def gelu(typing: Any, x: Any) -> Any:
    """gelu, erf form, in lanes."""
    return make(f32x16(f32x16), emit_gelu)


@intrinsic
def gelu_tanh(typing: Any, x: Any) -> Any:
    """gelu, tanh form, in lanes."""
    return make(f32x16(f32x16), emit_gelu_tanh)


@intrinsic
def relu(typing: Any, x: Any) -> Any:
    """max(x, 0) in lanes."""
    return make(f32x16(f32x16), emit_relu)


@intrinsic
def indices(typing: Any, first: Any) -> Any:
    """first, first + 1, ... as floats."""

    def emit(b: Any, first: Any) -> Any:
        lane = ir.Constant(VI, list(range(16)))
        return b.sitofp(b.add(splat(b, b.trunc(first, I32), VI), lane), VF)

    return make(f32x16(types.int64), emit)
