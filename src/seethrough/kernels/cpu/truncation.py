"""S11 over a row of logits: the k best, the heaviest, the nearest; by selection, never by sorting.

Candidates, addresses and results are those of `sampling`. Only `best` may meet -inf.
"""

from __future__ import annotations

import numpy as np

from seethrough.kernels.cpu.sampling import (
    HIGHEST,
    Array,
    add_up,
    f32,
    f64,
    falling,
    i32,
    i64,
    u32,
    value_of,
)
from seethrough.kernels.cpu.simd import inline

BINS = 2048  # of one level of a selection
SPREAD = 4  # a bin is so many cells, taken in turn: one cell's sum would wait for itself
_STRIP = 64  # candidates that are skipped together where none is kept
_DIGITS = ((21, 2047), (10, 2047), (0, 1023))  # of a 32-bit key, the high ones first


# --- Selection: by counting or weighing what falls into bins, never by sorting. ------------------


@inline
def _smallest(keys: Array, n: int, k: int, counts: Array) -> tuple[int, int]:
    """The k-th smallest of n >= k >= 1 keys, and how many equal to it are among the k.

    Three passes over ever fewer keys; their array is used up.
    """
    wanted = k
    for shift, mask in _DIGITS:
        if n == 1:
            break
        for c in range(SPREAD * (mask + 1)):
            counts[c] = 0
        for i in range(n):
            digit = (np.int64(keys[i]) >> shift) & mask
            counts[digit * SPREAD + (i & 3)] += 1
        at = -1
        inside = 0
        while wanted > inside:
            wanted -= inside
            at += 1
            c = at * SPREAD
            inside = (counts[c] + counts[c + 1]) + (counts[c + 2] + counts[c + 3])
        kept = 0
        for i in range(n):
            keys[kept] = keys[i]
            kept += ((np.int64(keys[i]) >> shift) & mask) == at
        n = kept
    return int(keys[0]), wanted


def best(
    values_at: int, n: int, k: int, keys_at: int, tops_at: int, counts_at: int, words_at: int
) -> None:
    """words: the key of the k-th highest of n >= k >= 1, and how many of its equals are in the k.

    The k-th highest of the strips' own maxima cannot be higher, so what lies below it, nearly all
    of a wide row, is not looked at again.
    """
    values, keys, tops, counts = f32(values_at), u32(keys_at), u32(tops_at), i64(counts_at)
    strips = (n + _STRIP - 1) // _STRIP
    for s in range(strips):
        top = np.uint32(0xFFFFFFFF)
        for i in range(s * _STRIP, min(n, (s + 1) * _STRIP)):
            top = min(top, falling(values[i]))
        tops[s] = top
        keys[s] = top
    bound = 0xFFFFFFFF
    if k <= strips:
        bound, _ = _smallest(keys, strips, k, counts)
    found = 0
    for s in range(strips):
        if np.int64(tops[s]) <= bound:
            for i in range(s * _STRIP, min(n, (s + 1) * _STRIP)):
                key = falling(values[i])
                keys[found] = key
                found += int(np.int64(key) <= bound)
    words = i64(words_at)
    words[0], words[1] = _smallest(keys, found, k, counts)


@inline
def _border_bin(
    cells: Array, bins: int, reached: float, limit: float, may_miss: bool
) -> tuple[int, float]:
    """The first bin that lifts the mass above the limit, and the mass before it.

    Inside a bin that is known to do so rounding may say that none does: then the last with mass.
    """
    last, before_last = -1, reached
    for b in range(bins):
        c = b * SPREAD
        inside = (cells[c] + cells[c + 1]) + (cells[c + 2] + cells[c + 3])
        if reached + inside > limit:
            return b, reached
        if inside > 0.0:
            last, before_last = b, reached
        reached += inside
    return (-1 if may_miss else last), before_last


@inline
def _cut(
    keys: Array, weights: Array, n: int, limit: float, cells: Array, words: Array, reals: Array
) -> None:
    """The smallest key at which the mass of all keys up to it exceeds a limit; limit >= 0.

    words: how many have that key (0 if the whole mass does not exceed the limit), the key;
    reals: the weight of the first who has it, the mass of all smaller keys. Three passes over ever
    fewer keys; both arrays are used up.
    """
    reached = 0.0
    words[0] = 0
    for level in range(3):
        shift, mask = _DIGITS[level]
        for c in range(SPREAD * (mask + 1)):
            cells[c] = 0.0
        for i in range(n):
            digit = (np.int64(keys[i]) >> shift) & mask
            cells[digit * SPREAD + (i & 3)] += weights[i]
        at, reached = _border_bin(cells, mask + 1, reached, limit, level == 0)
        if at < 0:
            return
        kept = 0
        for i in range(n):
            keys[kept] = keys[i]
            weights[kept] = weights[i]
            kept += ((np.int64(keys[i]) >> shift) & mask) == at
        n = kept
    words[0], words[1] = n, np.int64(keys[0])
    reals[0], reals[1] = weights[0], reached


def cut_heavy(
    values_at: int,
    weights_at: int,
    n: int,
    keys_at: int,
    terms_at: int,
    cells_at: int,
    words_at: int,
    reals_at: int,
) -> None:
    """Where the mass, from the highest logit down, exceeds a limit: words and reals as in `_cut`.

    reals: the limit, and a weight; what weighs no more than that is known to lie beyond the cut.
    """
    values, weights, reals = f32(values_at), f64(weights_at), f64(reals_at)
    limit, least = reals[0], reals[1]
    picked, keys, terms = f32(keys_at), u32(keys_at), f64(terms_at)  # values first, in their place
    found = 0
    for start in range(0, n, _STRIP):
        stop = min(n, start + _STRIP)
        near = 0
        for i in range(start, stop):
            near += weights[i] > least
        if near == 0:
            continue
        for i in range(start, stop):
            picked[found] = values[i]
            terms[found] = weights[i]
            found += weights[i] > least
    for i in range(found):
        keys[i] = falling(picked[i])
    _cut(keys, terms, found, limit, f64(cells_at), i64(words_at), reals)


# --- Keeping: candidates move to the front of arrays that may be their own. -----------------------
#
# Each is written where the next that stays belongs, and the place advances if it did stay: a branch
# would be guessed wrong too often.


def keep_best(
    values_at: int,
    ids_at: int,
    n: int,
    key: int,
    ties: int,
    out_values_at: int,
    out_ids_at: int,
    words_at: int,
) -> None:
    """Keep what is above `key`'s value and the first `ties` that equal it; words: how many."""
    values, ids = f32(values_at), i32(ids_at)
    out_values, out_ids = f32(out_values_at), i32(out_ids_at)
    least = value_of(key)
    kept = 0
    for start in range(0, n, _STRIP):
        stop = min(n, start + _STRIP)
        near = np.int32(0)
        for i in range(start, stop):
            near += np.int32(values[i] >= least)
        if near == 0:
            continue
        for i in range(start, stop):
            value = values[i]
            tie = (value == least) & (ties > 0)
            out_values[kept] = value
            out_ids[kept] = ids[i]
            kept += (value > least) | tie
            ties -= tie
    i64(words_at)[0] = kept


def keep_heavy(
    values_at: int,
    ids_at: int,
    weights_at: int,
    n: int,
    reals_at: int,
    out_values_at: int,
    out_ids_at: int,
    words_at: int,
) -> None:
    """Keep what weighs at least reals: a weight; words: how many."""
    values, ids = f32(values_at), i32(ids_at)
    out_values, out_ids = f32(out_values_at), i32(out_ids_at)
    weights, least = f64(weights_at), f64(reals_at)[0]
    kept = 0
    for start in range(0, n, _STRIP):
        stop = min(n, start + _STRIP)
        near = 0
        for i in range(start, stop):
            near += weights[i] >= least
        if near == 0:
            continue
        for i in range(start, stop):
            out_values[kept] = values[i]
            out_ids[kept] = ids[i]
            kept += weights[i] >= least
    i64(words_at)[0] = kept


# --- Typical: how far each surprise is from the entropy. ------------------------------------------


def mean_shift(
    values_at: int, weights_at: int, n: int, terms_at: int, mass_at: int, reals_at: int
) -> None:
    """reals: top; becomes the sum of weight · (x - top), of which the entropy is made."""
    values, weights, terms, reals = f32(values_at), f64(weights_at), f64(terms_at), f64(reals_at)
    top = reals[0]
    for i in range(n):
        terms[i] = weights[i] * (np.float64(values[i]) - top)
    reals[0] = add_up(terms, n, f64(mass_at))


def cut_typical(
    values_at: int,
    weights_at: int,
    n: int,
    distances_at: int,
    keys_at: int,
    terms_at: int,
    cells_at: int,
    words_at: int,
    reals_at: int,
) -> None:
    """Where the mass, from the nearest surprise outwards, exceeds a limit: as `_cut` says.

    reals: top, log(total), the entropy, the limit. Keeps the distances, |surprise - entropy| in
    nats as float32; surprise is log(total) - (x - top).
    """
    values, weights, reals = f32(values_at), f64(weights_at), f64(reals_at)
    distances, bits = f32(distances_at), u32(distances_at)
    keys, terms = u32(keys_at), f64(terms_at)
    top, log_total, entropy, limit = reals[0], reals[1], reals[2], reals[3]
    for i in range(n):
        surprise = log_total - (np.float64(values[i]) - top)
        distances[i] = np.float32(min(abs(surprise - entropy), HIGHEST))
    for i in range(n):
        keys[i] = bits[i]  # rising with the distance: none is below 0
        terms[i] = weights[i]
    _cut(keys, terms, n, limit, f64(cells_at), i64(words_at), reals)


def keep_near(
    values_at: int,
    ids_at: int,
    distances_at: int,
    n: int,
    key: int,
    out_values_at: int,
    out_ids_at: int,
    words_at: int,
) -> None:
    """Keep what is at most as far as `key` (the bits of a distance); words: how many."""
    values, ids = f32(values_at), i32(ids_at)
    out_values, out_ids = f32(out_values_at), i32(out_ids_at)
    bits = u32(distances_at)
    kept = 0
    for i in range(n):
        out_values[kept] = values[i]
        out_ids[kept] = ids[i]
        kept += int(np.int64(bits[i]) <= key)
    i64(words_at)[0] = kept
