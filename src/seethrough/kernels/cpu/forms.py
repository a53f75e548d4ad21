"""How a weight matrix lies in memory for the kernels: sixteen output rows side by side.

A *group* is sixteen rows, cut along its columns into *units*: a block of 32 columns, or (K-quants)
a super-block of 8 blocks. A group is read from its first byte to its last, one stream:

    head     per unit    the super-scales of a super-block; a block has none
    quants   per block   bits · 64 bytes   (a 64-byte load: 4 columns x 16 rows)
    scales   per block

Four columns of a row are neighbours in a byte quad, sixteen rows make 64 bytes, so that a byte dot
product leaves one row per lane and nothing is ever summed across lanes.

    4 bits   4 vectors: quad 2j in the low nibbles, quad 2j + 1 in the high nibbles
    5 bits   and one vector: bit g of a byte is the fifth bit of quad g
    6 bits   and two vectors: bits 2g, 2g + 1 are the upper bits of quad g (g mod 4)
    8 bits   8 vectors, one per quad

A weight is d·q + m, or d·(q − zero) where the format has no minimum; K-quants multiply d (and m)
by small whole numbers per block. Nothing is rounded: the packed matrix is the file's.
"""

from __future__ import annotations

from dataclasses import dataclass

LANES = 16
BLOCK = 32  # columns that share a scale; activations are quantized in the same blocks
SUPER = 8  # blocks of a super-block


@dataclass(frozen=True, slots=True)
class Form:
    """A quantized format as the kernels hold it.

    Attributes:
        bits: bits of a quant.
        zero: what is subtracted from a quant; 0 where a minimum is stored instead.
        levels: 1 = a float16 scale per block, 2 = whole-number scales under a float16 super-scale.
        halves: whether each half of a block has its own scale (Q6_K).
    """

    name: str
    code: int
    bits: int
    zero: int
    levels: int = 1
    halves: bool = False

    @property
    def has_min(self) -> bool:
        """Whether a minimum is stored."""
        return self.zero == 0

    @property
    def quant_bytes(self) -> int:
        """Bytes of a group's quants per block."""
        return self.bits * 4 * LANES

    @property
    def float_bytes(self) -> int:
        """Bytes of a group's float16 scale, and minimum if there is one."""
        return 2 * LANES * (2 if self.has_min else 1)

    @property
    def head_bytes(self) -> int:
        """Bytes of a group's super-scales, in front of the blocks of a unit."""
        return 0 if self.levels == 1 else self.float_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a group's block, quants and scales."""
        # K-quants: a byte for scale and minimum each, or for the scale of each half.
        return self.quant_bytes + (self.float_bytes if self.levels == 1 else 2 * LANES)

    @property
    def unit_blocks(self) -> int:
        """Blocks of a unit."""
        return 1 if self.levels == 1 else SUPER

    @property
    def unit_bytes(self) -> int:
        """Bytes of a group's unit."""
        return self.head_bytes + self.unit_blocks * self.block_bytes

    def group_bytes(self, columns: int) -> int:
        """Bytes of one group of rows with so many columns, a multiple of 64."""
        size = columns // BLOCK // self.unit_blocks * self.unit_bytes
        return -(-size // 64) * 64


FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        Form("Q4_0", 0, 4, 8),
        Form("Q4_1", 1, 4, 0),
        Form("Q5_0", 2, 5, 16),
        Form("Q5_1", 3, 5, 0),
        Form("Q8_0", 4, 8, 128),
        Form("Q4_K", 5, 4, 0, levels=2),
        Form("Q5_K", 6, 5, 0, levels=2),
        Form("Q6_K", 7, 6, 32, levels=2, halves=True),
    )
}
FLOATS: dict[str, int] = {"F32": 8, "F16": 9, "BF16": 10}  # name -> code
FLOAT_BYTES: dict[str, int] = {"F32": 4, "F16": 2, "BF16": 2}


def packed_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a matrix [rows, columns] in this layout."""
    rows, columns = shape
    groups = -(-rows // LANES)
    if dtype in FORMS:
        return groups * FORMS[dtype].group_bytes(columns)
    return groups * LANES * columns * FLOAT_BYTES[dtype]


# An activation block: 32 int8, then the scale s and s·sum as float32, the sums of both halves as
# int32: one stream per row, 48 bytes per 32 columns.
ACT_BYTES = 48
ACT_SCALE, ACT_SCALED_SUM, ACT_SUM_LOW, ACT_SUM_HIGH = 32, 36, 40, 44
