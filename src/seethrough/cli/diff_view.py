"""How a comparison is told: a line per value, a line per position, and where they part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from seethrough.cli.messages import Speaker
from seethrough.cli.probability import quoted
from seethrough.cli.table import print_table

if TYPE_CHECKING:
    from seethrough.trace.diff import Diff, PositionDiff, ValueDiff
    from seethrough.trace.trace import Trace


def print_diff(
    found: Diff, a: Trace, tolerance: float, speaker: Speaker, *, every_layer: bool
) -> None:
    """The values (of each, its worst layer, unless every layer is wanted), then the positions."""
    rows = [_value_row(value) for value in _shown(found.values, every_layer)]
    print_table(speaker.text("diff_value_columns").split("|"), rows)
    for name in found.unlike:
        print(speaker.text("diff_unlike", name=name))
    print()
    print(_verdict(found, tolerance, speaker))
    if found.positions:
        print()
        pieces = a.tokens
        header = speaker.text("diff_position_columns").split("|")
        print_table(header, [_position_row(p, pieces, a) for p in found.positions])


def _shown(values: Sequence[ValueDiff], every_layer: bool) -> list[ValueDiff]:
    if every_layer:
        return list(values)
    named = sorted(values, key=lambda v: (v.stage, v.name))
    worst = {
        key: max(group, key=lambda v: (v.relative, v.differing))
        for key, group in groupby(named, key=lambda v: (v.stage, v.name))
    }
    return [worst[key] for key in dict.fromkeys((v.stage, v.name) for v in values)]


def _value_row(value: ValueDiff) -> list[str]:
    layer = "–" if value.layer is None else str(value.layer)
    share = f"{value.differing}/{value.size}"
    return [value.stage, value.name, layer, _number(value.relative), _number(value.largest), share]


def _verdict(found: Diff, tolerance: float, speaker: Speaker) -> str:
    first = found.parting()
    if first is None:
        return speaker.text("diff_unlike_only" if found.unlike else "diff_identical")
    beyond = found.parting(tolerance)
    parts = [speaker.text("diff_parting", where=_where(first, speaker))]
    if beyond is None:
        parts.append(speaker.text("diff_within", tolerance=_number(tolerance)))
    else:
        where = _where(beyond, speaker)
        parts.append(speaker.text("diff_beyond", tolerance=_number(tolerance), where=where))
    return speaker.text("diff_join").join(parts)


def _where(value: ValueDiff, speaker: Speaker) -> str:
    name = f"{value.stage} {value.name}"
    if value.layer is None:
        return name
    return speaker.text("diff_layer", name=name, layer=value.layer)


def _position_row(found: PositionDiff, pieces: Sequence[str], a: Trace) -> list[str]:
    where = "" if found.output_index is None else f"→ {found.output_index}"
    said = "" if found.best[0] == found.best[1] else f"{found.best[0]} / {found.best[1]}"
    candidates = "" if found.kl_candidates is None else _number(found.kl_candidates)
    return [
        f"{found.position} {quoted(pieces[found.position])}",
        f"{quoted(pieces[found.position + 1])} {where}".rstrip(),
        f"{found.prob[0]:.4f} / {found.prob[1]:.4f}",
        f"{found.rank[0]} / {found.rank[1]}",
        _number(found.kl),
        candidates,
        said,
    ]


def _number(value: float) -> str:
    if math.isinf(value):
        return "∞"
    return "0" if value == 0 else f"{value:.2e}"
