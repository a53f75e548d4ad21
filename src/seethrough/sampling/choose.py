"""S12, choose: one id from the candidates, by the highest logit or by one draw."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from seethrough.sampling.softmax import BLOCK, Row, running_mass, scatter, survivor_weights


def greedy(row: Row) -> int:
    """The id of the highest logit, ties to the lower id."""
    return int(np.argmax(row))


def choose(candidate_logits: Row, u: float) -> tuple[NDArray[np.float64], int]:
    """The first id, in id order, whose cumulative mass exceeds u times the total.

    The mass grows by blocks of 512 survivors, then inside the block one by one; so near to the end
    of a block that rounding leaves no id there, it is the block's last that weighs anything.

    Args:
        candidate_logits: float32 [V] with at least one finite entry.
        u: the draw, in [0, 1).

    Returns:
        The probabilities, float64 [V], and the id. Its probability is never zero: where the mass
        exceeds the target for the first time, it has just grown.
    """
    ids, w = survivor_weights(candidate_logits)
    mass = running_mass(w)
    target = u * mass[-1]
    block = int(np.searchsorted(mass, target, side="right"))
    inside = w[block * BLOCK : (block + 1) * BLOCK]
    before = mass[block - 1] if block else 0.0
    reached = np.cumsum(np.concatenate([[before], inside]))[1:]
    at = int(np.searchsorted(reached, target, side="right"))
    if at == inside.size:
        at = int(np.flatnonzero(inside)[-1])
    token_id = int(ids[block * BLOCK + at])
    w /= mass[-1]
    return scatter(ids, w, candidate_logits.size), token_id
