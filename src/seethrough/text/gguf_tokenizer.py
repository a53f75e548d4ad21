"""Knows how a GGUF file's `tokenizer.*` metadata describes a tokenizer; reads no file itself.

Two models: `gpt2` is byte-level BPE, cut first by a pattern that `tokenizer.ggml.pre` names;
`llama` is SentencePiece BPE, where scores say which pieces join first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from ..errors import TokenizerError
from .tokenizer import TokenizerSources

# tokenizer.ggml.token_type, from the GGUF specification.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)

# tokenizer.ggml.pre -> how text is cut before merging. "gpt2" is the pattern of the byte-level
# pre-tokenizer itself; "digits" splits digits one by one before it.
_PRE: Mapping[str, str] = {
    **dict.fromkeys(("default", "gpt-2", "mpt", "olmo", "jina-v2-en", "phi-2"), "gpt2"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), "digits"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
}
_IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3", "tekken")
_NFC = ("qwen2", "deepseek-r1-qwen", "megrez")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def build(metadata: Mapping[str, object]) -> tuple[tokenizers.Tokenizer, TokenizerSources]:
    """The backend and the other facts that the metadata holds.

    Raises:
        TokenizerError: a key is missing, has a wrong type, or names an unknown kind.
    """
    reader = _Metadata(metadata)
    model = reader.text("model")
    if model not in ("gpt2", "llama"):
        raise TokenizerError(f"{reader.key('model')} = {model!r} is not supported: gpt2, llama")
    tokens = reader.strings("tokens")
    types = reader.token_types(len(tokens))
    vocab, repeated = _vocabulary(tokens)
    leading_space = model == "llama" and reader.flag("add_space_prefix", True)
    if model == "gpt2":
        backend = _byte_level(reader, vocab)
    else:
        backend = _sentencepiece(reader, tokens, vocab, types, leading_space)
    _add_marked_tokens(backend, tokens, types, repeated)
    named = {key: reader.token_id(key, len(tokens)) for key in (*_END_KEYS, "bos_token_id")}
    bos, eos = named["bos_token_id"], named["eos_token_id"]
    # SentencePiece models begin with BOS unless the file says otherwise, byte-level ones do not.
    add_bos = reader.flag("add_bos_token", model == "llama")
    add_eos = reader.flag("add_eos_token", False)
    backend.post_processor = _post_processor(
        tokens, bos if add_bos else None, eos if add_eos else None
    )
    pad = reader.token_id("padding_token_id", len(tokens))
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise TokenizerError("tokenizer.chat_template must be a string")
    return backend, TokenizerSources(
        bos_token=None if bos is None else tokens[bos],
        eos_token=None if eos is None else tokens[eos],
        pad_token=None if pad is None else tokens[pad],
        eos_token_ids=frozenset(i for key in _END_KEYS if (i := named[key]) is not None),
        chat_template=template,
        chat_templates={} if template is None else {"default": template},
        leading_space=leading_space,
        repeated=repeated,
    )


class _Metadata:
    """Typed access to the `tokenizer.ggml.*` keys; every error names the key."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    @staticmethod
    def key(name: str) -> str:
        return f"tokenizer.ggml.{name}"

    def get(self, name: str) -> object:
        return self._values.get(self.key(name))

    def text(self, name: str, default: str | None = None) -> str:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self._error(name, "a string", value)
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._error(name, "true or false", value)
        return value

    def strings(self, name: str) -> list[str]:
        value = self.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._error(name, "a list of strings", value)
        return value

    def scores(self, count: int) -> list[float]:
        value = self.get("scores")
        numbers = isinstance(value, list) and all(
            isinstance(item, (int, float)) and not isinstance(item, bool) for item in value
        )
        if not numbers or not isinstance(value, list):
            raise self._error("scores", "a list of numbers", value)
        if len(value) != count:
            raise TokenizerError(f"{self.key('scores')} has {len(value)} entries, expected {count}")
        return value

    def token_types(self, count: int) -> list[int]:
        """One type per token; all normal where the file does not say."""
        value = self.get("token_type")
        if value is None:
            return [_NORMAL] * count
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self._error("token_type", "a list of integers", value)
        if len(value) != count:
            raise TokenizerError(
                f"{self.key('token_type')} has {len(value)} entries, expected {count}"
            )
        return value

    def token_id(self, name: str, count: int) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if type(value) is not int:
            raise self._error(name, "a token id", value)
        if not 0 <= value < count:
            raise TokenizerError(f"{self.key(name)} = {value}, but there are {count} tokens")
        return value

    def _error(self, name: str, expected: str, found: object) -> TokenizerError:
        what = "is missing" if found is None else f"is of type {type(found).__name__}"
        return TokenizerError(f"{self.key(name)} {what}, expected {expected}")


def _vocabulary(tokens: Sequence[str]) -> tuple[dict[str, int], dict[int, str]]:
    """Spelling -> id, and the entries whose spelling an earlier one has."""
    vocab: dict[str, int] = {}
    repeated: dict[int, str] = {}
    for token_id, token in enumerate(tokens):
        if vocab.setdefault(token, token_id) != token_id:
            repeated[token_id] = token
    for token_id, token in repeated.items():  # an id without a spelling of its own is never made
        vocab[f"\x00repeated {token_id} {token}"] = token_id
    return vocab, repeated


def _byte_level(reader: _Metadata, vocab: dict[str, int]) -> tokenizers.Tokenizer:
    if reader.get("merges") is None:
        raise TokenizerError(
            f"{reader.key('merges')} is missing: byte-level BPE cannot cut text without its merges"
        )
    merges = []
    for place, merge in enumerate(reader.strings("merges")):
        left, space, right = merge.partition(" ")
        if not space or not {left, right, left + right} <= vocab.keys():
            raise TokenizerError(f"{reader.key('merges')}[{place}] = {merge!r} is not a merge")
        merges.append((left, right))
    pre = reader.text("pre", "default")
    if pre not in _PRE:
        raise TokenizerError(
            f"{reader.key('pre')} = {pre!r} is not supported; known: {', '.join(sorted(_PRE))}"
        )
    ignore = pre in _IGNORE_MERGES
    backend = tokenizers.Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=ignore))
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(_PRE[pre])
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(pattern: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=pattern in ("gpt2", "digits")
    )
    if pattern == "gpt2":
        return byte_level
    if pattern == "digits":
        first: Any = pre_tokenizers.Digits(individual_digits=True)
    else:
        first = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([first, byte_level])


def _sentencepiece(
    reader: _Metadata,
    tokens: Sequence[str],
    vocab: dict[str, int],
    types: Sequence[int],
    leading_space: bool,
) -> tokenizers.Tokenizer:
    scores = reader.scores(len(tokens))
    unknown = reader.token_id("unknown_token_id", len(tokens))
    if unknown is None:
        unknown = next((i for i, kind in enumerate(types) if kind == _UNKNOWN), None)
    backend = tokenizers.Tokenizer(
        BPE(
            vocab=vocab,
            merges=_merges_from_scores(tokens, scores, types, vocab),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if leading_space:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(
    tokens: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    vocab: Mapping[str, int],
) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, best score first.

    SentencePiece joins the neighbours whose union has the highest score; ranked merges say the
    same. Pieces of another kind (control, byte, unused) never come out of plain text.
    """
    mergeable = {t for t, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    found = []
    for token_id, piece in enumerate(tokens):
        if types[token_id] != _NORMAL or vocab[piece] != token_id:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in mergeable and right in mergeable:
                found.append((-scores[token_id], token_id, left, right))
    found.sort()
    return [(left, right) for _, _, left, right in found]


def _add_marked_tokens(
    backend: tokenizers.Tokenizer,
    tokens: Sequence[str],
    types: Sequence[int],
    repeated: Mapping[int, str],
) -> None:
    """Control and user-defined tokens are found in text as they are spelled."""
    marked = []
    for token_id, kind in enumerate(types):
        special = kind in (_CONTROL, _UNKNOWN)
        if token_id not in repeated and tokens[token_id] and (special or kind == _USER_DEFINED):
            token = tokenizers.AddedToken(tokens[token_id], special=special, normalized=False)
            marked.append(token)
    backend.add_tokens(marked)


def _post_processor(tokens: Sequence[str], bos: int | None, eos: int | None) -> Any:
    """Puts BOS and EOS around a text, where the file asks for it."""
    if bos is None and eos is None:
        return None
    first = [] if bos is None else [tokens[bos]]
    last = [] if eos is None else [tokens[eos]]
    ends = {tokens[i]: i for i in (bos, eos) if i is not None}
    return processors.TemplateProcessing(
        single=[*first, "$A", *last], special_tokens=list(ends.items())
    )
