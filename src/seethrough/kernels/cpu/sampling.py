"""S10 and S12 over a row of logits: weights, sums in one order, the draw; `truncation` has S11.

Knows numbers and nothing of parameters or requests. Candidates are two arrays, `values` (float32)
and `ids` (int32), in id order, of which the first `n` count; only `survey`, `gather` and `rank` may
meet -inf. A kernel takes addresses and counts; a float goes in and out through `reals`
(float64), a count comes out through `words` (int64), and what else it needs is the caller's.

The bits are the same on every processor and path: plain IEEE float64 without contraction, an
exponential of our own, and sums in an order that is written down (`add_up`). The package
`seethrough.sampling` holds the plain NumPy twin of everything here, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba.core import types

from seethrough.kernels.cpu.simd import F32, F64, I32, I64, inline, intrinsic, pointer

BLOCK = 512  # weights whose sum is one entry of `mass`
LANES = 8
HIGHEST = 3.4028234663852886e38  # float32
_INF = np.int32(0x7F800000)  # +inf by `_rising`, and -inf
_MINUS_INF = np.int32(-0x7F800001)

Array = Any  # to index, made from an address
_TYPES: Any = types  # its stubs lack the pointer


def _array_of(element: Any, llvm_type: ir.Type) -> Callable[[int], Array]:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return pointer(builder, args[0], llvm_type)

    @intrinsic
    def array(typing: Any, address: Any) -> Any:
        return _TYPES.CPointer(element)(types.int64), emit

    return cast("Callable[[int], Array]", array)


f32, f64 = _array_of(types.float32, F32), _array_of(types.float64, F64)
i32, i64 = _array_of(types.int32, I32), _array_of(types.int64, I64)
u32 = _array_of(types.uint32, I32)

# exp(r) = 1 + r + r²·q(r) on |r| <= ln(2)/2; q is the polynomial that meets (exp(r) - 1 - r)/r² at
# its 11 Chebyshev nodes, computed with 50 digits and rounded (test_compiled.py makes it again).
# ln(2) in two parts, so that k·_LN2_HIGH is exact: fdlibm, e_exp.c, Sun Microsystems, 1993.
_C0 = 0.5
_C1 = 0.1666666666666667
_C2 = 0.04166666666666667
_C3 = 0.008333333333326141
_C4 = 0.0013888888888883752
_C5 = 0.00019841269874800493
_C6 = 2.4801587325533363e-05
_C7 = 2.7557255425746435e-06
_C8 = 2.7557273661348637e-07
_C9 = 2.510520637395701e-08
_C10 = 2.0914679376583935e-09
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_ROUND = 1.5 * 2.0**52  # added, it leaves the nearest integer in the low bits
_LEAST = -708.0  # below, exp is nearly subnormal, and nothing here tells it from 0


@inline
def exp(x: float) -> float:
    """exp(x) for x <= 0 to within 1 ulp, monotone, exactly 1 at 0; 0 below -708."""
    y = max(x, _LEAST)
    rounded = y * _LOG2_E + _ROUND
    k = rounded - _ROUND
    high, low = y - k * _LN2_HIGH, k * _LN2_LOW
    r = high - low
    r2 = r * r
    r4 = r2 * r2
    q = (_C0 + r * _C1) + r2 * (_C2 + r * _C3)
    tail = ((_C4 + r * _C5) + r2 * (_C6 + r * _C7)) + r4 * ((_C8 + r * _C9) + r2 * _C10)
    mantissa = 1.0 + (high - (low - r2 * (q + r4 * tail)))
    # k sits in the low bits of `rounded`; shifted into the exponent it multiplies by 2^k.
    exponent = np.float64(rounded).view(np.int64) << np.int64(52)
    scaled = np.int64(np.float64(mantissa).view(np.int64) + exponent).view(np.float64)
    return scaled if x >= _LEAST else 0.0


@inline
def _rising(value: float) -> np.int32:
    """A float32 as an integer that rises with it; 0 and -0 are one, NaN is beyond infinity."""
    bits = np.float32(value + np.float32(0)).view(np.int32)
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inline
def falling(value: float) -> np.uint32:
    """A float32 as an unsigned integer that falls as the value rises; 0 and -0 are one."""
    bits = np.float32(value + np.float32(0)).view(np.int32)
    return np.uint32(bits ^ (~(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inline
def value_of(key: int) -> np.float32:
    """The float32 that has this `falling` key."""
    bits = np.uint32(key).view(np.int32)
    return np.int32(bits ^ (~(bits >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


def survey(values_at: int, n: int, words_at: int) -> None:
    """words: how many are -inf; where the highest is, ties to the first; whether the row is bad.

    Bad is a row with NaN or +inf, or without a finite number.
    """
    values, words = f32(values_at), i64(words_at)
    top, low = np.int32(-(2**31)), np.int32(2**31 - 1)
    first, holes = 0, 0
    for start in range(0, n, BLOCK):
        block_top, block_holes = np.int32(-(2**31)), np.int32(0)
        for i in range(start, min(n, start + BLOCK)):
            key = _rising(values[i])
            block_top, low = max(block_top, key), min(low, key)
            block_holes += np.int32(key == _MINUS_INF)
        holes += int(block_holes)
        if block_top > top:
            top, first = block_top, start
    while _rising(values[first]) != top:
        first += 1
    words[0], words[1] = holes, first
    words[2] = (top >= _INF) | (low < _MINUS_INF) | (top <= _MINUS_INF)


def gather(row_at: int, n: int, values_at: int, ids_at: int, words_at: int) -> None:
    """Pick what is not -inf out of a row; words: how many there are."""
    row, values, ids, words = f32(row_at), f32(values_at), i32(ids_at), i64(words_at)
    kept = 0
    for i in range(n):
        values[kept] = row[i]
        ids[kept] = i
        kept += row[i] > -np.inf
    words[0] = kept


def heat(values_at: int, n: int, reals_at: int, out_at: int) -> None:
    """(x - top) / temperature, rounded once, held at the lowest finite float32.

    reals: top, temperature.
    """
    values, reals, out = f32(values_at), f64(reals_at), f32(out_at)
    top, temperature = reals[0], reals[1]
    for i in range(n):
        out[i] = np.float32(max((np.float64(values[i]) - top) / temperature, -HIGHEST))


@inline
def add_up(terms: Array, n: int, mass: Array) -> float:
    """The sum of n terms; mass[b] is the sum up to the end of block b.

    Inside a block of 512 term i goes to lane i mod 8, in order; the lanes are added as a tree of
    neighbours; blocks are added in order. Up to 7 terms behind the n are set to 0.
    """
    total = 0.0
    for i in range(n, (n + LANES - 1) // LANES * LANES):
        terms[i] = 0.0
    for b in range((n + BLOCK - 1) // BLOCK):
        a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = 0.0
        for i in range(b * BLOCK, min(n, (b + 1) * BLOCK), LANES):
            a0 += terms[i]
            a1 += terms[i + 1]
            a2 += terms[i + 2]
            a3 += terms[i + 3]
            a4 += terms[i + 4]
            a5 += terms[i + 5]
            a6 += terms[i + 6]
            a7 += terms[i + 7]
        total += ((a0 + a1) + (a2 + a3)) + ((a4 + a5) + (a6 + a7))
        mass[b] = total
    return total


def weigh(values_at: int, n: int, weights_at: int, mass_at: int, reals_at: int) -> None:
    """exp(x - top) for each, so that the highest weighs 1. reals: top; becomes the sum."""
    values, weights, reals = f32(values_at), f64(weights_at), f64(reals_at)
    top = reals[0]
    for i in range(n):
        weights[i] = exp(np.float64(values[i]) - top)
    reals[0] = add_up(weights, n, f64(mass_at))


def draw(weights_at: int, n: int, mass_at: int, reals_at: int, words_at: int) -> None:
    """words: the first position whose cumulative mass exceeds reals: a target below the total.

    Inside its block the mass grows one by one. Should rounding leave it at the target, the last
    of the block that weighs anything is taken.
    """
    weights, mass, words = f64(weights_at), f64(mass_at), i64(words_at)
    target = f64(reals_at)[0]
    b = 0
    while mass[b] <= target:
        b += 1
    reached = mass[b - 1] if b else 0.0
    last = b * BLOCK
    for i in range(b * BLOCK, min(n, (b + 1) * BLOCK)):
        reached += weights[i]
        if weights[i] > 0.0:
            last = i
        if reached > target:
            break
    words[0] = last


def rank(values_at: int, n: int, at: int, words_at: int) -> None:
    """words: the place of one value among all, from 1, ties by position."""
    values = f32(values_at)
    value = values[at]
    higher = np.int32(0)
    for i in range(n):
        higher += np.int32(values[i] > value)
    for i in range(at):
        higher += np.int32(values[i] == value)
    i64(words_at)[0] = higher + 1
