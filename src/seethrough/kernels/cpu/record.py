"""The words that a kernel reads: one record per operation, and one table per step.

Both are int64 words. A kernel is called as kernel(record, step, counter, thread), all addresses
but the last; work is taken from `counter` piece by piece, so a slow core takes less of it. A matrix
product has a counter per section of its work (`threads.next_unit`).
"""

from __future__ import annotations

from enum import IntEnum

RECORD_WORDS = 32
SECTIONS = 8  # most counters of a record
SECTION_BYTES = 64  # one cache line each, so that two threads do not disturb one another
COUNTER_BYTES = SECTIONS * SECTION_BYTES


class R(IntEnum):
    """Words of every record; an operation's own follow from FIRST on."""

    KERNEL = 0  # address of the kernel
    BARRIER = 1  # whether all threads meet before it
    ROWS = 2  # the word of the step that holds its number of rows
    FIRST = 3


class S(IntEnum):
    """Words of the step."""

    ROWS = 0
    LOGIT_ROWS = 1
    TOKEN_IDS = 2
    POSITIONS = 3
    SLOTS = 4
    LOGIT_INDEX = 5
    TILES = 6  # attention works on tiles: rows of one request that follow one another
    TILE_ROW = 7  # [tiles] first row
    TILE_ROWS = 8  # [tiles] number of rows
    TILE_TABLE = 9  # [tiles] address of the request's block table
    SPLIT = 10  # whether pieces of a context are shared out to threads
    PARTIALS = 11
    PIECES = 12  # most pieces of any row
    SCORES = 13  # where S_masked goes, or 0
    SCORE_KEYS = 14  # keys of a row of S_masked
    SCRATCH = 15
    SCRATCH_BYTES = 16  # of each thread
    COUNTERS = 17
    BARRIER = 18
    K = 19
    V = 20
    BLOCKS = 21  # blocks of the pool
    BLOCK_SIZE = 22
    SHARES = 23  # into how many pieces work is cut, at least
    CLOCK = 24  # [records + 1] where the first thread notes when each record starts, or 0
    THREADS = 25


STEP_WORDS = 32


class L(IntEnum):
    """Words of a matrix product."""

    WEIGHTS = R.FIRST
    GROUP_BYTES = R.FIRST + 1
    GROUPS = R.FIRST + 2
    DEPTH = R.FIRST + 3  # blocks of 32 columns, or columns where weights are floats
    X = R.FIRST + 4
    X_STRIDE = R.FIRST + 5
    Y = R.FIRST + 6
    Y_STRIDE = R.FIRST + 7
    BIAS = R.FIRST + 8  # address or 0


class E(IntEnum):
    """Words of row records. Addresses, strides in bytes, counts, and floats by their bits."""

    X = R.FIRST
    X_STRIDE = R.FIRST + 1
    Y = R.FIRST + 2
    Y_STRIDE = R.FIRST + 3
    SIZE = R.FIRST + 4  # values of a row (of a head, where there are heads)
    Q = R.FIRST + 5  # where the quantized row goes, or 0
    Q_STRIDE = R.FIRST + 6
    OTHER = R.FIRST + 7  # a second input
    OTHER_STRIDE = R.FIRST + 8
    SUM = R.FIRST + 9  # where x + other goes (add before a norm)
    SUM_STRIDE = R.FIRST + 10
    WEIGHT = R.FIRST + 11
    BIAS = R.FIRST + 12
    HEADS = R.FIRST + 13
    NUMBER = R.FIRST + 14  # eps, cap, scale or offset
    COS = R.FIRST + 15
    SIN = R.FIRST + 16
    LAYER = R.FIRST + 17
    GROUP_BYTES = R.FIRST + 18


class A(IntEnum):
    """Words of an attention record."""

    Q = R.FIRST
    Q_STRIDE = R.FIRST + 1
    Y = R.FIRST + 2
    Y_STRIDE = R.FIRST + 3
    HEADS = R.FIRST + 4
    KV_HEADS = R.FIRST + 5
    SIZE = R.FIRST + 6  # values of a head
    LAYER = R.FIRST + 7
    SCALE = R.FIRST + 8
    CAP = R.FIRST + 9  # soft cap as float bits, 0 for none
    WINDOW = R.FIRST + 10  # positions that a row sees, 0 for all
    SLOPES = R.FIRST + 11  # address of ALiBi slopes, or 0


# Attention. A thread's scratch holds addresses of pages; of queries, with the keys that each sees
# and its number; scores (behind them their maximum and sum); mixes of a piece; states of a tile;
# the tile's queries once more, interleaved.
PIECE = 256  # positions that are weighed together
TILE = 16  # most rows of a tile
QUERIES = 8  # query vectors that share a pass over the keys, at most
SCORE_ROW = 4 * (PIECE + 16)  # bytes of a row of scores
KEYS, VALUES = 0, 192  # sixteen pages each, and room to look two ahead
LIST, SPANS, NUMBERS, WEIGHTS = 384, 448, 576, 640
MIX = WEIGHTS + QUERIES * SCORE_ROW


def scratch_bytes(head_size: int, group: int) -> int:
    """Bytes of scratch that a thread needs, whole cache lines."""
    woven = 4 * TILE * group * head_size + 4 * 16 * QUERIES  # written in sixteens
    size = MIX + (QUERIES + TILE * group) * mix_bytes(head_size) + woven
    return -(-size // 64) * 64


def mix_bytes(head_size: int) -> int:
    """A mix of one query: its values, then (a register on) its maximum and its sum."""
    return 4 * (-(-head_size // 16) * 16 + 16)
