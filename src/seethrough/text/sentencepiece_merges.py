"""Knows how scored pieces become ranked merges, so that BPE cuts as SentencePiece does."""

from __future__ import annotations

from collections.abc import Mapping


def merges_from_scores(
    scores: Mapping[str, float], ids: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the best score first.

    SentencePiece BPE joins, again and again, the neighbours whose join has the highest score,
    the leftmost of equals (Kudo and Richardson 2018, bpe_model.cc). Ranked merges do the same:
    a pair's rank is the place of its join by falling score, and of its id among equals.
    """
    joins = [piece for piece in scores if len(piece) > 1]
    joins.sort(key=lambda piece: (-scores[piece], ids[piece]))
    return [
        (piece[:cut], piece[cut:])
        for piece in joins
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
