"""A request's text as it grows (end of S12): detokenizer, then stop strings. One for both modes.

The streamed pieces, joined, are the text; there is no second way to make it.
"""

from __future__ import annotations

from seethrough.sampling.params import EffectiveParams
from seethrough.text.detokenizer import Detokenizer
from seethrough.text.stop import StopChecker
from seethrough.text.tokenizer import Tokenizer


class TextOutput:
    """Ids in, final text out."""

    def __init__(self, tokenizer: Tokenizer, params: EffectiveParams, *, at_start: bool) -> None:
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, at_start=at_start)
        self._stops = StopChecker(params.stop, params.include_stop_str_in_output)
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All that was given out so far."""
        return "".join(self._parts)

    def push(self, token_id: int, *, armed: bool) -> tuple[str, str | None]:
        """New text that is final, and the stop string that it completes, if any.

        `armed` is false while `min_tokens` is not reached: nothing may stop the text yet.
        """
        new, stop = self._stops.push(self._detokenizer.push([token_id]), armed)
        self._parts.append(new)
        return new, stop

    def finish(self) -> str:
        """End the text; returns what was held back and is now final."""
        new, _ = self._stops.push(self._detokenizer.flush())
        new += self._stops.flush()
        self._parts.append(new)
        return new
