"""Knows how ids become text while they arrive; the text is the same however the ids are grouped.

Policy. Bytes that form no character become U+FFFD as soon as that is certain. The beginning of a
character that is still incomplete (at most 3 bytes) is held; at the end of the stream it is
dropped, so a cut inside a character never shows as a broken one.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from .tokenizer import Tokenizer


class Detokenizer:
    """Turns one stream of ids into text: `push` ids, give out what it returns, `flush` at the end.

    Joined, the text equals `tokenizer.decode(all ids)` without an incomplete last character. The
    cost per id does not depend on how much came before.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, at_start: bool = True
    ) -> None:
        """With `at_start=False` the ids continue a text: a leading space is kept as a real one."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._opens = at_start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` make final.

        Raises:
            TokenizerError: an id is negative.
        """
        new = bytearray()
        for token_id in ids:
            new += self._tokenizer.text_bytes(token_id, opens=self._opens, skip=self._skip)
            # A piece that left no text (a skipped control token) leaves the text unopened.
            self._opens = self._opens and not self._tokenizer.has_text(token_id, skip=self._skip)
        return self._decoder.decode(bytes(new))

    def flush(self) -> str:
        """End the stream. An incomplete last character is dropped, so this is always ""."""
        self._decoder.reset()
        return ""
