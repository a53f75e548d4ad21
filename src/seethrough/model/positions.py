"""Tables that positions need (S5, S6.3, S6.4): rotary angles, sinusoids, ALiBi slopes."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from seethrough.model.spec import RopeSpec

F32 = NDArray[np.float32]


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> F32:
    """Angle per position of each pair of dimensions, [head_dim / 2], in radians.

    RoFormer (arXiv:2104.09864); `llama3` after the Llama 3.1 release: wavelengths above
    original/low_freq_factor are stretched by `factor`, those below original/high_freq_factor
    stay, and between them the two are blended. float32 throughout, as the models were trained.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq: F32 = np.reciprocal(np.power(rope.theta, exponent, dtype=np.float32))
    if rope.kind == "linear":
        return np.divide(inv_freq, rope.factor, dtype=np.float32)
    if rope.kind == "factors":
        return np.divide(inv_freq, rope.factors, dtype=np.float32)
    if rope.kind == "llama3":
        return _llama3(inv_freq, rope)
    return inv_freq


def _llama3(inv_freq: F32, rope: RopeSpec) -> F32:
    original = rope.original_max_positions
    wavelength = 2 * np.pi / inv_freq
    blend = (original / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    slow = inv_freq / rope.factor
    blended = (1 - blend) * slow + blend * inv_freq
    scaled = np.where(wavelength > original / rope.low_freq_factor, slow, blended)
    scaled = np.where(wavelength < original / rope.high_freq_factor, inv_freq, scaled)
    return np.asarray(scaled, dtype=np.float32)


def rotary_table(rope: RopeSpec, head_dim: int, length: int) -> tuple[F32, F32]:
    """cos and sin of every position's angles, each [length, head_dim / 2]."""
    positions = np.arange(length, dtype=np.float32)
    angles = positions[:, None] * inverse_frequencies(rope, head_dim)[None, :]
    return np.cos(angles), np.sin(angles)


def sinusoid_table(length: int, d_model: int, zero_row: int | None) -> F32:
    """Fixed position vectors [length, d_model]: all sines, then all cosines (tensor2tensor's form).

    Frequencies fall from 1 to 1/10000 over d_model/2 steps; an odd last column is zero, and so is
    row `zero_row`, where a family keeps that row for padding.
    """
    half = d_model // 2
    step = math.log(10_000) / (half - 1)
    freq = np.exp(np.arange(half, dtype=np.float32) * np.float32(-step))
    angles = np.arange(length, dtype=np.float32)[:, None] * freq[None, :]
    table = np.zeros((length, d_model), dtype=np.float32)
    table[:, :half] = np.sin(angles)
    table[:, half : 2 * half] = np.cos(angles)
    if zero_row is not None and 0 <= zero_row < length:
        table[zero_row] = 0
    return table


def alibi_slopes(n_heads: int) -> F32:
    """One slope per head (ALiBi, arXiv:2108.12409): 2^(−8i/n), for n a power of two.

    Other head counts take the slopes of the power of two below, then every second slope of the
    power of two above.
    """
    power = 1 << (n_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(n_heads - power)]
    return np.asarray(slopes, dtype=np.float32)
