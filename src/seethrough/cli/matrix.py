"""One value of a trace as a table of numbers, with the tokens on its sides."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from seethrough.cli.messages import Speaker
from seethrough.cli.probability import quoted
from seethrough.cli.table import pad, width
from seethrough.errors import TraceError
from seethrough.trace.values import row_axis

if TYPE_CHECKING:
    from seethrough.trace.trace import Trace

_CELL = 8
_LABEL = 18


def print_matrix(
    trace: Trace,
    stage: str,
    name: str | None,
    layer: int | None,
    head: int | None,
    speaker: Speaker,
) -> None:
    """Rows are tokens; columns are the tokens looked at (S_masked, A) or numbered features.

    Raises:
        TraceError: the value has more than two axes; the message says how to choose.
    """
    name = name or trace.main_value(stage)
    value = trace.array(stage, name, layer=layer, head=head)
    if value.ndim == 1:
        value = value[:, None]
    elif value.ndim == 2 and head is None and row_axis(name) == 1:
        value = value.T  # S3: tokens run along the row; here every token has a line
    if value.ndim != 2:
        raise TraceError(
            f"{stage} {name} has the shape {list(value.shape)}: choose a head (--head)"
        )
    rows = trace.positions(stage, name, trace.only_layer(stage, name) if layer is None else layer)
    tokens = [quoted(token) for token in trace.tokens]
    over_tokens = name in ("S_masked", "A")
    columns = tokens if over_tokens else [str(i) for i in range(value.shape[1])]
    shown = _visible(value.shape[1])
    print(f"{stage} {name} {list(value.shape)}")
    print(pad("", _LABEL) + "".join(_cell(columns[i]) for i in shown))
    for position, row in zip(rows, value, strict=True):
        label = pad(_cut(f"{position} {tokens[position]}", _LABEL - 1), _LABEL)
        print(label + "".join(_cell(number(row[i])) for i in shown))
    if len(shown) < value.shape[1]:
        gap = next(i for i, j in enumerate(shown) if i != j)
        print(
            speaker.text(
                "trace_cut",
                rows=value.shape[0],
                columns=value.shape[1],
                left=gap,
                right=shown[gap] - 1,
            )
        )


def _visible(columns: int) -> Sequence[int]:
    """All columns, or the first and the last that the terminal has room for."""
    room = max(4, (shutil.get_terminal_size((120, 24)).columns - _LABEL) // _CELL)
    if columns <= room:
        return range(columns)
    first = room - room // 2
    return [*range(first), *range(columns - room // 2, columns)]


def number(value: float) -> str:
    """Three digits, or as many as a cell has room for."""
    text = f"{value:.3g}"
    return text if len(text) < _CELL else f"{value:.0e}"


def _cell(text: str) -> str:
    text = _cut(text, _CELL - 1)
    return " " * (_CELL - width(text)) + text


def _cut(text: str, columns: int) -> str:
    """The text, shortened to so many columns."""
    if width(text) <= columns:
        return text
    while text and width(text) > columns - 1:
        text = text[:-1]
    return f"{text}…"
