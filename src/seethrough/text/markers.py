"""Knows which spellings are control markers, and how to keep a user's text from being one."""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from .tokenizer import Tokenizer

# Some vocabularies list ordinary HTML as added tokens; text about HTML must stay what it was.
_HTML_TAG = re.compile(
    r"</?(?:a|abbr|article|aside|audio|b|blockquote|body|br|button|caption|cite|code|col|dd|del"
    r"|details|div|dl|dt|em|fieldset|figcaption|figure|footer|form|h[1-6]|head|header|hr|html|i"
    r"|iframe|img|input|ins|kbd|label|legend|li|link|main|mark|meta|nav|object|ol|option|p|pre|q"
    r"|s|samp|script|section|select|small|source|span|strong|style|sub|summary|sup|svg|table"
    r"|tbody|td|template|textarea|tfoot|th|thead|time|title|tr|u|ul|var|video|wbr)/?>\Z"
)
_NONCE_DIGITS = 32


@dataclass(frozen=True)
class Markers:
    """Spellings that must not become control tokens out of a user's text, in lower case."""

    lengths: dict[str, tuple[int, ...]]  # by first character
    spellings: frozenset[str]
    starts: re.Pattern[str]

    def places(self, text: str, leave: Collection[str] = ()) -> list[int]:
        """Where in `text` a marker begins, overlapping ones too, whatever its case."""
        return list(self._places(text, leave))

    def _places(self, text: str, leave: Collection[str]) -> Iterator[int]:
        for start in self.starts.finditer(text):
            place = start.start()
            for length in self.lengths[start[0].lower()]:
                found = text[place : place + length].lower()
                if found in self.spellings and found not in leave:
                    yield place
                    break


@functools.lru_cache(maxsize=4)
def markers_of(tokenizer: Tokenizer) -> Markers:
    """The markers of a tokenizer: all special tokens, and the added tokens that look like markers.

    Added tokens that are white space, a run of one character or an HTML tag are ordinary text.
    A marker of one character cannot be broken up, and is left out.
    """
    spelled = tokenizer.added_spellings
    spellings = {spelled[i].lower() for i in tokenizer.control_ids}
    spellings |= {spelled[i].lower() for i in tokenizer.added_ids if looks_like_marker(spelled[i])}
    spellings = {spelling for spelling in spellings if len(spelling) > 1}
    lengths: dict[str, set[int]] = {}
    for spelling in spellings:
        lengths.setdefault(spelling[0], set()).add(len(spelling))
    firsts = sorted({first for lower in lengths for first in (lower, lower.upper())})
    starts = "|".join(re.escape(first) for first in firsts if len(first) == 1) or "(?!)"
    ordered = {first: tuple(sorted(many)) for first, many in lengths.items()}
    return Markers(ordered, frozenset(spellings), re.compile(starts))


def looks_like_marker(spelling: str) -> bool:
    """Whether an added token that is not flagged special is a marker and no ordinary text."""
    if _HTML_TAG.match(spelling.lower()) or re.fullmatch(r"[\s▁]*", spelling):
        return False
    return len(set(spelling)) > 1


def compared_markers(tokenizer: Tokenizer, compared: Collection[str]) -> frozenset[str]:
    """Plain (not special) markers that a template looks for in a message, such as `</think>`."""
    plain = (tokenizer.added_spellings[i] for i in tokenizer.added_ids)
    return frozenset(
        spelling.lower() for spelling in plain if any(spelling in text for text in compared)
    )


class Nonce:
    """Random digits that are put inside markers before rendering, and taken out after it.

    Digits alone pass through JSON, HTML escaping and changes of case.
    """

    def __init__(self) -> None:
        self.digits = "".join(secrets.choice("123456789") for _ in range(_NONCE_DIGITS))

    def put_inside(self, text: str, places: Collection[int]) -> str:
        """`text` with the nonce after the character at each place."""
        parts = []
        start = 0
        for place in sorted(set(places)):
            parts.append(text[start : place + 1])
            start = place + 1
        return self.digits.join([*parts, text[start:]])

    def take_out(self, text: str) -> tuple[str, bool]:
        """`text` without the nonce, and whether a torn piece of it is left."""
        clean = text.replace(self.digits, "")
        half = _NONCE_DIGITS // 2
        return clean, self.digits[:half] in clean or self.digits[-half:] in clean
