"""Knows how to make a tokenizer's twin out of which no added token can come, whatever the text."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

import tokenizers


def build_plain(
    backend: tokenizers.Tokenizer, added: Mapping[int, str]
) -> dict[bool, tokenizers.Tokenizer]:
    """Twins of `backend` without added tokens: [True] for a text's start, [False] for later parts.

    Switching the matching of added tokens off is not enough: their spellings are often
    vocabulary entries too, and Unigram or a SentencePiece BPE could build them from plain text.
    So their entries are renamed to something that no text spells.
    """
    state: dict[str, Any] = json.loads(backend.to_str())
    state["added_tokens"] = []
    state["post_processor"] = None
    hidden = {spelling: f"\x00{secrets.token_hex(16)}" for spelling in added.values()}
    _hide(state["model"], hidden)
    opening = tokenizers.Tokenizer.from_str(json.dumps(state))
    if not _drop_first_prefix(state["pre_tokenizer"]):
        return {True: opening, False: opening}
    return {True: opening, False: tokenizers.Tokenizer.from_str(json.dumps(state))}


def _hide(model: dict[str, Any], hidden: Mapping[str, str]) -> None:
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: [piece, score], placed by id
        unknown = model.get("unk_id")
        for place, (piece, score) in enumerate(vocab):
            if place != unknown and piece in hidden:
                vocab[place] = [hidden[piece], score]
        return
    unknown = model.get("unk_token")
    renamed = {piece: name for piece, name in hidden.items() if piece != unknown}
    model["vocab"] = {renamed.get(piece, piece): token_id for piece, token_id in vocab.items()}
    if "merges" in model:
        pairs = [
            merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]
        ]
        model["merges"] = [
            pair for pair in pairs if not {pair[0], pair[1], pair[0] + pair[1]} & hidden.keys()
        ]


def _drop_first_prefix(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Stop a Metaspace that prefixes only a text's first part; whether there was one."""
    if pre_tokenizer is None:
        return False
    if pre_tokenizer.get("prepend_scheme") == "first":
        pre_tokenizer["prepend_scheme"] = "never"
        return True
    dropped = [_drop_first_prefix(inner) for inner in pre_tokenizer.get("pretokenizers", [])]
    return any(dropped)
