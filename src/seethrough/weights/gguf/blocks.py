"""Quantized block layouts: raw bytes to float32. Knows bytes and arithmetic, not files or tensors.

A quantized row is a sequence of blocks. Each function takes blocks as uint8 [n, block_bytes] and
returns float32 [n, block_size], with the same float32 operations in the same order as ggml's
reference, so the results agree bit for bit. Layouts: ggml's `ggml-common.h` and `ggml-quants.c`.

Names in the layouts: `d` is a block's scale and `m` its minimum, both float16; `q` are the
unsigned quants. "low/high nibbles" means that byte j holds element j in its low 4 bits and element
j + 16 (in K-quants j + 32) in its high 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block, widened: [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[n, 16] bytes of low/high nibbles to [n, 32] values of 0..15."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """[n, 4] bytes holding bit j of element j, to [n, 32] values of 0 or 16."""
    return np.left_shift(np.unpackbits(packed, axis=1, bitorder="little"), np.uint8(4))


def q4_0(blocks: Bytes) -> Floats:
    """18 bytes for 32 elements: d, 16 bytes of low/high nibbles. x = (q - 8) d."""
    q = _nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8)
    return _half(blocks, 0) * q.astype(np.float32)


def q4_1(blocks: Bytes) -> Floats:
    """20 bytes for 32 elements: d, m, 16 bytes of low/high nibbles. x = q d + m."""
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def q5_0(blocks: Bytes) -> Floats:
    """22 bytes for 32 elements: d, 4 bytes of fifth bits, 16 bytes of nibbles. x = (q - 16) d."""
    q = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).view(np.int8) - np.int8(16)
    return _half(blocks, 0) * q.astype(np.float32)


def q5_1(blocks: Bytes) -> Floats:
    """24 bytes for 32 elements: d, m, 4 bytes of fifth bits, 16 bytes of nibbles. x = q d + m."""
    q = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * q.astype(np.float32) + _half(blocks, 2)


def q8_0(blocks: Bytes) -> Floats:
    """34 bytes for 32 elements: d, 32 signed bytes. x = q d."""
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


def k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 12 scale bytes of Q4_K and Q5_K to eight 6-bit scales and minima, [n, 8] each.

    Bytes 0-3 hold scales 0-3 in their low 6 bits, bytes 4-7 minima 0-3. Bytes 8-11 hold the low 4
    bits of scales 4-7 (low nibble) and minima 4-7 (high nibble), whose top 2 bits are the top 2
    bits of bytes 0-3 and 4-7.
    """
    first, second, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 0x3F, (low & 0x0F) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 0x3F, (low >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, minima


def _k_nibbles(packed: Bytes) -> Bytes:
    """[n, 128] bytes, four runs of 32 with low/high nibbles, to [n, 8, 32] values of 0..15."""
    runs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([runs & 0x0F, runs >> 4], axis=2).reshape(-1, 8, 32)


def _scale_k(blocks: Bytes, q: Bytes) -> Floats:
    """x = (d s) q - (dmin m) for 8 sub-blocks of 32; the head of Q4_K and Q5_K is the same."""
    scales, minima = k_scales(blocks[:, 4:16])
    d = (_half(blocks, 0) * scales.astype(np.float32))[:, :, None]  # [n, 8, 1]
    m = (_half(blocks, 2) * minima.astype(np.float32))[:, :, None]
    return (d * q.astype(np.float32) - m).reshape(-1, 256)


def q4_k(blocks: Bytes) -> Floats:
    """144 bytes for 256 elements: d, dmin, 12 scale bytes (`k_scales`), 128 bytes of nibbles."""
    return _scale_k(blocks, _k_nibbles(blocks[:, 16:]))


def q5_k(blocks: Bytes) -> Floats:
    """176 bytes for 256 elements: d, dmin, 12 scale bytes, 32 bytes of fifth bits, 128 of nibbles.

    Bit s of fifth-bit byte j belongs to element j of sub-block s.
    """
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = (blocks[:, 16:48].reshape(-1, 1, 32) >> shifts) & np.uint8(1)  # [n, 8, 32]
    return _scale_k(blocks, _k_nibbles(blocks[:, 48:]) | fifth << np.uint8(4))


def q6_k(blocks: Bytes) -> Floats:
    """210 bytes for 256 elements: 128 bytes low 4 bits, 64 bytes high 2 bits, 16 int8 scales, d.

    Each half of 128 elements takes 64 low bytes and 32 high bytes: quarters 0 and 1 of the half are
    the low nibbles of its bytes 0-31 and 32-63, quarters 2 and 3 the high nibbles; bits 2k and 2k+1
    of high byte j belong to element j of quarter k. x = (d s) (q - 32), one scale per 16 elements.
    """
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 0x0F, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4
    q = (low | high).view(np.int8) - np.int8(32)  # [n, 2, 4, 32]
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    d = (_half(blocks, 208) * scales)[:, :, None]  # [n, 16, 1]
    return (d * q.reshape(-1, 16, 16).astype(np.float32)).reshape(-1, 256)


DEQUANTIZE: dict[str, Callable[[Bytes], Floats]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
