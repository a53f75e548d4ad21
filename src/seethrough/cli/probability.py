"""Shows probabilities on a terminal: text coloured by them, and tables of alternatives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# From sure to unsure, in the 256-colour palette: green, yellow-green, yellow, orange, red.
_COLORS = ((0.8, 34), (0.5, 106), (0.25, 178), (0.1, 208), (0.0, 196))


def color_of(probability: float) -> int:
    """The palette entry for a probability."""
    return next(color for least, color in _COLORS if probability >= least)


def paint(text: str, token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Any]] | None) -> str:
    """The text in the colour of its (last) token's probability; plain without logprobs."""
    if not logprobs or not token_ids:
        return text
    score = logprobs[-1][token_ids[-1]].logprob
    if score > 0:  # a logit view: not a probability
        return text
    return f"\033[38;5;{color_of(math.exp(score))}m{text}\033[0m"


def print_alternatives(
    token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Any]], mode: str
) -> None:
    """One line per token: the chosen one, then the others by rank, each with its score."""
    print()
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        others = sorted((p.rank, i, p) for i, p in entry.items() if i != token_id)
        shown = [_score(entry[token_id], mode), *(_score(p, mode) for _, _, p in others)]
        print("  ".join(shown))


def _score(entry: Any, mode: str) -> str:
    value = (
        f"{math.exp(entry.logprob):6.1%}" if mode.endswith("logprobs") else f"{entry.logprob:7.2f}"
    )
    return f"{value} {quoted(entry.decoded_token)}"


def quoted(text: str | None) -> str:
    """A token's text with its spaces and control characters visible."""
    text = text or ""
    return text if text.startswith("bytes:") else repr(text)
