"""Knows text to ids and ids to text, for one vocabulary; the `tokenizers` library cuts the text."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers

from ..errors import TextError, TokenizerError
from .piece_text import PieceRules, rules_from_decoder
from .sources import TokenizerSources


class Tokenizer:
    """Prompt to ids and ids to text.

    Attributes:
        kind: the algorithm: "BPE", "Unigram", "WordPiece" or "WordLevel".
        vocab_size: highest id + 1. A model's table may be larger; such ids decode to "".
        bos_token, eos_token, bos_token_id, eos_token_id, pad_token_id: None where there is none.
        eos_token_ids: every end token that the tokenizer's own files name.
        control_ids: added tokens that are flagged special (GGUF: control and unknown tokens).
        added_ids: added tokens that are not: plain markers such as `<tool_call>`.
        added_spellings: spelling of every added token, by id.
        chat_template: the model's default template, or None.
        chat_templates: every named template, "default" among them.
        add_bos: whether `encode` puts the BOS token first.
    """

    def __init__(self, backend: tokenizers.Tokenizer, sources: TokenizerSources) -> None:
        """Wraps `backend`, which from here on belongs to this object."""
        backend.no_truncation()  # a prompt is never cut in silence
        backend.no_padding()
        self._backend = backend
        self._sources = sources
        self.kind: str = type(backend.model).__name__
        ids = backend.get_vocab(with_added_tokens=True).values()
        self.vocab_size: int = max(ids, default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.added_spellings: dict[int, str] = {i: token.content for i, token in added.items()}
        self.control_ids = frozenset(i for i, token in added.items() if token.special)
        self.added_ids = frozenset(added) - self.control_ids
        self.bos_token = sources.bos_token
        self.eos_token = sources.eos_token
        self.bos_token_id = self._id_of(sources.bos_token)
        self.eos_token_id = self._id_of(sources.eos_token)
        self.pad_token_id = self._id_of(sources.pad_token)
        named = [] if self.eos_token_id is None else [self.eos_token_id]
        self.eos_token_ids = sources.eos_token_ids | frozenset(named)
        self.chat_template = sources.chat_template
        self.chat_templates = dict(sources.chat_templates)
        self.leading_space = sources.leading_space
        probe = backend.encode("a", add_special_tokens=True).ids
        self.add_bos: bool = self.bos_token_id is not None and probe[:1] == [self.bos_token_id]
        self._rules = self._piece_rules()
        self._text: dict[tuple[int, bool], bytes] = {}  # (id, opens) -> bytes, filled on use
        self._plain: dict[bool, tokenizers.Tokenizer] = {}
        self._plain_lock = threading.Lock()

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Read a model folder: tokenizer.json, and what lies beside it.

        Raises:
            TokenizerError: tokenizer.json is missing or broken; the message names the file.
        """
        from .tokenizer_files import read_dir

        return cls(*read_dir(Path(path)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """Build the tokenizer that a GGUF file's `tokenizer.*` metadata describes.

        Raises:
            TokenizerError: a key is missing, has a wrong type, or names an unknown kind.
        """
        from .gguf_tokenizer import build

        return cls(*build(metadata))

    # ----------------------------------------------------------------- text to ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; spellings of added tokens in it become those tokens.

        With `add_special_tokens` the tokenizer's own rule adds BOS and its like. A text that
        opens with the BOS spelling itself does not get a second one.

        Raises:
            TextError: `text` holds a lone surrogate; the message gives its position.
        """
        check_text(text)
        prepared = self.with_leading_space(text)
        ids: list[int] = self._backend.encode(prepared, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self.add_bos and ids[:2] == [self.bos_token_id] * 2:
            del ids[0]
        return ids

    def encode_spans(self, prepared: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of `prepared` as it is, nothing added, and the characters [start, end) of each."""
        encoding = self._backend.encode(prepared, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode_plain(self, prepared: str, *, opens: bool) -> list[int]:
        """Ids of `prepared` with every added token switched off, so none can come out of it.

        `opens` says that `prepared` stands at the start of the whole text (some tokenizers put a
        space there and only there).
        """
        with self._plain_lock:
            if not self._plain:
                from .plain_backend import build_plain

                self._plain = build_plain(self._backend, self.added_spellings)
        ids: list[int] = self._plain[opens].encode(prepared, add_special_tokens=False).ids
        return ids

    def with_leading_space(self, text: str) -> str:
        """`text` with the one synthetic space before it, where this tokenizer has that rule."""
        if not self.leading_space or not text or self._opens_with_added(text):
            return text
        return " " + text

    def normalize(self, text: str) -> str:
        """`text` as the tokenizer's normalizer (Unicode forms, lower-casing) leaves it."""
        normalizer = self._backend.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    # ----------------------------------------------------------------- ids to text

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of every id; `<id:7>` for an id without an entry."""
        found = (self._piece(token_id) for token_id in ids)
        return [
            f"<id:{token_id}>" if piece is None else piece
            for token_id, piece in zip(ids, found, strict=True)
        ]

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that the token adds inside a text; b"" for an id without an entry."""
        return self.text_bytes(token_id, opens=False, skip=False)

    def text_bytes(self, token_id: int, *, opens: bool, skip: bool) -> bytes:
        """The bytes that the token adds where `opens` says whether it is the text's first.

        `skip` leaves out control tokens.
        """
        if skip and token_id in self.control_ids:
            return b""
        key = (token_id, opens)
        known = self._text.get(key)
        if known is None:
            known = self._text[key] = self._compute_bytes(token_id, opens)
        return known

    def has_text(self, token_id: int, *, skip: bool) -> bool:
        """Whether the token counts as part of a text: it has an entry and is not skipped."""
        if skip and token_id in self.control_ids:
            return False
        return bool(self.text_bytes(token_id, opens=False, skip=skip))

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, at_start: bool = True
    ) -> str:
        """The text of `ids`. Invalid bytes become U+FFFD; ids without an entry add nothing.

        With `at_start=False` the ids continue a text: a leading space is kept as a real one.

        Raises:
            TokenizerError: an id is negative.
        """
        return self._joined(ids, skip_special_tokens, at_start).decode("utf-8", "replace")

    def _joined(self, ids: Iterable[int], skip: bool, opens: bool) -> bytes:
        joined = bytearray()
        for token_id in ids:
            joined += self.text_bytes(token_id, opens=opens, skip=skip)
            opens = opens and not self.has_text(token_id, skip=skip)
        return bytes(joined)

    def _compute_bytes(self, token_id: int, opens: bool) -> bytes:
        spelling = self.added_spellings.get(token_id)
        if spelling is not None:
            if self._rules.spaced:
                return self._rules.to_bytes(spelling, opens=opens)
            return spelling.encode("utf-8", "replace")
        piece = self._piece(token_id)
        return b"" if piece is None else self._rules.to_bytes(piece, opens=opens)

    def _piece(self, token_id: int) -> str | None:
        if token_id < 0:
            raise TokenizerError(f"token id {token_id} is negative; ids start at 0")
        if token_id >= self.vocab_size:
            return None
        repeated = self._sources.repeated.get(token_id)
        return repeated if repeated is not None else self._backend.id_to_token(token_id)

    # ----------------------------------------------------------------- at load

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    def _piece_rules(self) -> PieceRules:
        decoder = self._backend.decoder
        return rules_from_decoder(None if decoder is None else json.loads(decoder.__getstate__()))

    def _opens_with_added(self, text: str) -> bool:
        starts: Callable[[str], bool] = text.startswith
        return any(starts(spelling) for spelling in self.added_spellings.values())


def check_text(text: object) -> None:
    """Refuse what no tokenizer can take.

    Raises:
        TextError: `text` is not a string, or holds a lone surrogate.
    """
    if not isinstance(text, str):
        raise TextError(f"a prompt must be a string, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextError(
            f"the text has a lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}: it is not valid Unicode. Send whole surrogate pairs, or remove it."
        ) from error
