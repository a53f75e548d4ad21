"""Tokenizers from GGUF metadata, against sentencepiece and the `tokenizers` library."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
import sentencepiece as spm
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from mini_tokenizers import CORPUS, byte_bpe

from seethrough.errors import TokenizerError
from seethrough.text import pretokenizers
from seethrough.text.tokenizer import Tokenizer

TEXTS = st.one_of(
    st.text(max_size=30),
    st.lists(
        st.sampled_from(
            ["hello", " ", "  ", "the ", "house", "你好", "👋🏽", ".", "<mark>", "double"]
        ),
        max_size=12,
    ).map("".join),
)


def train_sentencepiece(**options: object) -> spm.SentencePieceProcessor:
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        user_defined_symbols=["<mark>"],
        minloglevel=2,
        **options,
    )
    return spm.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(model: spm.SentencePieceProcessor, **changed: object) -> dict[str, Any]:
    def kind(i: int) -> int:
        if model.is_unknown(i):
            return 2
        if model.is_control(i):
            return 3
        if model.is_byte(i):
            return 6
        return 4 if model.id_to_piece(i) == "<mark>" else 1

    ids = range(model.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        **{f"tokenizer.{key}": value for key, value in changed.items()},
    }


def byte_bpe_metadata(pre: str = "gpt-2", **changed: object) -> dict[str, Any]:
    state = json.loads(byte_bpe().oracle.to_str())
    added = {token["content"]: token for token in state["added_tokens"]}
    vocab = {**state["model"]["vocab"], **{t: entry["id"] for t, entry in added.items()}}
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = state["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            1 if t not in added else 3 if added[t]["special"] else 4 for t in tokens
        ],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.ggml.eos_token_id": vocab["<|im_end|>"],
        **{f"tokenizer.{key}": value for key, value in changed.items()},
    }


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_and_text_equal_the_original(prefix: bool) -> None:
    model = train_sentencepiece(add_dummy_prefix=prefix)
    ours = Tokenizer.from_gguf(sentencepiece_metadata(model, **{"ggml.add_space_prefix": prefix}))
    control = ("<s>", "</s>", "<unk>")

    @settings(deadline=None, max_examples=300)
    @given(TEXTS.filter(lambda t: "▁" not in t and not any(c in t for c in control)))
    def check(text: str) -> None:
        if text.startswith("<mark>"):
            return  # SentencePiece puts its prefix before a symbol; ours only before text
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == model.encode(text)
        assert ours.decode(ids) == text
        assert ours.encode(text) == [model.bos_id(), *ids]

    check()


def test_scores_and_not_ids_say_what_joins_first() -> None:
    tokens = ["<unk>", "a", "b", "c", "ab", "bc"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0, -9.0, -9.0, -9.0, -2.0, -1.0],
        "tokenizer.ggml.token_type": [2, 1, 1, 1, 1, 1],
        "tokenizer.ggml.add_space_prefix": False,
    }
    ours = Tokenizer.from_gguf(metadata)
    assert ours.pieces(ours.encode("abc")) == ["a", "bc"]
    metadata["tokenizer.ggml.scores"][4] = -0.5
    ours = Tokenizer.from_gguf(metadata)
    assert ours.pieces(ours.encode("abc")) == ["ab", "c"]
    assert ours.encode("x") == [0]  # the unknown token, found by its type


def test_no_space_is_added_after_special_tokens() -> None:
    """ggml-org/llama.cpp#8584."""
    model = train_sentencepiece()
    ours = Tokenizer.from_gguf(sentencepiece_metadata(model))
    for text in ("<s>hello", "<s>hello</s>", "hello</s>the", "<s> hello</s> the", "a<mark>b"):
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special_tokens=False) == text
        assert ours.encode(text).count(model.bos_id()) == 1


def test_byte_level_ids_equal_the_original() -> None:
    oracle = byte_bpe().oracle
    ours = Tokenizer.from_gguf(byte_bpe_metadata())

    @settings(deadline=None, max_examples=300)
    @given(TEXTS)
    def check(text: str) -> None:
        text = f"{text}<|im_end|>{text}<tool_call>"
        ids = ours.encode(text)
        assert ids == oracle.encode(text).ids
        assert ours.decode(ids) == oracle.decode(ids)

    check()
    assert not ours.add_bos
    assert {ours.pieces([i])[0] for i in ours.control_ids} == {"<|im_start|>", "<|im_end|>"}
    assert {ours.pieces([i])[0] for i in ours.added_ids} == {"<tool_call>", "</think>"}


# How each family cuts one text; worked out by hand from the models' published patterns.
CUTS = {
    "gpt-2": ["I", "'m", " 1234", "!!", "\n\n ", " x", "'LL"],
    "smollm": ["I", "'m", " ", "1", "2", "3", "4", "!!", "\n\n ", " x", "'", "LL"],
    "llama-bpe": ["I", "'m", " ", "123", "4", "!!\n\n", " ", " x", "'LL"],
    "qwen2": ["I", "'m", " ", "1", "2", "3", "4", "!!\n\n", " ", " x", "'LL"],
    "tekken": ["I", "'m", " ", "1", "2", "3", "4", "!!\n\n", " ", " x", "'LL"],
    "gpt-4o": ["I'm", " ", "123", "4", "!!\n\n", " ", " x'LL"],
    "deepseek-v3": ["I", "'m", " ", "123", "4", "!!\n\n", " ", " x", "'LL"],
    "falcon": ["I", "'", "m", " ", "123", "4", "!!", "\n\n ", " x", "'", "LL"],
}
CUTS["gpt-2"][-1:] = ["'", "LL"]


@pytest.mark.parametrize("pre", CUTS)
def test_each_family_cuts_words_its_own_way(pre: str) -> None:
    cutter = pretokenizers.pre_tokenizer(pretokenizers.family(pre))
    text = "I'm 1234!!\n\n  x'LL"
    cuts = [text[start:end] for _, (start, end) in cutter.pre_tokenize_str(text)]
    assert cuts == CUTS[pre]


@pytest.mark.parametrize("pre", sorted(pretokenizers.FAMILIES))
def test_every_family_loads_and_loses_nothing(pre: str) -> None:
    ours = Tokenizer.from_gguf(byte_bpe_metadata(pre))
    text = "I'm 1234!! It's 你好 x\r\n\t  ΑΒγ ǅ a_b/c 👋🏽 "
    assert ours.decode(ours.encode(text)) == text


def test_llama_bpe_takes_whole_words_and_adds_bos_by_default() -> None:
    metadata = byte_bpe_metadata("llama-bpe")
    metadata["tokenizer.ggml.tokens"].append("Ġunheardof")
    metadata["tokenizer.ggml.token_type"].append(1)
    metadata["tokenizer.ggml.bos_token_id"] = 5
    ours = Tokenizer.from_gguf(metadata)
    assert ours.encode(" unheardof") == [5, len(metadata["tokenizer.ggml.tokens"]) - 1]
    metadata["tokenizer.ggml.add_bos_token"] = False
    assert not Tokenizer.from_gguf(metadata).add_bos


def test_all_end_tokens_are_named() -> None:
    """Blaizzy/mlx-vlm PR#2112: no source of end tokens replaces another."""
    ends = {"ggml.eos_token_id": 4, "ggml.eot_token_id": 5, "ggml.eom_token_id": np.uint32(6)}
    assert Tokenizer.from_gguf(byte_bpe_metadata(**ends)).eos_token_ids == {4, 5, 6}


def test_add_eos_token_is_followed() -> None:
    ours = Tokenizer.from_gguf(byte_bpe_metadata(**{"ggml.add_eos_token": True}))
    assert ours.encode("hello")[-1] == ours.eos_token_id


def test_repeated_spellings_keep_their_own_ids() -> None:
    metadata = byte_bpe_metadata()
    plain = Tokenizer.from_gguf(metadata)
    metadata["tokenizer.ggml.tokens"].append("e")
    metadata["tokenizer.ggml.token_type"].append(5)
    ours = Tokenizer.from_gguf(metadata)
    last = ours.vocab_size - 1
    assert ours.encode("hello e") == plain.encode("hello e")
    assert ours.pieces([last]) == ["e"]
    assert ours.token_bytes(last) == b"e"


def _without(key: str) -> dict[str, Any]:
    return {k: v for k, v in byte_bpe_metadata().items() if k != f"tokenizer.ggml.{key}"}


SP = sentencepiece_metadata(train_sentencepiece())
BROKEN = {
    "no model": (_without("model"), r"ggml\.model"),
    "no tokens": (_without("tokens"), r"ggml\.tokens"),
    "no merges": (_without("merges"), r"ggml\.merges"),
    "no scores": ({k: v for k, v in SP.items() if "scores" not in k}, r"ggml\.scores"),
    "short scores": ({**SP, "tokenizer.ggml.scores": [0.0]}, "1 entries"),
    "unknown model": (byte_bpe_metadata(**{"ggml.model": "rwkv"}), "rwkv"),
    "unknown pre": (byte_bpe_metadata(pre="viking-9"), "viking-9"),
    "pre of a wrong type": (byte_bpe_metadata(**{"ggml.pre": 3}), r"ggml\.pre"),
    "tokens of a wrong type": (byte_bpe_metadata(**{"ggml.tokens": "abc"}), r"ggml\.tokens"),
    "one token of a wrong type": (byte_bpe_metadata(**{"ggml.tokens": ["a", 3]}), r"tokens\[1\]"),
    "empty tokens": (byte_bpe_metadata(**{"ggml.tokens": []}), "empty"),
    "short types": (byte_bpe_metadata(**{"ggml.token_type": [1]}), "1 entries"),
    "type 9": (
        {**SP, "tokenizer.ggml.token_type": [9] * len(SP["tokenizer.ggml.tokens"])},
        "holds 9",
    ),
    "merge without a space": (byte_bpe_metadata(**{"ggml.merges": ["ab"]}), r"merges\[0\]"),
    "merge of no token": (byte_bpe_metadata(**{"ggml.merges": ["zq zq"]}), r"merges\[0\]"),
    "merge of strangers": (byte_bpe_metadata(**{"ggml.merges": [" e"]}), r"merges\[0\]"),
    "bos beyond": (byte_bpe_metadata(**{"ggml.bos_token_id": 10**9}), "bos_token_id"),
    "negative eos": (byte_bpe_metadata(**{"ggml.eos_token_id": -1}), "eos_token_id"),
    "eos of a wrong type": (byte_bpe_metadata(**{"ggml.eos_token_id": "2"}), "eos_token_id"),
    "bos asked, none there": (byte_bpe_metadata(**{"ggml.add_bos_token": True}), "bos_token_id"),
    "template of a wrong type": (byte_bpe_metadata(chat_template=3), "chat_template"),
    "nothing": ({}, r"ggml\.model"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_metadata_names_the_key(name: str) -> None:
    """ggml-org/llama.cpp#9309, ollama/ollama#10930: an error, and never silent garbage."""
    metadata, match = BROKEN[name]
    with pytest.raises(TokenizerError, match=match):
        Tokenizer.from_gguf(metadata)


def test_lists_may_be_arrays() -> None:
    arrays = {k: np.array(v) if "score" in k or "type" in k else v for k, v in SP.items()}
    assert Tokenizer.from_gguf(arrays).encode("hello") == Tokenizer.from_gguf(SP).encode("hello")


def test_the_default_model(default_model_metadata: dict[str, Any]) -> None:
    """SmolLM2: the ids of a text, checked against a tokenizer built by the library alone."""
    ours = Tokenizer.from_gguf(default_model_metadata)
    assert ours.vocab_size == 49152
    assert (ours.bos_token, ours.eos_token) == ("<|im_start|>", "<|im_end|>")
    tokens = default_model_metadata["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in default_model_metadata["tokenizer.ggml.merges"]]
    oracle = tokenizers.Tokenizer(
        tokenizers.models.BPE({t: i for i, t in enumerate(tokens)}, merges)
    )
    oracle.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    for text in ["Hello world! 12345 don't", "你好 👋🏽\n\n  def f(x):\n\treturn x", " ", ""]:
        assert ours.encode(text) == oracle.encode(text).ids
        assert ours.decode(ours.encode(text)) == text
