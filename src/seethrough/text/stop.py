"""Knows where a stop string ends a text that arrives in pieces; knows nothing of tokens.

Rule. A stop string matches where its last character arrives, and the text is cut before its first
one. The match that completes first wins; among those that complete on the same character, the one
that starts earliest (the longest). Both depend on the text alone, so the result is the same
however the text is cut into pieces. No text that could still become part of a match is given out.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ParameterError


class StopChecker:
    """Finds the first stop string in a stream, and holds back only what might belong to one.

    Follows every stop string with its failure table (Knuth, Morris, Pratt 1977), so the cost per
    character does not depend on what came before.
    """

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        """Raises ParameterError for an empty stop string or one that is not a string."""
        if isinstance(stops, str):
            raise ParameterError("stop", stops, "give a list of strings, such as [stop]")
        for stop in stops:
            if not isinstance(stop, str):
                raise ParameterError("stop", stop, "every stop must be a string")
            if not stop:
                raise ParameterError("stop", stop, "an empty stop string would match everywhere")
        self._stops = sorted(set(stops), key=len, reverse=True)  # the longest match is met first
        self._failure = [_failure_table(stop) for stop in self._stops]
        self._include = include_stop_str_in_output
        self._progress = [0] * len(self._stops)  # per stop: characters matched at the text's end
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._matched

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Take new text; return what is safe to give out and the stop string matched, if any.

        With `armed=False` no match may complete inside `text`: a request's `min_tokens` is kept
        by passing False for the text of those first tokens. A stop string counts only if its last
        character arrives armed; its beginning may lie before. After a match, text is ignored.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._stops:
            return text, None
        start = len(self._held)
        window = self._held + text
        for place in range(start, len(window)):
            stop = self._advance(window[place])
            if stop is not None and armed:
                self._matched = stop
                self._held = ""
                end = place + 1
                return window[: end if self._include else end - len(stop)], stop
        keep = max(self._progress)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep], None

    def flush(self) -> str:
        """The held text, once no more will come; nothing after a match."""
        held, self._held = self._held, ""
        self._progress = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str | None:
        """Feed one character to every stop string; the longest that it completes, or None."""
        completed = None
        for index, stop in enumerate(self._stops):
            failure = self._failure[index]
            matched = self._progress[index]
            while matched and stop[matched] != char:
                matched = failure[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                completed = completed or stop
                matched = failure[matched - 1]
            self._progress[index] = matched
        return completed


def _failure_table(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for place in range(1, len(pattern)):
        while length and pattern[place] != pattern[length]:
            length = table[length - 1]
        if pattern[place] == pattern[length]:
            length += 1
        table[place] = length
    return table
