"""S12, choose: one id from the candidates, by the highest logit or by one draw."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from seethrough.sampling.softmax import Row, scatter, survivor_weights


def greedy(row: Row) -> int:
    """The id of the highest logit, ties to the lower id."""
    return int(np.argmax(row))


def choose(candidate_logits: Row, u: float) -> tuple[NDArray[np.float64], int]:
    """The first id, in id order, whose cumulative mass exceeds u times the total.

    Args:
        candidate_logits: float32 [V] with at least one finite entry.
        u: the draw, in [0, 1).

    Returns:
        The probabilities, float64 [V], and the id. Its probability is never zero: where the mass
        exceeds the target for the first time, it has just grown.
    """
    ids, w = survivor_weights(candidate_logits)
    mass = np.cumsum(w)  # [s]; in id order, as the survivors are
    total = mass[-1]
    token_id = int(ids[np.searchsorted(mass, u * total, side="right")])
    w /= total
    return scatter(ids, w, candidate_logits.size), token_id
