"""Plain tables on a terminal; a Chinese character takes two columns."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from seethrough.cli.terminal import printable


def width(text: str) -> int:
    """Columns that a text takes on a terminal."""
    return sum(_columns(char) for char in text)


def _columns(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def pad(text: str, columns: int) -> str:
    """The text with spaces up to so many columns."""
    return text + " " * max(0, columns - width(text))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell; the last one is left as it is. A row is a line."""
    lines = [header, *([printable(cell).replace("\n", "\\n") for cell in row] for row in rows)]
    widths = [max(width(row[i]) for row in lines) for i in range(len(header))]
    for row in lines:
        cells = [pad(cell, columns) for cell, columns in zip(row[:-1], widths, strict=False)]
        print("  ".join([*cells, row[-1]]).rstrip())
