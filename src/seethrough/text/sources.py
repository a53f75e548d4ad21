"""What a tokenizer's files say beside its vocabulary, whatever their format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TokenizerSources:
    """What a tokenizer's files say beside its vocabulary."""

    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    eos_token_ids: frozenset[int] = frozenset()
    chat_template: str | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    # One space goes before the text, unless it opens with an added token (SentencePiece).
    leading_space: bool = False
    # Vocabulary entries that share their spelling with an earlier one: id -> spelling.
    repeated: Mapping[int, str] = field(default_factory=dict)
