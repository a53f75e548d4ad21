"""Knows how each byte-level BPE family cuts text into words; a GGUF names it in `pre`.

The patterns are facts about published models: they stand in the models' own tokenizer.json, and
the names are those that llama.cpp writes to `tokenizer.ggml.pre` (src/llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, normalizers
from tokenizers import pre_tokenizers as pre

from ..errors import TokenizerError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_SIGNS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_SIGNS_SLASH}|{_SPACES}"
_GPT4O = rf"{_CASED % ((_CONTRACTIONS + '?',) * 2)}|\p{{N}}{{1,3}}|{_SIGNS_SLASH}|{_SPACES}"
_SEED = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_HAN_HANGUL = "[一-龥ࠀ-一가-퟿]+"


@dataclass(frozen=True)
class Family:
    """One way of cutting words, and what goes with it."""

    splits: Callable[[], list[pre.PreTokenizer]]
    ignore_merges: bool = False  # a word that is a vocabulary entry is taken whole
    add_bos: bool = False  # where the file does not say
    compose: bool = False  # the models' tokenizer.json normalizes to NFC


def _patterns(*patterns: str) -> Callable[[], list[pre.PreTokenizer]]:
    return lambda: [pre.Split(Regex(pattern), "isolated") for pattern in patterns]


def _digits_then_gpt2() -> list[pre.PreTokenizer]:
    return [pre.Digits(individual_digits=True), *_patterns(_GPT2)()]


def _falcon() -> list[pre.PreTokenizer]:
    return [
        pre.Punctuation("contiguous"),
        *_patterns(_GPT2)(),
        pre.Digits(individual_digits=False),
        *_patterns("[0-9][0-9][0-9]")(),
    ]


def _deepseek_coder() -> list[pre.PreTokenizer]:
    splits = _patterns(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL)()
    return [*splits, pre.Digits(individual_digits=True)]


_GPT2_FAMILY = Family(_patterns(_GPT2))
_LLAMA3_FAMILY = Family(_patterns(_LLAMA3), ignore_merges=True, add_bos=True)
_QWEN2_FAMILY = Family(_patterns(_QWEN2), compose=True)
_STARCODER_FAMILY = Family(_digits_then_gpt2)
_DEEPSEEK3_FAMILY = Family(_patterns(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3))

FAMILIES: dict[str, Family] = {
    # A file without `pre` is older than the key, and was GPT-2's cut.
    "default": _GPT2_FAMILY,
    **dict.fromkeys(("gpt-2", "gpt2", "jina-v2-en", "phi-2", "exaone4", "trillion"), _GPT2_FAMILY),
    **dict.fromkeys(("mpt", "olmo"), Family(_patterns(_GPT2), compose=True)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA3_FAMILY
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Family(_patterns(_LLAMA3))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _QWEN2_FAMILY),
    "qwen35": Family(_patterns(_QWEN35), compose=True),
    **dict.fromkeys(("hunyuan", "grok-2"), Family(_patterns(_QWEN2))),
    "seed-coder": Family(_patterns(_SEED)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "minerva-7b", "exaone"), _STARCODER_FAMILY
    ),
    "command-r": Family(_digits_then_gpt2, compose=True),
    "falcon": Family(_falcon),
    "tekken": Family(_patterns(_TEKKEN), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Family(_patterns(_GPT4O))),
    "deepseek-coder": Family(_deepseek_coder),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3_FAMILY),
}


def family(name: str) -> Family:
    """The family that `name` stands for.

    Raises:
        TokenizerError: no such family; guessing one would give wrong ids in silence.
    """
    if name not in FAMILIES:
        raise TokenizerError(
            f"tokenizer.ggml.pre is {name!r}, which is not known here. Known: "
            f"{', '.join(sorted(FAMILIES))}. Load the model's safetensors folder instead."
        )
    return FAMILIES[name]


def pre_tokenizer(chosen: Family) -> pre.PreTokenizer:
    """The family's cuts, then the byte alphabet."""
    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre.Sequence([*chosen.splits(), byte_level])


def normalizer(chosen: Family) -> normalizers.Normalizer | None:
    """NFC where the family's models use it."""
    return normalizers.NFC() if chosen.compose else None
