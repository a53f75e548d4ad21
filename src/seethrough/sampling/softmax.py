"""Softmax over the survivors of a row of logits; exponentials and sums in float64.

A row is float32 [V] with -inf where a token is out. Sums run over the survivors alone, in id order,
so holes cost nothing, and a row of few survivors is cheap however large the vocabulary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Ids = NDArray[np.intp]


def survivor_weights(row: Row) -> tuple[Ids, NDArray[np.float64]]:
    """The ids that are in, and exp(x - max) for each: the highest weighs 1. [V] -> [s], [s]

    The row needs one finite entry.
    """
    ids = np.flatnonzero(row > -np.inf)
    kept = row if ids.size == row.size else row[ids]
    shifted = kept.astype(np.float64)
    shifted -= kept.max()
    return ids, np.exp(shifted, out=shifted)


def scatter(ids: Ids, values: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Put the survivors' values back at their ids, zero elsewhere. [s], [s] -> [size]"""
    if ids.size == size:
        return values
    row = np.zeros(size)
    row[ids] = values
    return row


def softmax(row: Row) -> NDArray[np.float64]:
    """Probabilities of a row that has at least one finite entry. [V] -> [V]"""
    ids, w = survivor_weights(row)
    w /= w.sum()
    return scatter(ids, w, row.size)


def log_total(row: Row) -> float:
    """log(sum(exp(x))): what is subtracted from a logit to make it a log-probability."""
    _, w = survivor_weights(row)
    return float(row.max()) + float(np.log(w.sum()))


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
