"""What a terminal may be given: text that others wrote must not move its cursor or hide a line."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

# C0 without tab and line feed, C1, the marks that turn the direction of writing, lone surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with control characters spelled as Python spells them; tabs and line ends stay."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def as_shown(text: str) -> str:
    """What a model said: to the letter in a file or a pipe, `printable` on a terminal."""
    return printable(text) if sys.stdout.isatty() else text


def print_json(body: Any) -> None:
    """One line of JSON; beyond ASCII only where standard output can say it."""
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(body, ensure_ascii=not unicode))
