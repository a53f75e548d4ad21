"""S11, truncate: top-k, top-p, min-p, typical; what falls out becomes -inf, one candidate stays.

Each function sees the softmax over the survivors of the one before, and returns a new row.

Borders. A logit is a float32, so a probability is known to about 2**-23 of itself, and a mass that
is meant to equal its limit can come out on either side of it. A difference of up to `BORDER` of the
limit therefore counts as equal: .5/.25/.25 keeps all three at top_p = .75, as on paper, and not by
luck of rounding.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from seethrough.sampling.softmax import Row, keep_largest, survivor_weights

BORDER = 2.0**-22


def top_k(row: Row, k: int) -> Row:
    """Keep exactly the k highest (all, if fewer survive), ties by lower id; k >= 1."""
    return _only(row, keep_largest(row, k))


def top_p(row: Row, p: float) -> Row:
    """Keep the shortest prefix by probability whose mass exceeds p, ties by lower id.

    p = 0 keeps one. Where even the whole mass does not exceed p (p = 1, or so near that no
    rounding could tell), all are kept. Source: Holtzman et al., "The curious case of neural text
    degeneration", 2019; engines differ on a mass that equals p exactly (here: one more is kept).
    """
    limit = p * (1 + BORDER)
    _, w = survivor_weights(row)
    total = w.sum()
    # Those lighter than this share weigh together less than half of what p leaves over, so the
    # prefix ends before them, and a vocabulary's long tail need not be sorted.
    tail = max(0.0, 1 - limit) * total / (2 * w.size)
    mass = np.cumsum(np.sort(w[w > tail])[::-1])
    fewer = int(np.searchsorted(mass, limit * total, side="right"))  # prefixes not above it
    return row if fewer == mass.size else top_k(row, fewer + 1)


def min_p(row: Row, share: float) -> Row:
    """Keep what has at least `share` of the highest probability.

    Source: Nguyen et al., "Turning up the heat: min-p sampling", 2024.
    """
    # The highest weight is 1, so weights are shares of it already.
    ids, w = survivor_weights(row)
    return _only(row, ids[w >= share * (1 - BORDER)])


def typical_p(row: Row, p: float) -> Row:
    """Keep the candidates whose surprise is nearest to the entropy, until their mass reaches p.

    Nearness is |-log q - H|; those exactly as near as the last one kept are kept as well, whatever
    their ids. Source: Meister et al., "Locally typical sampling", 2022.
    """
    ids, w = survivor_weights(row)
    total = w.sum()
    q = w / total
    surprise = np.log(total) - (row[ids].astype(np.float64) - row.max())
    distance = np.abs(surprise - (q * surprise).sum())
    order = np.argsort(distance)
    # The whole mass is 1 to within far less than BORDER, so some prefix always reaches p.
    reached = np.searchsorted(np.cumsum(q[order]), p * (1 - BORDER), side="left")
    return _only(row, ids[distance <= distance[order[reached]]])


def _only(row: Row, ids: NDArray[np.intp]) -> Row:
    kept = np.full_like(row, -np.inf)
    kept[ids] = row[ids]
    return kept
