"""S10, adjust: bans, logit bias, penalties, temperature; each step maps a row to a new row.

What touches single ids takes an `out`, which may be the row itself: then nothing is copied, and the
cost does not grow with the vocabulary.

A row is float32 [V]; -inf marks a token that cannot be chosen, and no step here brings one back.
Arithmetic is done in float64, rounded to float32 once, and held inside the finite float32 range, so
that an extreme parameter makes a choice certain but never makes an infinity.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from seethrough.sampling.softmax import Row

Ids = NDArray[np.intp]

_HIGHEST = float(np.finfo(np.float32).max)


def keep_only(row: Row, ids: Ids, out: Row | None = None) -> Row:
    """Ban everything but `ids` (allowed_token_ids)."""
    kept = row[ids]
    out = np.empty_like(row) if out is None else out
    out.fill(-np.inf)
    out[ids] = kept
    return out


def ban(row: Row, ids: Ids, out: Row | None = None) -> Row:
    """Ban `ids`: the last pieces of bad words, or the end tokens before min_tokens is reached."""
    out = row.copy() if out is None else out
    out[ids] = -np.inf
    return out


def logit_bias(row: Row, bias: Mapping[int, float], out: Row | None = None) -> Row:
    """Add each id's bias to its logit."""
    ids = np.fromiter(bias.keys(), dtype=np.intp, count=len(bias))
    added = np.fromiter(bias.values(), dtype=np.float64, count=len(bias))
    return _replace(row, ids, row[ids] + added, out)


def repetition_penalty(row: Row, seen: Ids, penalty: float, out: Row | None = None) -> Row:
    """Divide the positive and multiply the negative logits of ids seen in prompt or output.

    Once per id, however often it was seen. Source: Keskar et al., "CTRL", 2019, section 4.1, in the
    form that transformers gave it for negative logits.
    """
    old = row[seen].astype(np.float64)
    with np.errstate(over="ignore"):  # held inside the float32 range below
        new = np.where(old > 0, old / penalty, old * penalty)
    # An id that appears twice in `seen` is written twice with the same value: applied once.
    return _replace(row, seen, new, out)


def presence_penalty(row: Row, output: Ids, penalty: float, out: Row | None = None) -> Row:
    """Subtract `penalty` once from every id that the output holds."""
    return _replace(row, output, row[output].astype(np.float64) - penalty, out)


def frequency_penalty(row: Row, output: Ids, penalty: float, out: Row | None = None) -> Row:
    """Subtract `penalty` from an id once for every time that the output holds it."""
    ids, counts = np.unique(output, return_counts=True)
    return _replace(row, ids, row[ids] - penalty * counts, out)


def temperature(row: Row, value: float) -> Row:
    """(x - max) / T for T > 0: the maximum becomes 0, so a tiny T only makes the row sharp.

    A quotient below the float32 range stays at its lowest finite value: dividing bans nothing.
    """
    shifted = row.astype(np.float64)
    shifted -= row.max()
    with np.errstate(over="ignore"):  # -1 / 5e-324 is -inf, and held just below
        shifted /= value
    return _held(shifted, row)


def _replace(row: Row, ids: Ids, values: NDArray[np.float64], out: Row | None) -> Row:
    new = _held(values, row[ids])
    out = row.copy() if out is None else out
    out[ids] = new
    return out


def _held(values: NDArray[np.float64], old: Row) -> Row:
    """Round to float32, finite where `old` was finite; what is banned stays banned."""
    held = np.clip(values, -_HIGHEST, _HIGHEST).astype(np.float32)
    held[old == -np.inf] = -np.inf
    return held
