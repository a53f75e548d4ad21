"""Scores that are reported beside a token: four views of one row, the token itself always included.

raw_logprobs      log-softmax of the model's logits (default; no sampling parameter touches it)
raw_logits        the model's logits
processed_logprobs, processed_logits   the same after S11, as the draw sees them
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seethrough.errors import NonFiniteLogitsError
from seethrough.sampling.params import LogprobsMode
from seethrough.sampling.softmax import Row, largest, log_total

# Stands for log(0), which JSON cannot say: a prompt token that the model gives no chance at all.
FLOOR = -9999.0


@dataclass(frozen=True, slots=True)
class Logprob:
    """One entry: the score in the chosen view, its rank (1 is highest), and the token's text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


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


def view(mode: LogprobsMode, raw: Row, candidates: Row) -> tuple[Row, float]:
    """The row that a mode reads, and what is subtracted from each of its entries."""
    row = raw if mode.startswith("raw") else candidates
    return row, log_total(row) if mode.endswith("logprobs") else 0.0


def top_logprobs(row: Row, subtract: float, token_id: int, k: int) -> dict[int, Logprob]:
    """The token's own entry first, then the k highest by rank; ties rank by lower id.

    What has no chance (-inf) is left out, except the token itself, which then gets `FLOOR`.
    """
    ranks = {int(i): rank for rank, i in enumerate(largest(row, k), start=1)}
    ids = [token_id, *(i for i in ranks if i != token_id)]
    if token_id not in ranks:
        higher = np.count_nonzero(row > row[token_id])
        ranks[token_id] = 1 + int(higher + np.count_nonzero(row[:token_id] == row[token_id]))
    return {i: Logprob(max(float(row[i]) - subtract, FLOOR), ranks[i]) for i in ids}


def prompt_logprobs(
    logits_rows: NDArray[np.float32], next_ids: Sequence[int] | NDArray[np.integer], k: int
) -> list[dict[int, Logprob]]:
    """Score prompt tokens: row j holds the logits that predict `next_ids[j]`. [n, V], [n] -> n

    The scores are raw_logprobs. The prompt's first token has no row and no entry here.

    Raises:
        NonFiniteLogitsError: a row holds NaN or +inf.
    """
    entries = []
    for row, token_id in zip(logits_rows, next_ids, strict=True):
        check_finite(row)
        entries.append(top_logprobs(row, log_total(row), int(token_id), k))
    return entries
