"""The stream equals the whole decode, however the ids are grouped."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mini_tokenizers import KINDS, Mini

from seethrough.text.detokenizer import Detokenizer
from seethrough.text.tokenizer import Tokenizer

TEXTS = st.text(st.sampled_from("ab .,'\n你好世ďé👋🏽\u200d\ufffdQ"), max_size=25)


def stream(tokenizer: Tokenizer, groups: list[list[int]], skip: bool, at_start: bool = True) -> str:
    detokenizer = Detokenizer(tokenizer, skip, at_start=at_start)
    return "".join([detokenizer.push(group) for group in groups]) + detokenizer.flush()


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    groups = []
    place = 0
    for size in sizes:
        groups.append(ids[place : place + size])
        place += size
    return [*groups, ids[place:]]


def whole(tokenizer: Tokenizer, ids: list[int], skip: bool, at_start: bool = True) -> str:
    """decode(), without an incomplete last character: those bytes alone are dropped."""
    raw = b""
    opens = at_start
    for i in ids:
        raw += tokenizer.text_bytes(i, opens=opens, skip=skip)
        opens = opens and not tokenizer.has_text(i, skip=skip)
    assert raw.decode("utf-8", "replace") == tokenizer.decode(
        ids, skip_special_tokens=skip, at_start=at_start
    )
    for held in range(4):
        head, tail = raw[: len(raw) - held], raw[len(raw) - held :]
        if held == 0 or (tail[0] >= 0xC2 and _may_begin_a_character(tail)):
            text = head.decode("utf-8", "replace")
            if held or not _has_open_tail(raw):
                return text
    raise AssertionError("unreachable")


def _may_begin_a_character(tail: bytes) -> bool:
    return any(
        char.startswith(tail) and len(char) > len(tail)
        for char in (
            (tail + bytes(rest))
            for rest in (
                (0x80,),
                (0x80, 0x80),
                (0xBF, 0x80),
                (0x80, 0x80, 0x80),
                (0xA0, 0x80, 0x80),
            )
        )
        if _valid(char)
    )


def _valid(raw: bytes) -> bool:
    try:
        return len(raw.decode("utf-8")) == 1
    except UnicodeDecodeError:
        return False


def _has_open_tail(raw: bytes) -> bool:
    return any(
        _may_begin_a_character(raw[-n:]) for n in (1, 2, 3) if len(raw) >= n and raw[-n] >= 0xC2
    )


@pytest.mark.parametrize("kind", KINDS)
def test_any_grouping_of_any_ids_gives_the_whole_text(kind: str, minis: dict[str, Mini]) -> None:
    """ai-dynamo/dynamo PR#12688, waybarrios/vllm-mlx PR#109; ids wider than the tokenizer too."""
    ours = minis[kind].ours
    any_id = st.integers(0, ours.vocab_size + 20)
    bytes_only = st.sampled_from(
        [i for i in range(ours.vocab_size) if ours.token_bytes(i)[:1] > b"\x7f"] or [0]
    )
    from_text = TEXTS.map(lambda text: ours.encode(text))
    ids_of = st.one_of(st.lists(any_id, max_size=20), st.lists(bytes_only, max_size=20), from_text)

    @settings(deadline=None, max_examples=300)
    @given(ids_of, st.lists(st.integers(0, 4), max_size=10), st.booleans(), st.booleans())
    def check(ids: list[int], sizes: list[int], skip: bool, at_start: bool) -> None:
        expected = whole(ours, ids, skip, at_start)
        assert stream(ours, cut(ids, sizes), skip, at_start) == expected
        assert stream(ours, [[i] for i in ids], skip, at_start) == expected
        assert stream(ours, [ids], skip, at_start) == expected

    check()


@pytest.mark.parametrize("kind", ["byte_bpe", "sp_legacy", "sp_first"])
def test_no_broken_character_ever_shows(kind: str, minis: dict[str, Mini]) -> None:
    """antirez/ds4 PR#815: cut after every token, the text is a prefix of the whole text."""
    ours = minis[kind].ours
    text = "ď 你好 👋🏽 👨‍👩‍👧 end"
    ids = ours.encode(text)
    for stop in range(len(ids) + 1):
        part = stream(ours, [[i] for i in ids[:stop]], True)
        assert text.startswith(part)
        assert "\ufffd" not in part
    assert stream(ours, [[i] for i in ids], True) == text


@pytest.mark.parametrize("kind", ["byte_bpe", "sp_legacy"])
def test_a_real_replacement_character_passes_at_once(kind: str, minis: dict[str, Mini]) -> None:
    """deepseek-ai/deepseek-recipe PR#16."""
    ours = minis[kind].ours
    detokenizer = Detokenizer(ours)
    shown = [detokenizer.push([i]) for i in ours.encode("a\ufffd")]
    assert "".join(shown) == "a\ufffd"
    assert shown[-1] == "\ufffd"


def test_broken_bytes_are_not_held(minis: dict[str, Mini]) -> None:
    """At most 3 bytes wait, and a byte that cannot go on frees them at once."""
    ours = minis["sp_legacy"].ours
    detokenizer = Detokenizer(ours)

    def byte(value: int) -> list[int]:
        return [3 + value]

    assert detokenizer.push(byte(0xF0)) == ""
    assert detokenizer.push(byte(0x9F)) == ""
    assert detokenizer.push(byte(0x91)) == ""
    assert detokenizer.push(byte(0x41)) == "\ufffdA"
    assert detokenizer.push(byte(0x80)) == "\ufffd"
    assert detokenizer.push(byte(0xF0)) == ""
    assert detokenizer.flush() == ""
    assert detokenizer.push(byte(0x42)) == "B"


def test_spaces_between_streamed_words_stay(minis: dict[str, Mini]) -> None:
    """huggingface/transformers#28776."""
    for kind in ("byte_bpe", "sp_legacy", "sp_first", "unigram"):
        ours = minis[kind].ours
        ids = ours.encode("One. Two. Three", add_special_tokens=False)
        assert stream(ours, [[i] for i in ids], True) == "One. Two. Three"


def test_cost_per_token_does_not_grow(minis: dict[str, Mini]) -> None:
    ours = minis["sp_legacy"].ours
    ids = ours.encode("hello world ") * 2000
    detokenizer = Detokenizer(ours)

    def seconds() -> float:
        start = time.process_time()
        for i in ids:
            detokenizer.push([i])
        return time.process_time() - start

    first = min(seconds(), seconds())
    for _ in range(5):
        seconds()
    assert min(seconds(), seconds()) < 3 * first
