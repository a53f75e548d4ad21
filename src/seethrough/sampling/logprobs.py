"""Scores that are reported beside a token: four views of one row, the token itself always included.

raw_logprobs      log-softmax of the model's logits (default; no sampling parameter touches it)
raw_logits        the model's logits
processed_logprobs, processed_logits   the same after S11, as the draw sees them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seethrough.sampling.ops import NUMPY, SamplingOps

# Stands for log(0), which JSON cannot say: a prompt token that the model gives no chance at all.
FLOOR = -9999.0


@dataclass(frozen=True, slots=True)
class Logprob:
    """One entry: the score in the chosen view, its rank (1 is highest), and the token's text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


def top_logprobs(
    x: Any, subtract: float, token_id: int, k: int, ops: SamplingOps[Any] = NUMPY
) -> dict[int, Logprob]:
    """The token's own entry first, then the k highest by rank; ties rank by lower id.

    What has no chance (-inf) is left out, except the token itself, which then gets `FLOOR`.

    Args:
        x: candidates of `ops`; for the plain ones, a row.
        subtract: what makes a logit the wanted score, 0 or the row's `log_total`.
    """
    best = ops.largest(x, k)
    own = next((s for s in best if s.token_id == token_id), None) or ops.score(x, token_id)
    others = [s for s in best if s.token_id != token_id]
    return {s.token_id: Logprob(max(s.logit - subtract, FLOOR), s.rank) for s in (own, *others)}


def prompt_logprobs(
    logits_rows: NDArray[np.float32],
    next_ids: Sequence[int] | NDArray[np.integer],
    k: int,
    ops: SamplingOps[Any] = NUMPY,
) -> list[dict[int, Logprob]]:
    """Score prompt tokens: row j holds the logits that predict `next_ids[j]`. [n, V], [n] -> n

    The scores are raw_logprobs. The prompt's first token has no row and no entry here.

    Raises:
        NonFiniteLogitsError: a row holds NaN or +inf.
    """
    entries = []
    for row, token_id in zip(logits_rows, next_ids, strict=True):
        x = ops.begin(row)
        entries.append(top_logprobs(x, ops.log_total(x), int(token_id), k, ops))
    return entries
