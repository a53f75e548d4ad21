"""Softmax over the survivors of a row of logits; exponentials and sums in float64.

A row is float32 [V] with -inf where a token is out. Everything runs over the survivors alone, in id
order, so holes change nothing, and a row of few survivors is cheap however large the vocabulary.

The bits are the same on every processor and with every backend: `exp` and `log` are our own, in
plain IEEE operations, and sums have a written order (`running_mass`). `kernels/cpu/sampling.py` is
the compiled twin.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seethrough.errors import NonFiniteLogitsError

Row = NDArray[np.float32]
Ids = NDArray[np.intp]
F64 = NDArray[np.float64]
Keys = NDArray[np.uint32]

BLOCK = 512
_LANES = 8
_CHUNK = 2048  # whose many intermediate results stay in the processor's cache

# See the compiled twin, which has the same numbers and says where they come from.
_POLYNOMIAL = (
    0.5,
    0.1666666666666667,
    0.04166666666666667,
    0.008333333333326141,
    0.0013888888888883752,
    0.00019841269874800493,
    2.4801587325533363e-05,
    2.7557255425746435e-06,
    2.7557273661348637e-07,
    2.510520637395701e-08,
    2.0914679376583935e-09,
)
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_ROUND = 1.5 * 2.0**52
_LEAST = -708.0

# fdlibm, e_log.c, Sun Microsystems, 1993: the polynomial behind log((1 + s) / (1 - s)).
_LOG_ODD = (6.666666666666735130e-01, 2.857142874366239149e-01, 1.818357216161805012e-01)
_LOG_LAST = 1.479819860511658591e-01
_LOG_EVEN = (3.999999999940941908e-01, 2.222219843214978396e-01, 1.531383769920937332e-01)


def check_finite(logits: Row) -> None:
    """Refuse a row with NaN or +inf, or without any finite entry.

    Raises:
        NonFiniteLogitsError: says which id holds what.
    """
    top = logits.max()  # NaN spreads into the maximum, so one pass sees all three cases
    if math.isfinite(top):
        return
    if np.isneginf(top):
        raise NonFiniteLogitsError("every logit is -inf: the model gives no token a chance")
    first = int(np.flatnonzero(np.isnan(logits) | np.isposinf(logits))[0])
    raise NonFiniteLogitsError(
        f"logit {first} of {logits.size} is {logits[first]}, expected finite numbers. The weights "
        "or the cache type may not suit this model (float16 overflow); run `seethrough doctor`."
    )


def exp(x: F64) -> F64:
    """exp(x) for x <= 0 to within 1 ulp, monotone, exactly 1 at 0; 0 below -708. [n] -> [n]"""
    out = np.empty_like(x)
    for start in range(0, x.size, _CHUNK):
        out[start : start + _CHUNK] = _exp(x[start : start + _CHUNK])
    return out


def _exp(x: F64) -> F64:
    y = np.maximum(x, _LEAST)
    rounded = y * _LOG2_E + _ROUND  # the integer k nearest to y / ln(2), in the low bits
    k = rounded - _ROUND
    high, low = y - k * _LN2_HIGH, k * _LN2_LOW
    r = high - low
    r2 = r * r
    r4 = r2 * r2
    c = _POLYNOMIAL
    q = (c[0] + r * c[1]) + r2 * (c[2] + r * c[3])
    tail = (c[4] + r * c[5]) + r2 * (c[6] + r * c[7])
    tail += r4 * ((c[8] + r * c[9]) + r2 * c[10])
    mantissa = 1.0 + (high - (low - r2 * (q + r4 * tail)))
    scaled = mantissa.view(np.int64) + (rounded.view(np.int64) << 52)  # times 2^k
    return np.where(x >= _LEAST, scaled.view(np.float64), 0.0)


def log(x: float) -> float:
    """log(x) of a finite x >= 1 to within 1 ulp. Source: fdlibm, e_log.c, in its order."""
    mantissa, k = math.frexp(x)
    if mantissa < math.sqrt(0.5):
        mantissa, k = 2 * mantissa, k - 1
    f = mantissa - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    even = w * (_LOG_EVEN[0] + w * (_LOG_EVEN[1] + w * _LOG_EVEN[2]))
    odd = z * (_LOG_ODD[0] + w * (_LOG_ODD[1] + w * (_LOG_ODD[2] + w * _LOG_LAST)))
    half = 0.5 * f * f
    return k * _LN2_HIGH - ((half - (s * (half + (odd + even)) + k * _LN2_LOW)) - f)


def running_mass(terms: F64) -> F64:
    """Sums up to the end of each block of 512 terms. [n] -> [ceil(n / 512)]; n >= 1

    Inside a block term i goes to lane i mod 8, in order; the lanes are added as a tree of
    neighbours; blocks are added in order. An accumulation, unlike a sum, has one order in NumPy.
    """
    padded = np.zeros(-(-terms.size // BLOCK) * BLOCK)
    padded[: terms.size] = terms
    sums = np.cumsum(padded.reshape(-1, BLOCK // _LANES, _LANES), axis=1)[:, -1]
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    return np.cumsum(sums[:, 0])


def total_of(terms: F64) -> float:
    """The sum, in the order of `running_mass`."""
    return float(running_mass(terms)[-1])


def survivor_weights(row: Row) -> tuple[Ids, F64]:
    """The ids that are in, and exp(x - max) for each: the highest weighs 1. [V] -> [s], [s]

    The row needs one finite entry.
    """
    ids = np.flatnonzero(row > -np.inf)
    kept = row if ids.size == row.size else row[ids]
    shifted = kept.astype(np.float64)
    shifted -= kept.max()
    return ids, exp(shifted)


def scatter(ids: Ids, values: F64, size: int) -> F64:
    """Put the survivors' values back at their ids, zero elsewhere. [s], [s] -> [size]"""
    if ids.size == size:
        return values
    row = np.zeros(size)
    row[ids] = values
    return row


def softmax(row: Row) -> F64:
    """Probabilities of a row that has at least one finite entry. [V] -> [V]"""
    ids, w = survivor_weights(row)
    w /= total_of(w)
    return scatter(ids, w, row.size)


def log_total(row: Row) -> float:
    """log(sum(exp(x))): what is subtracted from a logit to make it a log-probability."""
    _, w = survivor_weights(row)
    return float(row.max()) + log(total_of(w))


def keep_largest(row: Row, k: int) -> Ids:
    """The ids of the k highest survivors (all, if fewer), ties by lower id.

    Not sorted by logit, but equal logits stand in ascending order of id.
    """
    ids = np.flatnonzero(row > -np.inf)
    if k >= ids.size:
        return ids
    # Selected among survivors: a partition of thousands of equal holes is slow.
    kept = row if ids.size == row.size else row[ids]
    least = np.partition(kept, kept.size - k)[kept.size - k]
    above, ties = ids[kept > least], ids[kept == least]
    return np.concatenate([above, ties[: k - above.size]])


def largest(row: Row, k: int) -> Ids:
    """The ids of the k highest survivors, highest first, ties by lower id."""
    if k == 0:
        return np.empty(0, dtype=np.intp)
    ids = keep_largest(row, k)
    return ids[np.argsort(-row[ids], kind="stable")]  # stable: ids ascend within a tie


def falling(values: Row) -> Keys:
    """Logits as integers that fall as the logit rises; 0 and -0 are one. [s] -> [s]"""
    bits = (values + np.float32(0)).view(np.uint32)
    return np.where(bits >> 31, bits, bits ^ 0x7FFFFFFF).astype(np.uint32)


class Cut(NamedTuple):
    """Where a mass exceeds its limit: the key there, who has it, and the mass before it."""

    key: int
    ties: int
    weight: float  # of each tie, where equal keys mean equal weights
    before: float

    def ties_within(self, limit: float) -> int:
        """How many of the ties it takes until the mass exceeds the limit; all, if none does."""
        quotient = (limit - self.before) / self.weight if self.weight > 0 else self.ties
        needed = max(1, min(self.ties, int(min(quotient, self.ties))) - 1)  # rounded either way
        while needed < self.ties and self.before + needed * self.weight <= limit:
            needed += 1
        return needed


def cut_by_mass(keys: Keys, weights: F64, limit: float) -> Cut | None:
    """The smallest key at which the mass of all keys up to it exceeds the limit; limit >= 0.

    None if the whole mass does not exceed it. Nothing is sorted: the mass falls into bins by the
    high digit of the key, and only the bin that crosses the limit is split by the next digit. A bin
    has four cells that are filled in turn, which spares the compiled twin a wait; so the order of
    the sums is fixed here as well.
    """
    before = 0.0
    for shift, bins in ((21, 2048), (10, 2048), (0, 1024)):
        digit = (keys >> shift).astype(np.intp) & (bins - 1)
        cell = digit * 4 + (np.arange(keys.size) & 3)
        cells = np.bincount(cell, weights, 4 * bins).reshape(bins, 4)
        mass = (cells[:, 0] + cells[:, 1]) + (cells[:, 2] + cells[:, 3])
        reached = np.cumsum(np.concatenate([[before], mass]))
        at = int(np.searchsorted(reached[1:], limit, side="right"))
        if at == bins:
            if shift == 21:
                return None
            at = int(np.flatnonzero(mass)[-1])  # it does exceed, but not as these sums round
        before = float(reached[at])
        keys, weights = keys[digit == at], weights[digit == at]
    return Cut(int(keys[0]), keys.size, float(weights[0]), before)
