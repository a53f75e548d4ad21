"""Philox4x32-10, and the one uniform number per sampled token that is drawn from it.

A counter-based generator has no state: the number for token 17 of sample 3 is a function of the
seed and these two indices, whatever was computed before or beside it. That is why a draw does not
depend on the batch, on preemption or on a restart.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11.
"""

from __future__ import annotations

_WORD = 0xFFFFFFFF
# Multipliers and key increments (Weyl constants) of the paper.
_MUL0, _MUL1 = 0xD2511F53, 0xCD9E8D57
_WEYL0, _WEYL1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10

Words4 = tuple[int, int, int, int]


def philox4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """Mix four 32-bit counter words under two 32-bit key words, in ten rounds."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = _MUL0 * c0, _MUL1 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _WORD,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + _WEYL0) & _WORD, (k1 + _WEYL1) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, output_index: int, sample_index: int) -> float:
    """The draw for one token: a multiple of 2**-53 in [0, 1).

    Key: the 64 bits of the seed, low word first. Counter: (output index, sample index, 0, 0). The
    first two result words make a 64-bit number, low word first, of which the top 53 bits count.

    Raises:
        ValueError: the seed is not of 64 bits or an index not of 32.
    """
    check_words(seed, output_index, sample_index)
    low, high, _, _ = philox4x32((output_index, sample_index, 0, 0), (seed & _WORD, seed >> 32))
    return ((high << 32 | low) >> 11) * 2.0**-53


def check_words(seed: int, output_index: int, sample_index: int) -> None:
    """Refuse what does not fit its words.

    Raises:
        ValueError: the seed is not of 64 bits or an index not of 32.
    """
    if seed >> 64 or output_index >> 32 or sample_index >> 32:
        raise ValueError(
            f"expected a seed of 64 bits and indices of 32, not negative; got seed={seed}, "
            f"output_index={output_index}, sample_index={sample_index}"
        )
