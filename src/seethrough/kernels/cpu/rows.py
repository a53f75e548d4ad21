"""Everything that looks at one row alone: embed, norms, quantize, activations, rotation, cache.

Rows of a buffer lie `stride` bytes apart and are padded to sixteen values. What lies behind a
row's last value is never read into a result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from seethrough.kernels.cpu import forms, lanes
from seethrough.kernels.cpu.forms import ACT_BYTES, FORMS, LANES
from seethrough.kernels.cpu.record import E, R, S
from seethrough.kernels.cpu.simd import (
    absf,
    addf,
    divf,
    float_of,
    fmaf,
    inline,
    load_f32,
    load_i64,
    load_u8,
    load_u16,
    loadf,
    maxf,
    mulf,
    narrow_half,
    round_to_int8,
    splatf,
    store_f32,
    store_i32,
    store_u16,
    storef,
    storef_upto,
    storeh,
    subf,
    sumf,
    sumi,
    topf,
    upto,
    widen_bf16,
    widen_half,
)
from seethrough.kernels.cpu.threads import next_unit, sections_of

_F: Any = np.float32
_SEGMENT = 512  # values of a row that one piece of element-wise work takes
_ROWS = 8 * R.ROWS


_X, _XS, _Y, _YS, _N = 8 * E.X, 8 * E.X_STRIDE, 8 * E.Y, 8 * E.Y_STRIDE, 8 * E.SIZE
_Q, _QS = 8 * E.Q, 8 * E.Q_STRIDE
_O, _OS, _SUM, _SUMS = 8 * E.OTHER, 8 * E.OTHER_STRIDE, 8 * E.SUM, 8 * E.SUM_STRIDE
_W, _B, _HEADS, _NUMBER = 8 * E.WEIGHT, 8 * E.BIAS, 8 * E.HEADS, 8 * E.NUMBER
_COS, _SIN, _LAYER, _GB = 8 * E.COS, 8 * E.SIN, 8 * E.LAYER, 8 * E.GROUP_BYTES
_POSITIONS, _SLOTS = 8 * S.POSITIONS, 8 * S.SLOTS


@inline
def quantize(x: int, q: int, first: int, stop: int) -> None:
    """Blocks of 32 values to int8 with a scale (`forms.py`). What is no number makes it NaN."""
    low_most = splatf(_F(0))
    for block in range(first, stop):
        at, to = x + 128 * block, q + ACT_BYTES * block
        a, b = loadf(at), loadf(at + 64)
        top = topf(maxf(absf(a), absf(b)))
        # x · 0 is 0 for every number and NaN for what is none: it must not vanish in a rounding.
        taint = sumf(fmaf(a, low_most, mulf(b, low_most)))
        inverse = _F(0)
        if top > _F(0):
            inverse = _F(127) / top
        low = sumi(round_to_int8(to, mulf(a, splatf(inverse))))
        high = sumi(round_to_int8(to + 16, mulf(b, splatf(inverse))))
        scale = top / _F(127) + taint
        store_f32(to + forms.ACT_SCALE, scale)
        store_f32(to + forms.ACT_SCALED_SUM, scale * _F(low + high))
        store_i32(to + forms.ACT_SUM_LOW, low)
        store_i32(to + forms.ACT_SUM_HIGH, high)


@inline
def _tail(n: int, i: int) -> int:
    """Valid lanes of the vector that starts at value i of n."""
    return min(LANES, n - i)


@inline
def _mean(x: int, n: int) -> float:
    total = splatf(_F(0))
    for i in range(0, n, LANES):
        total = addf(total, upto(loadf(x + 4 * i), _tail(n, i), splatf(_F(0))))
    return sumf(total) / _F(n)


@inline
def _mean_square(x: int, n: int, mean: float) -> float:
    """Mean of (x - mean)²."""
    total, middle = splatf(_F(0)), splatf(mean)
    for i in range(0, n, LANES):
        v = upto(subf(loadf(x + 4 * i), middle), _tail(n, i), splatf(_F(0)))
        total = fmaf(v, v, total)
    return sumf(total) / _F(n)


def norm_kernel(layer_norm: bool) -> Callable[..., None]:
    """RMSNorm or LayerNorm of every row (of every head of it), after an addition where asked."""

    def norm(record: int, step: int, counter: int, thread: int) -> None:
        heads, n = load_i64(record + _HEADS), load_i64(record + _N)
        units = load_i64(step + 8 * load_i64(record + _ROWS)) * heads
        eps, q = float_of(load_i64(record + _NUMBER)), load_i64(record + _Q)
        sections = sections_of(step)
        unit, turn = next_unit(counter, units, sections, thread, 0)
        while unit >= 0:
            row, head = unit // heads, unit % heads
            x = load_i64(record + _X) + row * load_i64(record + _XS) + 4 * n * head
            other = load_i64(record + _O)
            if other != 0:
                total = load_i64(record + _SUM) + row * load_i64(record + _SUMS)
                add_rows(x, other + row * load_i64(record + _OS), total, 0, n)
                x = total
            y = load_i64(record + _Y) + row * load_i64(record + _YS) + 4 * n * head
            mean = _F(0)
            if layer_norm:
                mean = _mean(x, n)
            root = np.sqrt(_mean_square(x, n, mean) + eps)
            scale_row(x, y, n, mean, _F(1) / root, load_i64(record + _W), load_i64(record + _B))
            if q != 0:
                quantize(y, q + row * load_i64(record + _QS), 0, n // 32)
            unit, turn = next_unit(counter, units, sections, thread, turn)

    return norm


@inline
def scale_row(x: int, y: int, n: int, mean: float, inverse: float, w: int, bias: int) -> None:
    """(x - mean) · inverse · w + bias."""
    middle, factor = splatf(mean), splatf(inverse)
    for i in range(0, n, LANES):
        v = mulf(mulf(subf(loadf(x + 4 * i), middle), factor), loadf(w + 4 * i))
        if bias != 0:
            v = addf(v, loadf(bias + 4 * i))
        storef_upto(y + 4 * i, v, n - i)


@inline
def add_rows(x: int, other: int, y: int, first: int, stop: int) -> None:
    """y = x + other for values first .. stop - 1."""
    for i in range(first, stop, LANES):
        storef_upto(y + 4 * i, addf(loadf(x + 4 * i), loadf(other + 4 * i)), stop - i)


def add(record: int, step: int, counter: int, thread: int) -> None:
    """y = x + other."""
    n = load_i64(record + _N)
    units = load_i64(step + 8 * load_i64(record + _ROWS))
    sections = sections_of(step)
    row, turn = next_unit(counter, units, sections, thread, 0)
    while row >= 0:
        x = load_i64(record + _X) + row * load_i64(record + _XS)
        other = load_i64(record + _O) + row * load_i64(record + _OS)
        add_rows(x, other, load_i64(record + _Y) + row * load_i64(record + _YS), 0, n)
        row, turn = next_unit(counter, units, sections, thread, turn)


def add_positions(record: int, step: int, counter: int, thread: int) -> None:
    """y = x + the row of a position table; NUMBER holds the table's offset as an integer."""
    n, positions = load_i64(record + _N), load_i64(step + _POSITIONS)
    units = load_i64(step + 8 * load_i64(record + _ROWS))
    sections = sections_of(step)
    row, turn = next_unit(counter, units, sections, thread, 0)
    while row >= 0:
        place = load_i64(positions + 8 * row) + load_i64(record + _NUMBER)
        x = load_i64(record + _X) + row * load_i64(record + _XS)
        other = load_i64(record + _W) + place * 4 * n
        add_rows(x, other, load_i64(record + _Y) + row * load_i64(record + _YS), 0, n)
        row, turn = next_unit(counter, units, sections, thread, turn)


def quantize_kernel(record: int, step: int, counter: int, thread: int) -> None:
    """A float row to int8 blocks, for a value that has no maker that does it."""
    blocks, q = load_i64(record + _N) // 32, load_i64(record + _Q)
    units = load_i64(step + 8 * load_i64(record + _ROWS))
    sections = sections_of(step)
    row, turn = next_unit(counter, units, sections, thread, 0)
    while row >= 0:
        x = load_i64(record + _X) + row * load_i64(record + _XS)
        quantize(x, q + row * load_i64(record + _QS), 0, blocks)
        row, turn = next_unit(counter, units, sections, thread, turn)


def take_rows(record: int, step: int, counter: int, thread: int) -> None:
    """Copy the rows whose logits are wanted."""
    n, chosen = load_i64(record + _N), load_i64(step + 8 * S.LOGIT_INDEX)
    units = load_i64(step + 8 * load_i64(record + _ROWS))
    sections = sections_of(step)
    row, turn = next_unit(counter, units, sections, thread, 0)
    while row >= 0:
        x = load_i64(record + _X) + load_i64(chosen + 8 * row) * load_i64(record + _XS)
        y = load_i64(record + _Y) + row * load_i64(record + _YS)
        for i in range(0, n, LANES):
            storef_upto(y + 4 * i, loadf(x + 4 * i), n - i)
        row, turn = next_unit(counter, units, sections, thread, turn)


def activation_kernel(kind: str, gated: bool) -> Callable[..., None]:
    """act(x), times `other` where gated; quantized block by block where the next matrix asks."""
    function = {
        "silu": lanes.silu,
        "gelu": lanes.gelu,
        "gelu_tanh": lanes.gelu_tanh,
        "relu": lanes.relu,
    }[kind]

    def activate(record: int, step: int, counter: int, thread: int) -> None:
        n, q = load_i64(record + _N), load_i64(record + _Q)
        across = (n + _SEGMENT - 1) // _SEGMENT
        units = load_i64(step + 8 * load_i64(record + _ROWS)) * across
        sections = sections_of(step)
        unit, turn = next_unit(counter, units, sections, thread, 0)
        while unit >= 0:
            row, first = unit // across, unit % across * _SEGMENT
            stop = min(first + _SEGMENT, n)
            x = load_i64(record + _X) + row * load_i64(record + _XS)
            y = load_i64(record + _Y) + row * load_i64(record + _YS)
            other = load_i64(record + _O) + row * load_i64(record + _OS)
            for i in range(first, stop, LANES):
                v = function(loadf(x + 4 * i))
                if gated:
                    v = mulf(v, loadf(other + 4 * i))
                storef_upto(y + 4 * i, v, stop - i)
            if q != 0:
                quantize(y, q + row * load_i64(record + _QS), first // 32, stop // 32)
            unit, turn = next_unit(counter, units, sections, thread, turn)

    return activate


def softcap(record: int, step: int, counter: int, thread: int) -> None:
    """cap · tanh(x / cap), in place."""
    n, cap = load_i64(record + _N), splatf(float_of(load_i64(record + _NUMBER)))
    across = (n + _SEGMENT - 1) // _SEGMENT
    units = load_i64(step + 8 * load_i64(record + _ROWS)) * across
    sections = sections_of(step)
    unit, turn = next_unit(counter, units, sections, thread, 0)
    while unit >= 0:
        row, first = unit // across, unit % across * _SEGMENT
        x = load_i64(record + _X) + row * load_i64(record + _XS)
        stop = min(first + _SEGMENT, n)
        for i in range(first, stop, LANES):
            v = mulf(cap, lanes.tanh(divf(loadf(x + 4 * i), cap)))
            storef_upto(x + 4 * i, v, stop - i)
        unit, turn = next_unit(counter, units, sections, thread, turn)


@inline
def rotate_head(x: int, y: int, n: int, cos: int, sin: int) -> None:
    """Turn pair (i, i + n/2) by angle i; products are rounded one by one, as in the plain twin."""
    half = n // 2
    for i in range(0, half, LANES):
        c, s = loadf(cos + 4 * i), loadf(sin + 4 * i)
        a, b = loadf(x + 4 * i), loadf(x + 4 * (half + i))
        storef_upto(y + 4 * i, subf(mulf(a, c), mulf(b, s)), half - i)
        storef_upto(y + 4 * (half + i), addf(mulf(b, c), mulf(a, s)), half - i)


def rotate(record: int, step: int, counter: int, thread: int) -> None:
    """Turn every head of every row by the row's angles. COS, SIN: tables [positions, n/2]."""
    heads, n = load_i64(record + _HEADS), load_i64(record + _N)
    positions = load_i64(step + _POSITIONS)
    units = load_i64(step + 8 * load_i64(record + _ROWS)) * heads
    sections = sections_of(step)
    unit, turn = next_unit(counter, units, sections, thread, 0)
    while unit >= 0:
        row, head = unit // heads, unit % heads
        place = 4 * (n // 2) * load_i64(positions + 8 * row)
        x = load_i64(record + _X) + row * load_i64(record + _XS) + 4 * n * head
        y = load_i64(record + _Y) + row * load_i64(record + _YS) + 4 * n * head
        rotate_head(x, y, n, load_i64(record + _COS) + place, load_i64(record + _SIN) + place)
        unit, turn = next_unit(counter, units, sections, thread, turn)


def write_kernel(size: int) -> Callable[..., None]:
    """K (X, rotated to Y first where COS is given) and V (OTHER) into the cache, `size` bytes each.

    A block holds K as [kv heads, n, positions] and V as [kv heads, positions, n]: sixteen scores
    are then one vector, and so are sixteen values of a mix.
    """

    def write(record: int, step: int, counter: int, thread: int) -> None:
        heads, n = load_i64(record + _HEADS), load_i64(record + _N)
        block_size, slots = load_i64(step + 8 * S.BLOCK_SIZE), load_i64(step + _SLOTS)
        layer = load_i64(record + _LAYER) * load_i64(step + 8 * S.BLOCKS)
        cos, sin = load_i64(record + _COS), load_i64(record + _SIN)
        units = load_i64(step + 8 * load_i64(record + _ROWS)) * heads
        sections = sections_of(step)
        unit, turn = next_unit(counter, units, sections, thread, 0)
        while unit >= 0:
            row, head = unit // heads, unit % heads
            slot = load_i64(slots + 8 * row)
            block, offset = layer + slot // block_size, slot % block_size
            page = (block * heads + head) * n * block_size * size
            k = load_i64(record + _X) + row * load_i64(record + _XS) + 4 * n * head
            v = load_i64(record + _O) + row * load_i64(record + _OS) + 4 * n * head
            if cos != 0:
                place = 4 * (n // 2) * load_i64(load_i64(step + _POSITIONS) + 8 * row)
                turned = load_i64(record + _Y) + row * load_i64(record + _YS) + 4 * n * head
                rotate_head(k, turned, n, cos + place, sin + place)
                k = turned
            write_key(
                k, load_i64(step + 8 * S.K) + page + offset * size, n, block_size * size, size
            )
            write_value(v, load_i64(step + 8 * S.V) + page + offset * n * size, n, size)
            unit, turn = next_unit(counter, units, sections, thread, turn)

    return write


@inline
def write_key(x: int, to: int, n: int, stride: int, size: int) -> None:
    """The values of a key, `stride` bytes apart."""
    for i in range(n):
        if size == 4:
            store_f32(to + i * stride, load_f32(x + 4 * i))
        else:
            store_u16(to + i * stride, narrow_half(load_f32(x + 4 * i)))


@inline
def write_value(x: int, to: int, n: int, size: int) -> None:
    """The values of a value vector, side by side."""
    for i in range(0, n - n % LANES, LANES):
        if size == 4:
            storef(to + 4 * i, loadf(x + 4 * i))
        else:
            storeh(to + 2 * i, loadf(x + 4 * i))
    for i in range(n - n % LANES, n):
        if size == 4:
            store_f32(to + 4 * i, load_f32(x + 4 * i))
        else:
            store_u16(to + 2 * i, narrow_half(load_f32(x + 4 * i)))


def embed_kernel(name: str) -> Callable[..., None]:
    """Rows of the embedding table, out of its packed form, times a scale."""
    quantized = name in FORMS
    bits = FORMS[name].bits if quantized else 0
    zero = FORMS[name].zero if quantized else 0
    levels = FORMS[name].levels if quantized else 0
    quant_bytes = FORMS[name].quant_bytes if quantized else 0
    head_bytes = FORMS[name].head_bytes if quantized else 0
    block_bytes = FORMS[name].block_bytes if quantized else 0
    unit_bytes = FORMS[name].unit_bytes if quantized else 0
    per_unit = FORMS[name].unit_blocks if quantized else 1
    halves = quantized and FORMS[name].halves
    size = 0 if quantized else forms.FLOAT_BYTES[name]
    is_half = name == "F16"

    @inline
    def quant(at: int, lane: int, column: int) -> int:
        """One quant of a packed block: `at` its quants, column 0 .. 31."""
        quad, byte = column >> 2, 4 * lane + (column & 3)
        if bits == 8:
            return load_u8(at + 64 * quad + byte)
        q = (load_u8(at + 64 * (quad >> 1) + byte) >> (4 * (quad & 1))) & 15
        if bits == 5:
            q |= ((load_u8(at + 256 + byte) >> quad) & 1) << 4
        if bits == 6:
            q |= ((load_u8(at + 256 + 64 * (quad >> 2) + byte) >> (2 * (quad & 3))) & 3) << 4
        return q

    @inline
    def scales(unit: int, at: int, lane: int, half: int) -> tuple[float, float]:
        """d and m of one row's block, as the file's format defines them in float32.

        `at` is the address of the block's own scales; `unit` that of the super-scales, if any.
        """
        d = widen_half(load_u16((at if levels == 1 else unit) + 2 * lane))
        if levels == 1:
            m = _F(0)
            if zero == 0:
                m = widen_half(load_u16(at + 32 + 2 * lane))
            return d, m
        if halves:
            number = load_u8(at + 16 * half + lane)
            return d * _F(number - 256 if number > 127 else number), _F(0)
        m = widen_half(load_u16(unit + 32 + 2 * lane))
        return d * _F(load_u8(at + lane)), -(m * _F(load_u8(at + 16 + lane)))

    @inline
    def quantized_row(group: int, lane: int, y: int, blocks: int, factor: float) -> None:
        for block in range(blocks):
            unit = group + block // per_unit * unit_bytes
            quants = unit + head_bytes + block % per_unit * block_bytes
            for c in range(32):
                d, m = scales(unit, quants + quant_bytes, lane, c >> 4)
                q = _F(quant(quants, lane, c) - zero)
                value = d * q
                if zero == 0:
                    value = value + m
                store_f32(y + 4 * (32 * block + c), value * factor)

    @inline
    def float_row(group: int, lane: int, y: int, n: int, factor: float) -> None:
        for i in range(n):
            at = group + (16 * i + lane) * size
            if size == 4:
                value = load_f32(at)
            elif is_half:
                value = widen_half(load_u16(at))
            else:
                value = widen_bf16(load_u16(at))
            store_f32(y + 4 * i, value * factor)

    def embed(record: int, step: int, counter: int, thread: int) -> None:
        n, ids = load_i64(record + _N), load_i64(step + 8 * S.TOKEN_IDS)
        units = load_i64(step + 8 * load_i64(record + _ROWS))
        factor = float_of(load_i64(record + _NUMBER))
        sections = sections_of(step)
        row, turn = next_unit(counter, units, sections, thread, 0)
        while row >= 0:
            token = load_i64(ids + 8 * row)
            group = load_i64(record + _W) + token // 16 * load_i64(record + _GB)
            y = load_i64(record + _Y) + row * load_i64(record + _YS)
            if quantized:
                quantized_row(group, token % 16, y, n // 32, factor)
            else:
                float_row(group, token % 16, y, n, factor)
            row, turn = next_unit(counter, units, sections, thread, turn)

    return embed
