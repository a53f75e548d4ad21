"""Bans as ids: spellings of bad words, matching over prompt and output, ends held back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from seethrough.errors import ParameterError
from seethrough.sampling.bans import Bans, History, bad_words_to_ids, prepare_bans
from seethrough.sampling.params import SamplingParams, resolve

VOCAB = {"Lon": 1, "don": 2, " London": 3, " ": 4, "dra": 5, "a": 6, "b": 7, " a": 8}


def encode(text: str) -> list[int]:
    """Longest match over VOCAB; what is not in it vanishes, as in some tokenizers."""
    found = []
    while text:
        piece = next((text[:n] for n in range(len(text), 0, -1) if text[:n] in VOCAB), None)
        if piece:
            found.append(VOCAB[piece])
        text = text[len(piece) if piece else 1 :]
    return found


def bans(end_token_ids: tuple[int, ...] = (), size: int = 20, **given: object) -> Bans:
    params = resolve(SamplingParams(**given), None, {}, lambda: 1)
    return prepare_bans(params, end_token_ids, size, encode)


def banned(prepared: Bans, prompt: list[int], output: list[int]) -> set[int]:
    lists = prepared.bad_ids(History(prompt, output)).tolist()
    arrays = prepared.bad_ids(History(np.array(prompt, int), np.array(output, int))).tolist()
    assert lists == arrays
    return set(lists)


def test_both_spellings_of_a_word() -> None:
    # vllm-project/vllm#23886: the spelling with a space has another number of tokens.
    assert bad_words_to_ids(["London"], encode) == ((1, 2), (3,))
    assert bad_words_to_ids([" London"], encode) == ((3,), (1, 2))
    assert bad_words_to_ids(["London", " London"], encode) == ((1, 2), (3,))
    assert bad_words_to_ids([" "], encode) == ((4,),)


def test_a_shared_first_piece_is_not_banned() -> None:
    prepared = bans(bad_words=["London"])
    assert banned(prepared, [], []) == {3}
    assert banned(prepared, [], [1]) == {3, 2}  # after "Lon": no "don", and "dra" stays free
    assert banned(prepared, [], [1, 5]) == {3}
    assert banned(prepared, [], [2]) == {3}


@pytest.mark.parametrize("word", ["\u0001", "\u0001\u0002", "zzz", " \u0001"])
def test_a_word_without_tokens_is_refused(word: str) -> None:
    # vllm-project/vllm PR#53433. The form with a space would be the space alone: not banned either.
    with pytest.raises(ParameterError, match="bad_words"):
        bans(bad_words=["a", word])


def test_the_prefix_may_lie_in_the_prompt_or_across_the_border() -> None:
    prepared = bans(bad_words_ids=[[1, 2, 3, 4]])
    assert banned(prepared, [1, 2, 3], []) == {4}
    assert banned(prepared, [9, 1, 2], [3]) == {4}
    assert banned(prepared, [1], [2, 3]) == {4}
    assert banned(prepared, [], [1, 2, 3]) == {4}
    assert banned(prepared, [2], [3]) == set()
    assert banned(prepared, [1, 2, 3], [9]) == set()
    assert banned(prepared, [], []) == set()


def test_sequences_that_share_an_end_or_repeat() -> None:
    prepared = bans(bad_words_ids=[[1, 2], [3, 1, 2], [5, 1, 6], [1, 1, 1], [7], [7], [1, 2]])
    assert banned(prepared, [3], [1]) == {7, 2}
    assert banned(prepared, [5], [1]) == {7, 2, 6}
    assert banned(prepared, [1], [1]) == {7, 2, 1}
    assert banned(prepared, [], [2]) == {7}


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6),
    st.lists(st.integers(0, 3), max_size=6),
    st.lists(st.integers(0, 3), max_size=6),
)
def test_bad_ids_are_those_that_would_complete_a_sequence(
    sequences: list[list[int]], prompt: list[int], output: list[int]
) -> None:
    prepared = bans(bad_words_ids=sequences)
    text = prompt + output
    complete = {
        token
        for token in range(4)
        for s in sequences
        if len(s) <= len(text) + 1 and ([*text, token])[-len(s) :] == s
    }
    assert banned(prepared, prompt, output) == complete


def test_ends_are_the_union_and_ignore_eos_frees_the_models_own() -> None:
    assert bans((0, 9), stop_token_ids=[5, 9]).ends.tolist() == [0, 5, 9]
    assert bans((0, 9), stop_token_ids=[5], ignore_eos=True).ends.tolist() == [5]
    assert bans().ends.size == 0


def test_end_tokens_outside_of_the_row_are_left_out_and_request_ids_refused() -> None:
    assert bans((0, 20, 10**9, -1)).ends.tolist() == [0]
    for bad in ({"stop_token_ids": [20]}, {"bad_words_ids": [[1, 20]]}):
        with pytest.raises(ParameterError, match="0 to 19"):
            bans(**bad)
    with pytest.raises(ParameterError, match="0 to 2"):
        bans(size=3, bad_words=["London"])


def test_tail() -> None:
    history = History([1, 2, 3], [4, 5])
    assert [history.tail(n) for n in (1, 2, 3, 5, 9)] == [
        [5],
        [4, 5],
        [3, 4, 5],
        [1, 2, 3, 4, 5],
        [1, 2, 3, 4, 5],
    ]
    assert History([1, 2], []).tail(1) == [2]
    assert History([], []).tail(3) == []


def trained_byte_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ["it is exaggerated and exaggerated again in London, in London, not in Lond or Lon"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus * 5, trainer)
    return tokenizer


@pytest.mark.parametrize("word", ["London", "exaggerated", "in", "not in", " London", "你好", "é"])
def test_a_real_byte_level_tokenizer_cannot_complete_the_word(word: str) -> None:
    # Whoever spells the word as the tokenizer does, with or without a space, meets the ban at the
    # last token and not before.
    tokenizer = trained_byte_bpe()
    params = resolve(SamplingParams(bad_words=[word]), None, {}, lambda: 1)
    size = tokenizer.get_vocab_size()
    prepared = prepare_bans(
        params, (), size, lambda t: tokenizer.encode(t, add_special_tokens=False).ids
    )
    for form in (word.strip(), " " + word.strip()):
        ids = tokenizer.encode(form, add_special_tokens=False).ids
        assert ids[-1] in banned(prepared, [], ids[:-1])
        if len(ids) > 1:
            assert ids[0] not in banned(prepared, [], [])
