"""Random quantized blocks whose weights have mean 0 and deviation 1/sqrt(columns), per type.

Every quant bit is random; only scales are chosen. Layouts are ggml's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

Blocks = np.ndarray
Rng = np.random.Generator


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type's number, and values and bytes of a block."""

    number: GGMLQuantizationType
    values: int
    nbytes: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row."""
        if columns % self.values:
            raise ValueError(f"{columns} columns are no multiple of {self.values}")
        return columns // self.values * self.nbytes


GGUF_TYPES = {
    name.lower(): BlockType(number, *GGML_QUANT_SIZES[number])
    for name, number in GGMLQuantizationType.__members__.items()
    if name in ("Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q6_K")
}


def random_blocks(kind: str, rows: int, columns: int, rng: Rng) -> Blocks:
    """A matrix of this type, as the bytes of its rows."""
    of_type = GGUF_TYPES[kind]
    row_bytes = of_type.row_bytes(columns)
    raw = np.frombuffer(rng.bytes(rows * row_bytes), np.uint8).reshape(-1, of_type.nbytes).copy()
    _SCALES[kind](raw, 1 / sqrt(columns), rng)
    return raw.reshape(rows, row_bytes)


def _flat(quants: int) -> Callable[[Blocks, float, Rng], None]:
    """Types that are one f16 scale and signed quants of so many values."""
    deviation = sqrt((quants**2 - 1) / 12)

    def scale(raw: Blocks, wanted: float, rng: Rng) -> None:
        _put_f16(raw, 0, wanted / deviation * rng.uniform(0.8, 1.2, len(raw)))

    return scale


def _q4_k(raw: Blocks, wanted: float, rng: Rng) -> None:
    """d, dmin, 8 six-bit scales and 8 minima: w = d·scale·q − dmin·minimum, q in 0..15.

    With minimum = scale and dmin = 7.5·d the mean of every sub-block is 0.
    """
    d = np.full(len(raw), wanted / (sqrt((16**2 - 1) / 12) * 16))
    _put_f16(raw, 0, d)
    _put_f16(raw, 2, 7.5 * d)
    scales = rng.integers(12, 21, (len(raw), 8), dtype=np.uint8)
    low, high = scales[:, :4], scales[:, 4:]
    raw[:, 4:8] = raw[:, 8:12] = low | (high >> 4) << 6
    raw[:, 12:16] = (high & 15) | (high & 15) << 4


def _q6_k(raw: Blocks, wanted: float, rng: Rng) -> None:
    """16 int8 scales and d at the end: w = d·scale·(q − 32), q in 0..63."""
    raw[:, 192:208] = rng.integers(6, 11, (len(raw), 16), dtype=np.uint8)
    _put_f16(raw, 208, np.full(len(raw), wanted / (sqrt((64**2 - 1) / 12) * 8)))


def _put_f16(raw: Blocks, at: int, values: np.ndarray) -> None:
    raw[:, at : at + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)


_SCALES = {
    "q4_0": _flat(16),
    "q5_0": _flat(32),
    "q8_0": _flat(256),
    "q4_k": _q4_k,
    "q6_k": _q6_k,
}
