"""S11, truncate: top-k, top-p, min-p, typical; what falls out becomes -inf, one candidate stays.

Each function sees the softmax over the survivors of the one before, and returns a new row.

Borders. A logit is a float32, so a probability is known to about 2**-23 of itself, and a mass that
is meant to equal its limit can come out on either side of it. A difference of up to `BORDER` of the
limit therefore counts as equal: .5/.25/.25 keeps all three at top_p = .75, as on paper, and not by
luck of rounding.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from seethrough.sampling.softmax import (
    Row,
    cut_by_mass,
    falling,
    keep_largest,
    log,
    survivor_weights,
    total_of,
)

BORDER = 2.0**-22
_HIGHEST = float(np.finfo(np.float32).max)


def top_k(row: Row, k: int) -> Row:
    """Keep exactly the k highest (all, if fewer survive), ties by lower id; k >= 1."""
    return _only(row, keep_largest(row, k))


def top_p(row: Row, p: float) -> Row:
    """Keep the shortest prefix by probability whose mass exceeds p, ties by lower id.

    p = 0 keeps one. Where even the whole mass does not exceed p (p = 1, or so near that no
    rounding could tell), all are kept. Source: Holtzman et al., "The curious case of neural text
    degeneration", 2019; engines differ on a mass that equals p exactly (here: one more is kept).
    """
    ids, w = survivor_weights(row)
    limit, tail = top_p_limits(p, total_of(w), w.size)
    keys, heavy = falling(row[ids]), w > tail
    cut = cut_by_mass(keys[heavy], w[heavy], limit)
    if cut is None:
        return row
    ties = ids[keys == cut.key][: cut.ties_within(limit)]
    return _only(row, np.concatenate([ids[keys < cut.key], ties]))


def top_p_limits(p: float, total: float, survivors: int) -> tuple[float, float]:
    """The mass that a prefix must exceed, and a weight that its last one exceeds anyway.

    Those lighter than that weigh together less than half of what p leaves over, so the prefix ends
    before them, and a vocabulary's long tail need not be looked at.
    """
    limit = p * (1 + BORDER)
    return limit * total, max(0.0, 1 - limit) * total / (2 * survivors)


def min_p(row: Row, share: float) -> Row:
    """Keep what has at least `share` of the highest probability.

    Source: Nguyen et al., "Turning up the heat: min-p sampling", 2024.
    """
    # The highest weight is 1, so weights are shares of it already.
    ids, w = survivor_weights(row)
    return _only(row, ids[w >= share * (1 - BORDER)])


def typical_p(row: Row, p: float) -> Row:
    """Keep the candidates whose surprise is nearest to the entropy, until their mass reaches p.

    Nearness is |-log q - H|, rounded to float32; those as near as the last one kept are kept as
    well, whatever their ids. Source: Meister et al., "Locally typical sampling", 2022.
    """
    ids, w = survivor_weights(row)
    shift = row[ids].astype(np.float64) - row.max()
    total = total_of(w)
    log_total = log(total)
    # With q = w / total: the sum of q · (log_total - shift).
    entropy = log_total - total_of(w * shift) / total
    distance = np.abs((log_total - shift) - entropy)
    keys = np.minimum(distance, _HIGHEST).astype(np.float32).view(np.uint32)  # rising: none is < 0
    cut = cut_by_mass(keys, w, typical_limit(p, total))
    return row if cut is None else _only(row, ids[keys <= cut.key])


def typical_limit(p: float, total: float) -> float:
    """The mass to exceed: just below the one to reach."""
    return math.nextafter(p * (1 - BORDER) * total, 0.0)


def _only(row: Row, ids: NDArray[np.intp]) -> Row:
    kept = np.full_like(row, -np.inf)
    kept[ids] = row[ids]
    return kept
