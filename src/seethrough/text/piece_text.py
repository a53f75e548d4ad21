"""Knows what text one vocabulary piece stands for; knows no ids and no vocabulary.

Every decoder that is supported here is a function of the piece and of whether it opens the text,
which is what makes decoding one token at a time exact.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import TokenizerError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")

# What the WordPiece decoder of the `tokenizers` library tidies inside each piece when its
# "cleanup" is set (decoders/wordpiece.rs), in this order.
_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def byte_alphabet() -> dict[str, int]:
    """The 256 printable characters that byte-level BPE writes for bytes, each with its byte.

    Printable Latin-1 stands for itself; the other bytes, in order, get U+0100, U+0101, …
    (Radford et al. 2019, GPT-2).
    """
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    alphabet = {chr(byte): byte for byte in itself}
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet


_BYTE_OF = byte_alphabet()


@dataclass(frozen=True)
class PieceRules:
    """How a tokenizer's pieces turn into text."""

    byte_level: bool = False  # pieces are spelled in the byte alphabet
    replacements: tuple[tuple[str, str], ...] = ()  # such as ("▁", " ")
    byte_fallback: bool = False  # <0xE4> is the byte 0xE4
    synthetic_space: bool = False  # encoding put one space before the text: take it off again
    spaced: bool = False  # a space parts pieces, except before a continuation
    continuation: str = ""  # spelling that marks a continuation, such as "##"
    cleanup: bool = False  # tidy spaces before punctuation, piece by piece

    def to_bytes(self, piece: str, *, opens: bool) -> bytes:
        """The UTF-8 bytes of `piece`; `opens` says that no text stands before it."""
        if self.byte_level:
            return _from_byte_alphabet(piece)
        if self.byte_fallback and (match := _BYTE_PIECE.match(piece)):
            raw = bytes([int(match[1], 16)])
        else:
            raw = self._to_text(piece, opens=opens).encode("utf-8", "replace")
        if opens and self.synthetic_space and raw.startswith(b" "):
            return raw[1:]
        return raw

    def _to_text(self, piece: str, *, opens: bool) -> str:
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        if self.spaced and not opens:
            if self.continuation and piece.startswith(self.continuation):
                piece = piece[len(self.continuation) :]
            else:
                piece = " " + piece
        if self.cleanup:
            for old, new in _CLEANUP:
                piece = piece.replace(old, new)
        return piece


def _from_byte_alphabet(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in piece])
    except KeyError:
        # Added tokens are spelled plainly; one outside the alphabet shows that this is one.
        return piece.encode("utf-8", "replace")


def rules_from_decoder(decoder: Mapping[str, object] | None) -> PieceRules:
    """The rules that a tokenizer.json `decoder` section asks for.

    Raises:
        TokenizerError: the section holds a decoder that is not a function of single pieces.
    """
    if decoder is None:
        return PieceRules(spaced=True)  # without a decoder pieces are joined by spaces
    rules = PieceRules()
    for step in _steps(decoder):
        rules = _apply(rules, step)
    return rules


def _steps(decoder: Mapping[str, object]) -> list[Mapping[str, object]]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    inner = decoder.get("decoders")
    if not isinstance(inner, list):
        raise TokenizerError("the decoder is a Sequence without a list of decoders")
    return [step for part in inner for step in _steps(part)]


def _apply(rules: PieceRules, step: Mapping[str, object]) -> PieceRules:
    kind = step.get("type")
    if kind == "ByteLevel":
        return replace(rules, byte_level=True)
    if kind == "ByteFallback":
        return replace(rules, byte_fallback=True)
    if kind == "Fuse":
        return rules
    if kind == "Metaspace":
        mark = str(step.get("replacement", "▁"))
        prepended = step.get("prepend_scheme", "always") != "never"
        return replace(
            rules,
            replacements=(*rules.replacements, (mark, " ")),
            synthetic_space=rules.synthetic_space or prepended,
        )
    if kind == "WordPiece":
        return replace(
            rules,
            spaced=True,
            continuation=str(step.get("prefix", "##")),
            cleanup=bool(step.get("cleanup", True)),
        )
    if kind == "Replace" and isinstance(pattern := step.get("pattern"), Mapping):
        old = pattern.get("String")
        if isinstance(old, str) and old:
            pair = (old, str(step.get("content", "")))
            return replace(rules, replacements=(*rules.replacements, pair))
    if kind == "Strip" and step.get("content") == " " and not step.get("stop"):
        if step.get("start") == 0:
            return rules
        if step.get("start") == 1:
            return replace(rules, synthetic_space=True)
    raise TokenizerError(
        f"the tokenizer's decoder has a step {dict(step)!r}, which is not supported. Supported: "
        "ByteLevel, ByteFallback, Fuse, Metaspace, WordPiece, Replace of a plain string, and "
        "Strip of one leading space."
    )
