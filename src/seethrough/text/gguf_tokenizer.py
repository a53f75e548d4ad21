"""Knows the `tokenizer.*` keys of a GGUF file, and builds a tokenizer from them; reads no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from ..errors import TokenizerError
from . import pretokenizers
from .sentencepiece_merges import merges_from_scores
from .sources import TokenizerSources

# tokenizer.ggml.token_type (gguf-py, class TokenType).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
T = TypeVar("T")
D = TypeVar("D")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True)
class _Vocabulary:
    tokens: list[str]
    types: list[int]
    unique: dict[str, int]  # spelling (made unique) -> id
    repeated: dict[int, str]  # id -> spelling, where an earlier id has it

    def of_type(self, *kinds: int) -> list[str]:
        return [
            token
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in kinds and token_id not in self.repeated and token
        ]


def build(metadata: Mapping[str, object]) -> tuple[Backend, TokenizerSources]:
    """The tokenizer that the metadata describes.

    Raises:
        TokenizerError: names the key that is missing, unknown, or of a wrong type or length.
    """
    model = _get(metadata, "tokenizer.ggml.model", str)
    vocabulary = _vocabulary(metadata)
    if model == "gpt2":
        backend, bos_default = _byte_level(metadata, vocabulary)
        leading_space = False
    elif model == "llama":
        backend, bos_default = _sentencepiece(metadata, vocabulary), True
        leading_space = _get_or(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
    else:
        raise TokenizerError(
            f"tokenizer.ggml.model is {model!r}; supported are 'gpt2' (byte-level BPE) and "
            "'llama' (SentencePiece BPE)"
        )
    _add_markers(backend, vocabulary)
    _add_ends(backend, metadata, vocabulary, bos_default)
    return backend, _sources(metadata, vocabulary, leading_space)


def _byte_level(metadata: Mapping[str, object], vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    family = pretokenizers.family(_get_or(metadata, "tokenizer.ggml.pre", str, "default"))
    merges = _list(metadata, "tokenizer.ggml.merges", str)
    pairs = []
    for place, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not left or not right or left + right not in vocabulary.unique:
            raise TokenizerError(
                f"tokenizer.ggml.merges[{place}] is {merge!r}: expected two pieces parted by a "
                "space, whose join is in tokenizer.ggml.tokens"
            )
        pairs.append((left, right))
    backend = Backend(_bpe(vocabulary, pairs, ignore_merges=family.ignore_merges))
    composed = pretokenizers.normalizer(family)
    if composed is not None:
        backend.normalizer = composed
    backend.pre_tokenizer = pretokenizers.pre_tokenizer(family)
    backend.decoder = decoders.ByteLevel()
    return backend, family.add_bos


def _sentencepiece(metadata: Mapping[str, object], vocabulary: _Vocabulary) -> Backend:
    scores = _list(metadata, "tokenizer.ggml.scores", float)
    _same_length("tokenizer.ggml.scores", scores, vocabulary.tokens)
    mergeable = {
        token: scores[token_id]
        for token, token_id in vocabulary.unique.items()
        if vocabulary.types[token_id] in (NORMAL, USER_DEFINED)
    }
    pairs = merges_from_scores(mergeable, vocabulary.unique)
    unknown = _id(metadata, "unknown_token_id", vocabulary)
    if unknown is None and UNKNOWN in vocabulary.types:
        unknown = vocabulary.types.index(UNKNOWN)
    backend = Backend(
        _bpe(
            vocabulary,
            pairs,
            byte_fallback=BYTE in vocabulary.types,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if _get_or(metadata, "tokenizer.ggml.add_space_prefix", bool, True):
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _bpe(vocabulary: _Vocabulary, pairs: list[tuple[str, str]], **options: object) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary.unique, merges=pairs, **options)
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"the vocabulary and its merges do not fit: {error}") from error


def _add_markers(backend: Backend, vocabulary: _Vocabulary) -> None:
    control = vocabulary.of_type(CONTROL, UNKNOWN)
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    plain = vocabulary.of_type(USER_DEFINED)
    backend.add_tokens([AddedToken(token, normalized=False) for token in plain])


def _add_ends(
    backend: Backend, metadata: Mapping[str, object], vocabulary: _Vocabulary, bos_default: bool
) -> None:
    """Put BOS before and EOS after a prompt, as the file says."""
    bos = _id(metadata, "bos_token_id", vocabulary)
    eos = _id(metadata, "eos_token_id", vocabulary)
    asked_bos = _get_or(metadata, "tokenizer.ggml.add_bos_token", bool, None)
    asked_eos = _get_or(metadata, "tokenizer.ggml.add_eos_token", bool, False)
    if (asked_bos and bos is None) or (asked_eos and eos is None):
        raise TokenizerError(
            "add_bos_token or add_eos_token is set, but tokenizer.ggml.bos_token_id or "
            "eos_token_id is missing"
        )
    ends = {}
    template = "$A"
    if bos is not None and (bos_default if asked_bos is None else asked_bos):
        ends[vocabulary.tokens[bos]] = bos
        template = f"{vocabulary.tokens[bos]} {template}"
    if eos is not None and asked_eos:
        ends[vocabulary.tokens[eos]] = eos
        template = f"{template} {vocabulary.tokens[eos]}"
    if ends:
        parts = template.split(" ")
        backend.post_processor = processors.TemplateProcessing(
            single=parts, special_tokens=list(ends.items())
        )


def _sources(
    metadata: Mapping[str, object], vocabulary: _Vocabulary, leading_space: bool
) -> TokenizerSources:
    def spelling(key: str) -> str | None:
        token_id = _id(metadata, key, vocabulary)
        return None if token_id is None else vocabulary.tokens[token_id]

    ends = (_id(metadata, key, vocabulary) for key in _END_KEYS)
    template = _get_or(metadata, "tokenizer.chat_template", str, None)
    names = _list(metadata, "tokenizer.chat_templates", str, required=False)
    named = {name: _get(metadata, f"tokenizer.chat_template.{name}", str) for name in names}
    if template is not None:
        named["default"] = template
    return TokenizerSources(
        bos_token=spelling("bos_token_id"),
        eos_token=spelling("eos_token_id"),
        pad_token=spelling("padding_token_id"),
        eos_token_ids=frozenset(token_id for token_id in ends if token_id is not None),
        chat_template=template,
        chat_templates=named,
        leading_space=leading_space,
        repeated=vocabulary.repeated,
    )


def _vocabulary(metadata: Mapping[str, object]) -> _Vocabulary:
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    if not tokens:
        raise TokenizerError("tokenizer.ggml.tokens is empty")
    types = _list(metadata, "tokenizer.ggml.token_type", int, required=False)
    types = types or [NORMAL] * len(tokens)
    _same_length("tokenizer.ggml.token_type", types, tokens)
    bad = next((kind for kind in types if not NORMAL <= kind <= BYTE), None)
    if bad is not None:
        raise TokenizerError(f"tokenizer.ggml.token_type holds {bad}; known types are 1 to 6")
    unique: dict[str, int] = {}
    repeated: dict[int, str] = {}
    for token_id, token in enumerate(tokens):
        if token in unique:
            repeated[token_id] = token
            token = f"\x00repeated {token_id}"  # reachable by no text; shown as it is spelled
        unique[token] = token_id
    return _Vocabulary(tokens, types, unique, repeated)


def _get(metadata: Mapping[str, object], key: str, kind: type[T]) -> T:
    if metadata.get(key) is None:
        raise TokenizerError(f"{key} is missing from the GGUF metadata")
    return _checked(metadata[key], key, kind)


def _get_or(metadata: Mapping[str, object], key: str, kind: type[T], default: D) -> T | D:
    return default if metadata.get(key) is None else _checked(metadata[key], key, kind)


def _list(
    metadata: Mapping[str, object], key: str, kind: type[T], *, required: bool = True
) -> list[T]:
    value = metadata.get(key)
    if value is None and not required:
        return []
    if value is None:
        raise TokenizerError(
            f"{key} is missing from the GGUF metadata: the tokenizer cannot be built without it. "
            "Convert the model again with a current converter."
        )
    items = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(items, (list, tuple)):
        raise TokenizerError(f"{key} must be a list, found {type(value).__name__}")
    return [
        item if type(item) is kind else _checked(item, f"{key}[{place}]", kind)
        for place, item in enumerate(items)
    ]


def _checked(value: object, key: str, kind: type[T]) -> T:
    plain = value.item() if isinstance(value, np.generic) else value
    if kind is float and isinstance(plain, int) and not isinstance(plain, bool):
        plain = float(plain)
    if type(plain) is not kind:
        raise TokenizerError(f"{key} must be of type {kind.__name__}, found {repr(value)[:80]}")
    return plain


def _id(metadata: Mapping[str, object], name: str, vocabulary: _Vocabulary) -> int | None:
    key = f"tokenizer.ggml.{name}"
    token_id = _get_or(metadata, key, int, None)
    if token_id is not None and not 0 <= token_id < len(vocabulary.tokens):
        raise TokenizerError(
            f"{key} is {token_id}, but the vocabulary has {len(vocabulary.tokens)} tokens"
        )
    return token_id


def _same_length(key: str, values: Sequence[object], tokens: Sequence[str]) -> None:
    if len(values) != len(tokens):
        raise TokenizerError(
            f"{key} has {len(values)} entries, but tokenizer.ggml.tokens has {len(tokens)}"
        )
