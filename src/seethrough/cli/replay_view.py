"""How a replay is told: the verdict in words, and two runs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from seethrough.cli.messages import Speaker
from seethrough.cli.table import print_table
from seethrough.cli.terminal import as_shown

if TYPE_CHECKING:
    from seethrough.text.tokenizer import Tokenizer
    from seethrough.trace.replay import Replay

_BEFORE = 2  # tokens that are shown before the first that differs
_MOST = 40  # lines of a table


def verdict(replay: Replay, tokenizer: Tokenizer, speaker: Speaker) -> Iterator[str]:
    """`identical`, or the first difference and what of the fingerprint has changed."""
    if replay.identical:
        yield "identical"
        return
    index = replay.first_difference
    if index is None:
        was = _reason(replay.sample.finish_reason, replay.sample.stop_reason)
        now = _reason(replay.output.finish_reason, replay.output.stop_reason)
        yield speaker.text("replay_end", was=was, now=now)
    else:
        was, now = (
            _spelled(ids, index, tokenizer) or speaker.text("replay_nothing")
            for ids in (replay.sample.token_ids, replay.output.token_ids)
        )
        yield speaker.text("replay_token", index=index, was=was, now=now)
    parts = replay.changed_parts
    if parts:
        yield speaker.text("replay_parts", parts=", ".join(parts))
    else:
        yield speaker.text("replay_no_part")


def print_side_by_side(replay: Replay, tokenizer: Tokenizer, speaker: Speaker) -> None:
    """Both texts, and the tokens from shortly before they part."""
    was, now = replay.sample, replay.output
    texts = tokenizer.decode(list(was.token_ids)), tokenizer.decode(now.token_ids)
    print(speaker.text("replay_was", reason=_reason(was.finish_reason, was.stop_reason)))
    print(as_shown(texts[0]))
    print(speaker.text("replay_now", reason=_reason(now.finish_reason, now.stop_reason)))
    print(as_shown(texts[1]))
    index = replay.first_difference
    if index is None:
        print(speaker.text("replay_never_part"))
        return
    print(speaker.text("replay_parts_at", index=index))
    longest = max(len(was.token_ids), len(now.token_ids))
    first = max(0, index - _BEFORE)
    rows = [
        [str(i), _spelled(was.token_ids, i, tokenizer), _spelled(now.token_ids, i, tokenizer)]
        for i in range(first, min(longest, first + _MOST))
    ]
    print_table(speaker.text("replay_side_columns").split("|"), rows)


def _spelled(ids: Sequence[int], index: int, tokenizer: Tokenizer) -> str:
    """The id and its piece; empty where the run had ended."""
    if index >= len(ids):
        return ""
    return f"{ids[index]} {tokenizer.pieces([ids[index]])[0]!r}"


def _reason(finish: str | None, stop: int | str | None) -> str:
    return str(finish) if stop is None else f"{finish} ({stop!r})"
