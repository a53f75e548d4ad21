"""Repacks a tensor of a file into the kernels' layout (`forms.py`): compiled, nothing rounded."""

from __future__ import annotations

from collections.abc import Callable

from seethrough.kernels.cpu.forms import LANES, Form
from seethrough.kernels.cpu.simd import (
    inline,
    load_u8,
    load_u16,
    load_u32,
    store_u8,
    store_u16,
    store_u32,
)

_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0, _Q4_K, _Q5_K, _Q6_K = range(8)


@inline
def _spread(bits: int) -> int:
    """Four bits to the low bits of four bytes."""
    return ((bits & 15) * 0x00204081) & 0x01010101


@inline
def _quad(code: int, block: int, s: int, g: int) -> int:
    """Four quants (columns 4g .. 4g + 3 of block s) as the bytes of a word.

    `block` is the address of the file's block or super-block; s is 0 for the former.
    """
    low = 0x0F0F0F0F
    if code == _Q8_0:
        return load_u32(block + 2 + 4 * g) ^ 0x80808080
    if code <= _Q5_1:
        head = 2 + 2 * (code & 1) + (4 if code >= _Q5_0 else 0)
        word = load_u32(block + head + 4 * (g & 3))
        q = (word >> (4 * (g >> 2))) & low
        if code >= _Q5_0:
            q |= _spread(load_u32(block + head - 4) >> (4 * g)) << 4
        return q
    if code == _Q6_K:
        half, part = s >> 2, s & 3
        word = load_u32(block + 64 * half + 32 * (part & 1) + 4 * g)
        upper = load_u32(block + 128 + 32 * half + 4 * g) >> (2 * part)
        q = (word >> (4 * (part >> 1))) & low
        return q | ((upper & 0x03030303) << 4)
    head = 16 if code == _Q4_K else 48
    q = (load_u32(block + head + 32 * (s >> 1) + 4 * g) >> (4 * (s & 1))) & low
    if code == _Q5_K:
        fifth = (load_u32(block + 16 + 4 * g) >> s) & 0x01010101
        q |= fifth << 4
    return q


@inline
def place(code: int, bits: int, quants: int, lane: int, block: int, s: int) -> None:
    """Write the 32 quants of one row's block into its lane of the packed block."""
    at = quants + 4 * lane
    if bits == 8:
        for g in range(8):
            store_u32(at + 64 * g, _quad(code, block, s, g))
        return
    low = 0x0F0F0F0F
    first, second = 0, 0
    for j in range(4):
        a, b = _quad(code, block, s, 2 * j), _quad(code, block, s, 2 * j + 1)
        store_u32(at + 64 * j, (a & low) | ((b & low) << 4))
        if bits == 5:
            one = 0x01010101
            first |= ((a >> 4) & one) << (2 * j)
            first |= ((b >> 4) & one) << (2 * j + 1)
        elif bits == 6:
            three = 0x03030303
            pair = ((a >> 4) & three) << (4 * (j & 1))
            pair |= ((b >> 4) & three) << (4 * (j & 1) + 2)
            if j < 2:
                first |= pair
            else:
                second |= pair
    if bits >= 5:
        store_u32(at + 256, first)
    if bits == 6:
        store_u32(at + 320, second)


@inline
def _k_scale(scales: int, s: int) -> tuple[int, int]:
    """The 6-bit scale and minimum of block s (0 .. 7) from the 12 bytes of Q4_K and Q5_K."""
    if s < 4:
        return load_u8(scales + s) & 63, load_u8(scales + 4 + s) & 63
    low, top = load_u8(scales + 4 + s), load_u8(scales + s - 4)
    return (low & 15) | ((top >> 6) << 4), (low >> 4) | ((load_u8(scales + s) >> 6) << 4)


@inline
def write_floats(code: int, at: int, lane: int, block: int) -> None:
    """Write one row's float16 scale and minimum: of a block, or those above a super-block's."""
    store_u16(at + 2 * lane, load_u16(block + (208 if code == _Q6_K else 0)))
    if code in (_Q4_1, _Q5_1, _Q4_K, _Q5_K):
        store_u16(at + 32 + 2 * lane, load_u16(block + 2))


@inline
def write_numbers(code: int, at: int, lane: int, block: int, s: int) -> None:
    """Write one row's whole-number scales of block s of a super-block."""
    if code == _Q6_K:
        store_u8(at + lane, load_u8(block + 192 + 2 * s))
        store_u8(at + 16 + lane, load_u8(block + 192 + 2 * s + 1))
    else:
        scale, minimum = _k_scale(block + 4, s)
        store_u8(at + lane, scale)
        store_u8(at + 16 + lane, minimum)


def pack_kernel(form: Form) -> Callable[..., None]:
    """The packer of one format: its branches are decided when it is compiled."""
    code, bits, per_unit = form.code, form.bits, form.unit_blocks
    packed_unit, packed_block, quant_bytes = form.unit_bytes, form.block_bytes, form.quant_bytes
    head, levels = form.head_bytes, form.levels

    def pack(
        source: int,
        row_bytes: int,
        rows: int,
        unit_bytes: int,
        blocks: int,
        target: int,
        group_bytes: int,
        first: int,
        stop: int,
    ) -> None:
        """Pack groups first .. stop - 1; rows behind the last stay zero. Addresses and bytes."""
        for group in range(first, stop):
            for lane in range(min(LANES, rows - LANES * group)):
                row = source + (LANES * group + lane) * row_bytes
                for unit in range(blocks // per_unit):
                    block = row + unit * unit_bytes
                    at = target + group * group_bytes + unit * packed_unit
                    write_floats(code, at + (quant_bytes if levels == 1 else 0), lane, block)
                    for s in range(per_unit):
                        quants = at + head + s * packed_block
                        place(code, bits, quants, lane, block, s)
                        if levels == 2:
                            write_numbers(code, quants + quant_bytes, lane, block, s)

    return pack


def pack_floats_kernel(size: int) -> Callable[..., None]:
    """The packer of numbers of `size` bytes: column by column."""

    def pack(source: int, rows: int, columns: int, target: int, first: int, stop: int) -> None:
        """Pack groups first .. stop - 1 of sixteen rows each."""
        for group in range(first, stop):
            at = target + group * columns * LANES * size
            for lane in range(min(LANES, rows - LANES * group)):
                row = source + (LANES * group + lane) * columns * size
                for c in range(columns):
                    if size == 4:
                        store_u32(at + (LANES * c + lane) * 4, load_u32(row + 4 * c))
                    else:
                        store_u16(at + (LANES * c + lane) * 2, load_u16(row + 2 * c))

    return pack
