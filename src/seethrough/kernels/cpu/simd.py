"""Sixteen lanes: vector types for Numba, and the operations on them, straight to LLVM.

A kernel sees addresses (integers) and three kinds of value: f32x16, i32x16 and u8x64. LLVM gives
them one AVX-512 register, two AVX2 registers or whatever the processor has; only the byte dot
product and the half floats are written per path (`dot.py`). No operation here may be reordered or
contracted: no fast-math flag is ever set, and a fused multiply-add happens where `fma` stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic as _intrinsic
from numba.extending import models, register_model

from seethrough.kernels.cpu.path import use

PATH = use()

F = TypeVar("F", bound=Callable[..., Any])
intrinsic: Callable[[Any], Any] = _intrinsic
# What kernels call: compiled with them, IEEE arithmetic in the written order, x / 0 is infinite.
inline: Callable[[F], F] = numba.njit(error_model="numpy")

LANES = 16

F32, F64 = ir.FloatType(), ir.DoubleType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
VF = ir.VectorType(F32, LANES)
VI = ir.VectorType(I32, LANES)
VH = ir.VectorType(I16, LANES)


class _Lanes(types.Opaque):
    """A Numba type whose value is one LLVM vector."""


def _vector_type(name: str, llvm_type: ir.VectorType) -> Any:
    cls = type(name, (_Lanes,), {})

    @register_model(cls)
    class _Model(models.PrimitiveModel):
        def __init__(self, dmm: Any, fe_type: Any) -> None:
            super().__init__(dmm, fe_type, llvm_type)

    return cls(name)


f32x16 = _vector_type("f32x16", VF)
i32x16 = _vector_type("i32x16", VI)


# --- Emitting: the same vocabulary for the intrinsics below and for the tile generators. ---------


def constant(vector: ir.VectorType, value: float) -> ir.Constant:
    """The same value in every lane."""
    return ir.Constant(vector, [value] * vector.count)


def splat(b: ir.IRBuilder, scalar: Any, vector: ir.VectorType) -> Any:
    """A scalar in every lane."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, vector.count), None))


def pointer(b: ir.IRBuilder, address: Any, pointee: ir.Type, offset: Any = 0) -> Any:
    """The integer `address` plus `offset` bytes, as a pointer."""
    # Addresses are sums of integers, and LLVM may take any of the summands for the base. Where that
    # one happens to be 0, it would call the access impossible and leave out all that follows.
    set.add(b.function.attributes, "null_pointer_is_valid")
    base = b.inttoptr(address, I8.as_pointer())
    if not (isinstance(offset, int) and offset == 0):
        base = b.gep(base, [ir.Constant(I64, offset) if isinstance(offset, int) else offset])
    return b.bitcast(base, pointee.as_pointer())


def load(b: ir.IRBuilder, address: Any, kind: ir.Type, offset: Any = 0) -> Any:
    """A value at any address; nothing is assumed about its alignment."""
    return b.load(pointer(b, address, kind, offset), align=1)


def store(b: ir.IRBuilder, value: Any, address: Any, offset: Any = 0) -> None:
    """A value to any address."""
    b.store(value, pointer(b, address, value.type, offset), align=1)


def call(b: ir.IRBuilder, name: str, result: ir.Type, *args: Any) -> Any:
    """Call an LLVM intrinsic by its name."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


def prefetch(b: ir.IRBuilder, address: Any) -> None:
    """Ask for the cache line of any address, which need not be ours; changes no result."""
    place = b.inttoptr(address, I8.as_pointer())
    flags = [ir.Constant(I32, value) for value in (0, 3, 1)]  # to read, keep, data
    kind = ir.FunctionType(ir.VoidType(), [place.type] + [I32] * 3)
    b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0"), [place, *flags])


def lanes_of(vector: ir.VectorType, element: ir.Type) -> ir.VectorType:
    """The vector type with as many lanes of another element."""
    return ir.VectorType(element, vector.count)


def fma(b: ir.IRBuilder, x: Any, y: Any, z: Any) -> Any:
    """x · y + z, rounded once; on the portable path twice (no processor without FMA is fast)."""
    if PATH == "portable":
        return b.fadd(b.fmul(x, y), z)
    return call(b, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)


def times_power(b: ir.IRBuilder, y: Any, n: Any) -> Any:
    """y · 2^n for whole n, rounded once: AVX-512 only."""
    all_lanes, nearest = ir.Constant(I16, -1), ir.Constant(I32, 4)  # 4: as the thread rounds
    return call(b, "llvm.x86.avx512.mask.scalef.ps.512", VF, y, n, y, all_lanes, nearest)


def half_to_float(b: ir.IRBuilder, h: Any) -> Any:
    """Half floats (as 16-bit integers) to float32, exactly.

    Portable: move exponent and mantissa into place and multiply by 2^112, which also lifts
    subnormals; infinities and NaN get their exponent by an integer or.
    """
    if PATH != "portable":
        return b.fpext(b.bitcast(h, lanes_of(h.type, ir.HalfType())), lanes_of(h.type, F32))
    w = b.zext(h, VI)
    sign = b.shl(b.and_(w, constant(VI, 0x8000)), constant(VI, 16))
    rest = b.shl(b.and_(w, constant(VI, 0x7FFF)), constant(VI, 13))
    lifted = b.bitcast(b.fmul(b.bitcast(rest, VF), constant(VF, 2.0**112)), VI)
    special = b.icmp_unsigned(">=", rest, constant(VI, 0x7C00 << 13))
    bits = b.select(special, b.or_(rest, constant(VI, 0x7F800000)), lifted)
    return b.bitcast(b.or_(bits, sign), VF)


def float_to_half(b: ir.IRBuilder, x: Any) -> Any:
    """Sixteen float32 to half floats, to nearest even (as NumPy); too large gives infinity."""
    if PATH != "portable":
        return b.bitcast(b.fptrunc(x, ir.VectorType(ir.HalfType(), LANES)), VH)
    # Adding a power of two pushes the bits that a half has no room for out at the right end, with
    # the float unit's own rounding: the known trick, here with a bias per exponent.
    bits = b.bitcast(x, VI)
    sign = b.and_(bits, constant(VI, 0x80000000))
    magnitude = b.xor(bits, sign)
    exponent = b.and_(magnitude, constant(VI, 0x7F800000))
    low = b.icmp_unsigned("<", exponent, constant(VI, 113 << 23))
    exponent = b.select(low, constant(VI, 113 << 23), exponent)
    bias = b.bitcast(b.add(exponent, constant(VI, 13 << 23)), VF)
    rounded = b.fadd(b.bitcast(magnitude, VF), bias)  # ulp of the sum: 2^(e − 10), a half's own
    mantissa = b.bitcast(b.fsub(rounded, bias), VI)  # x on the half's grid, exact
    scaled = b.bitcast(b.fmul(b.bitcast(mantissa, VF), constant(VF, 2.0**-112)), VI)
    small = b.lshr(scaled, constant(VI, 13))
    big = b.icmp_unsigned(">=", mantissa, constant(VI, (127 + 16) << 23))
    nan = b.icmp_unsigned(">", magnitude, constant(VI, 0x7F800000))
    half = b.select(big, constant(VI, 0x7C00), small)
    half = b.select(nan, constant(VI, 0x7E00), half)
    return b.trunc(b.or_(half, b.lshr(sign, constant(VI, 16))), VH)


# --- Intrinsics for kernels: addresses are int64, offsets in bytes are added by the caller. ------


def make(signature: Any, emit: Any) -> Any:
    """A Numba intrinsic's pair of type and code from a plain emitter."""

    def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        result = emit(builder, *args)
        return context.get_dummy_value() if sig.return_type == types.void else result

    return signature, code


@intrinsic
def loadf(typing: Any, address: Any) -> Any:
    """f32x16 at an address."""
    return make(f32x16(types.int64), lambda b, p: load(b, p, VF))


@intrinsic
def storef(typing: Any, address: Any, value: Any) -> Any:
    """Store f32x16."""
    return make(types.void(types.int64, f32x16), lambda b, p, v: store(b, v, p))


@intrinsic
def loadh(typing: Any, address: Any) -> Any:
    """Sixteen half floats at an address, as f32x16."""
    return make(f32x16(types.int64), lambda b, p: half_to_float(b, load(b, p, VH)))


@intrinsic
def storeh(typing: Any, address: Any, value: Any) -> Any:
    """Round to half floats and store them."""
    return make(types.void(types.int64, f32x16), lambda b, p, v: store(b, float_to_half(b, v), p))


@intrinsic
def loadbf(typing: Any, address: Any) -> Any:
    """Sixteen bfloat16 at an address, as f32x16."""
    return make(f32x16(types.int64), lambda b, p: bf16_to_float(b, load(b, p, VH)))


def bf16_to_float(b: ir.IRBuilder, h: Any) -> Any:
    """bfloat16 (as 16-bit integers) to float32, exactly."""
    wide = lanes_of(h.type, I32)
    return b.bitcast(b.shl(b.zext(h, wide), constant(wide, 16)), lanes_of(h.type, F32))


@intrinsic
def splatf(typing: Any, value: Any) -> Any:
    """A float32 in every lane."""
    return make(f32x16(types.float32), lambda b, v: splat(b, v, VF))


@intrinsic
def addf(typing: Any, x: Any, y: Any) -> Any:
    """x + y."""
    return make(f32x16(f32x16, f32x16), lambda b, x, y: b.fadd(x, y))


@intrinsic
def subf(typing: Any, x: Any, y: Any) -> Any:
    """x − y."""
    return make(f32x16(f32x16, f32x16), lambda b, x, y: b.fsub(x, y))


@intrinsic
def mulf(typing: Any, x: Any, y: Any) -> Any:
    """x · y."""
    return make(f32x16(f32x16, f32x16), lambda b, x, y: b.fmul(x, y))


@intrinsic
def divf(typing: Any, x: Any, y: Any) -> Any:
    """x / y."""
    return make(f32x16(f32x16, f32x16), lambda b, x, y: b.fdiv(x, y))


@intrinsic
def maxf(typing: Any, x: Any, y: Any) -> Any:
    """The larger; where x is NaN, y."""

    def emit(b: Any, x: Any, y: Any) -> Any:
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    return make(f32x16(f32x16, f32x16), emit)


@intrinsic
def absf(typing: Any, x: Any) -> Any:
    """|x|."""

    def emit(b: Any, x: Any) -> Any:
        return b.bitcast(b.and_(b.bitcast(x, VI), constant(VI, 0x7FFFFFFF)), VF)

    return make(f32x16(f32x16), emit)


@intrinsic
def fmaf(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x · y + z, rounded once (see `fma`)."""
    return make(f32x16(f32x16, f32x16, f32x16), fma)


@intrinsic
def sumf(typing: Any, x: Any) -> Any:
    """The sum of the lanes by a fixed tree: halves, quarters, pairs."""
    return make(types.float32(f32x16), lambda b, x: _fold(b, x, b.fadd))


@intrinsic
def topf(typing: Any, x: Any) -> Any:
    """The largest lane."""

    def larger(b: Any) -> Any:
        return lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y)

    return make(types.float32(f32x16), lambda b, x: _fold(b, x, larger(b)))


def _fold(b: ir.IRBuilder, x: Any, join: Any) -> Any:
    width = LANES
    while width > 1:
        width //= 2
        first = ir.Constant(ir.VectorType(I32, width), list(range(width)))
        second = ir.Constant(ir.VectorType(I32, width), list(range(width, 2 * width)))
        x = join(b.shuffle_vector(x, x, first), b.shuffle_vector(x, x, second))
    return b.extract_element(x, ir.Constant(I32, 0))


@intrinsic
def upto(typing: Any, x: Any, count: Any, other: Any) -> Any:
    """The first `count` lanes of x, `other` in the rest."""

    def emit(b: Any, x: Any, count: Any, other: Any) -> Any:
        lane = ir.Constant(VI, list(range(LANES)))
        inside = b.icmp_signed("<", lane, splat(b, b.trunc(count, I32), VI))
        return b.select(inside, x, other)

    return make(f32x16(f32x16, types.int64, f32x16), emit)


@intrinsic
def round_to_int8(typing: Any, address: Any, x: Any) -> Any:
    """Round to the nearest integers (ties to even), store them as int8; gives them as i32x16."""

    def emit(b: Any, p: Any, x: Any) -> Any:
        n = b.fptosi(call(b, "llvm.rint.v16f32", VF, x), VI) if PATH != "portable" else _rint(b, x)
        store(b, b.trunc(n, ir.VectorType(I8, LANES)), p)
        return n

    return make(i32x16(types.int64, f32x16), emit)


def _rint(b: ir.IRBuilder, x: Any) -> Any:
    # Adding 1.5 · 2^23 leaves the rounded integer in the low bits; |x| is at most 127 here.
    magic = constant(VF, 12582912.0)
    return b.sub(b.bitcast(b.fadd(x, magic), VI), constant(VI, 0x4B400000))


@intrinsic
def sumi(typing: Any, x: Any) -> Any:
    """The sum of integer lanes."""
    return make(types.int32(i32x16), lambda b, x: _fold(b, x, b.add))


# --- Scalars at addresses. -----------------------------------------------------------------------


@intrinsic
def load_i64(typing: Any, address: Any) -> Any:
    """An int64 at an address."""
    return make(types.int64(types.int64), lambda b, p: load(b, p, I64))


@intrinsic
def store_i64(typing: Any, address: Any, value: Any) -> Any:
    """Store an int64."""
    return make(types.void(types.int64, types.int64), lambda b, p, v: store(b, v, p))


@intrinsic
def load_f32(typing: Any, address: Any) -> Any:
    """A float32 at an address."""
    return make(types.float32(types.int64), lambda b, p: load(b, p, F32))


@intrinsic
def store_f32(typing: Any, address: Any, value: Any) -> Any:
    """Store a float32."""
    return make(types.void(types.int64, types.float32), lambda b, p, v: store(b, v, p))


@intrinsic
def store_i32(typing: Any, address: Any, value: Any) -> Any:
    """Store an int32."""
    return make(types.void(types.int64, types.int32), lambda b, p, v: store(b, v, p))


@intrinsic
def float_of(typing: Any, bits: Any) -> Any:
    """The float32 whose bits are the low half of an integer: how a record carries a number."""
    return make(types.float32(types.int64), lambda b, v: b.bitcast(b.trunc(v, I32), F32))


def _load_unsigned(bits: int) -> Any:
    kind = ir.IntType(bits)
    return make(types.int64(types.int64), lambda b, p: b.zext(load(b, p, kind), I64))


def _store_unsigned(bits: int) -> Any:
    kind = ir.IntType(bits)
    signature = types.void(types.int64, types.int64)
    return make(signature, lambda b, p, v: store(b, b.trunc(v, kind), p))


@intrinsic
def load_u8(typing: Any, address: Any) -> Any:
    """A byte, as int64."""
    return _load_unsigned(8)


@intrinsic
def load_u16(typing: Any, address: Any) -> Any:
    """Two bytes, as int64."""
    return _load_unsigned(16)


@intrinsic
def load_u32(typing: Any, address: Any) -> Any:
    """Four bytes, as int64."""
    return _load_unsigned(32)


@intrinsic
def store_u8(typing: Any, address: Any, value: Any) -> Any:
    """The lowest byte of an integer."""
    return _store_unsigned(8)


@intrinsic
def store_u16(typing: Any, address: Any, value: Any) -> Any:
    """The two lowest bytes of an integer."""
    return _store_unsigned(16)


@intrinsic
def store_u32(typing: Any, address: Any, value: Any) -> Any:
    """The four lowest bytes of an integer."""
    return _store_unsigned(32)


@intrinsic
def storef_upto(typing: Any, address: Any, value: Any, count: Any) -> Any:
    """Store the first `count` lanes and leave what lies behind them alone."""

    def emit(b: Any, p: Any, v: Any, count: Any) -> None:
        lane = ir.Constant(VI, list(range(LANES)))
        mask = b.icmp_signed("<", lane, splat(b, b.trunc(count, I32), VI))
        where = pointer(b, p, VF)
        kind = ir.FunctionType(ir.VoidType(), [VF, VF.as_pointer(), I32, mask.type])
        masked = cgutils.get_or_insert_function(b.module, kind, "llvm.masked.store.v16f32.p0")
        b.call(masked, [v, where, ir.Constant(I32, 4), mask])

    return make(types.void(types.int64, f32x16, types.int64), emit)


@intrinsic
def widen_half(typing: Any, bits: Any) -> Any:
    """The float32 of a half float given by its bits."""

    def emit(b: Any, bits: Any) -> Any:
        wide = half_to_float(b, splat(b, b.trunc(bits, I16), VH))
        return b.extract_element(wide, ir.Constant(I32, 0))

    return make(types.float32(types.int64), emit)


@intrinsic
def widen_bf16(typing: Any, bits: Any) -> Any:
    """The float32 of a bfloat16 given by its bits."""

    def emit(b: Any, bits: Any) -> Any:
        return b.bitcast(b.shl(b.trunc(bits, I32), ir.Constant(I32, 16)), F32)

    return make(types.float32(types.int64), emit)


@intrinsic
def narrow_half(typing: Any, value: Any) -> Any:
    """The bits of the half float nearest to a float32."""

    def emit(b: Any, value: Any) -> Any:
        half = float_to_half(b, splat(b, value, VF))
        return b.zext(b.extract_element(half, ir.Constant(I32, 0)), I64)

    return make(types.int64(types.float32), emit)
