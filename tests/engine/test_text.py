"""The text of an answer: stop strings across token borders, cut characters, how it ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_forge import Rig, prompt, streamed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seethrough import LLM
from seethrough.errors import ParameterError

GREEDY = {"temperature": 0}
Says = Callable[..., LLM]
START = prompt(ord(">"))


def both_ways(llm: LLM, **sampling: object) -> tuple[str, list[int], str | None, object]:
    """Text, ids, finish and stop reason; the same streamed and not, alone and with mates."""
    whole = llm.generate(START, **GREEDY, **sampling)[0].outputs[0]
    joined, ids, output = streamed(llm, START, **GREEDY, **sampling)
    mates = llm.generate([prompt(1, 2, 3), START, START], **GREEDY, **sampling)
    for same in (output, *(mate.outputs[0] for mate in mates[1:])):
        assert (same.text, same.token_ids) == (whole.text, whole.token_ids)
        assert (same.finish_reason, same.stop_reason) == (whole.finish_reason, whole.stop_reason)
    assert (joined, ids) == (whole.text, whole.token_ids)
    return whole.text, whole.token_ids, whole.finish_reason, whole.stop_reason


def test_every_substring_as_stop(says: Says) -> None:
    """vllm-project/vllm#3574: no part of a stop string leaks, none is missed."""
    said = "abcabcdDEFGHIJ"
    llm = says(said)
    spans = [(i, i + n) for n in range(1, 7) for i in range(len(said) - n + 1)]
    for stop in dict.fromkeys(said[i:j] for i, j in spans):
        cut = said.index(stop)
        for keep in (False, True):
            text, ids, finish, reason = both_ways(
                llm, stop=stop, include_stop_str_in_output=keep, max_tokens=20
            )
            assert text == said[: cut + len(stop) * keep], stop
            assert len(ids) == cut + len(stop), "tokens up to the one that completed the stop"
            assert (finish, reason) == ("stop", stop)


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        ("mma", " hello ga", 4),  # across a border, inside both tokens
        ("a!", " hello gamm", 4),
        ("llo", " he", 1),  # inside one token, with text of it left over
        (" ", "", 1),
        ("o g", " hell", 3),
        ("!\n\n", " hello gamma", 5),
        ("\n", " hello gamma!", 5),
        ("�", " hello gamma!\n\n", 6),  # a genuine U+FFFD is text like any other
    ],
)
def test_stop_inside_tokens(says: Says, stop: str, text: str, tokens: int) -> None:
    llm = says("Ġhello", " ", "gam", "ma!", "ĊĊ", "ï¿½", "end")
    got, ids, finish, reason = both_ways(llm, stop=[stop, "never"], max_tokens=12)
    assert (got, len(ids), finish, reason) == (text, tokens, "stop", stop)


def test_of_two_stops_the_first_to_complete_wins(says: Says) -> None:
    llm = says("one two three")
    assert both_ways(llm, stop=["three", "two"], max_tokens=13)[0] == "one "
    assert both_ways(llm, stop=["wo", "two"], max_tokens=13)[0] == "one "
    assert both_ways(llm, stop=["two t", "wo"], max_tokens=13)[0] == "one t"


def test_text_that_was_only_almost_a_stop_comes_out(says: Says) -> None:
    llm = says("Hello Helloxx")
    text, ids, finish, _ = both_ways(llm, stop="Helloxxx", max_tokens=13)
    assert (text, len(ids), finish) == ("Hello Helloxx", 13, "length")
    ended = says("Hello Hel", "<|end|>")
    assert both_ways(ended, stop="Helloxxx")[0] == "Hello Hel"


def test_held_text_is_held_while_it_may_be_a_stop(says: Says) -> None:
    pieces = list(says("abHelabc").stream(START, stop="Hello", max_tokens=8, **GREEDY))
    assert [piece.text for piece in pieces] == ["a", "b", "", "", "", "Hela", "b", "c"]


def test_one_entry_of_logprobs_per_sampled_token_although_text_is_held(says: Says) -> None:
    """theroyallab/tabbyAPI#141: what is reported are the tokens that were sampled."""
    llm = says("abHelabc")
    sampling = {"stop": "Hello", "max_tokens": 8, "logprobs": 3, **GREEDY}
    pieces = list(llm.stream(START, **sampling))
    for piece in pieces:
        assert len(piece.token_ids) == len(piece.logprobs or []) == 1
        assert piece.token_ids[0] in piece.logprobs[0]
    output = llm.generate(START, **sampling)[0]
    assert output.outputs[0].logprobs == [entry for p in pieces for entry in p.logprobs]
    assert output.metrics.completion_tokens == len(output.outputs[0].logprobs) == 8


def test_nothing_follows_the_match(says: Says) -> None:
    """osaurus-ai/vmlx-swift#109: no text after the cut, from no buffer."""
    llm = says("four", "<|eot|>", "five six")
    stream = llm.stream(START, stop=["five"], **GREEDY)
    pieces = list(stream)
    assert "".join(p.text for p in pieces) == "four"
    assert pieces[-1].finish_reason == "stop"
    assert list(stream) == []
    assert stream.output().outputs[0].text == "four"


@pytest.mark.parametrize("budget", [1, 3, 512])
def test_stop_string_over_any_step_size(says: Says, budget: int) -> None:
    """sgl-project/sglang#35157: one text assembler, whatever the steps are."""
    llm = says("x" * 47 + "STOPHERE", settings={"max_num_batched_tokens": budget})
    text, ids, _, _ = both_ways(llm, stop="STOPHERE", max_tokens=60)
    assert (text, len(ids)) == ("x" * 47, 55)


@pytest.mark.parametrize("stop", ["", ["", "x"], [3], 3, ["a"] * 17, [None], {"a": 1}])
def test_bad_stops_are_refused(says: Says, stop: object) -> None:
    """sgl-project/sglang#38712: an empty stop string would end every answer at once."""
    llm = says("abc")
    for ask in (llm.generate, llm.stream):
        with pytest.raises(ParameterError, match="stop"):
            ask(START, stop=stop)


def test_no_stop_is_no_stop(says: Says) -> None:
    llm = says("abc")
    for stop in (None, []):
        assert both_ways(llm, stop=stop, max_tokens=3)[0] == "abc"


# ------------------------------------------------------------------------------------ characters


@pytest.mark.parametrize("said", ["é", "€", "😀", "a😀b", "😀😀", "e\u0301x", "👩‍👩‍👧"])
def test_cut_inside_a_character(says: Says, said: str) -> None:
    """antirez/ds4#815: valid text at every cut, the same streamed or not; the part is dropped."""
    llm = says(said)
    raw = said.encode()
    for cut in range(1, len(raw) + 1):
        text, ids, finish, _ = both_ways(llm, max_tokens=cut)
        assert text == raw[:cut].decode("utf-8", "ignore")
        assert (len(ids), finish) == (cut, "length")
        text.encode()


def test_half_a_character_before_an_end_token_is_dropped(says: Says) -> None:
    llm = says("ok", b"\xf0\x9f", "<|end|>")
    assert both_ways(llm)[0] == "ok"


def test_broken_bytes_inside_become_replacement_characters(says: Says) -> None:
    raw = b"a\xff\xf0\x9fb\xe2\x82\xacc\x80"
    llm = says(raw)
    assert both_ways(llm, max_tokens=len(raw))[0] == raw.decode("utf-8", "replace")


def test_genuine_replacement_character_passes_at_once(says: Says) -> None:
    llm = says("a", "ï¿½", "b")
    pieces = [piece.text for piece in llm.stream(START, max_tokens=3, **GREEDY)]
    assert pieces == ["a", "�", "b"]


def test_leading_space_of_an_answer_is_real(says: Says) -> None:
    assert both_ways(says("Ġhello", "Ġworld"), max_tokens=2)[0] == " hello world"
    assert both_ways(says(" x"), max_tokens=2)[0] == " x"


def test_special_tokens_are_left_out_of_the_text_unless_asked_for(says: Says) -> None:
    llm = says("a", "<|eot|>", "b", "<|start|>")
    assert both_ways(llm, max_tokens=4)[0] == "ab"
    kept = both_ways(llm, max_tokens=4, skip_special_tokens=False)[0]
    assert kept == "a<|eot|>b<|start|>"


def test_a_stop_string_does_not_see_what_is_not_text(says: Says) -> None:
    llm = says("a", "<|eot|>", "b", "c")
    text, ids, finish, _ = both_ways(llm, stop="ab", max_tokens=4)
    assert (text, len(ids), finish) == ("", 3, "stop")
    text, _, finish, _ = both_ways(llm, stop="ab", max_tokens=4, skip_special_tokens=False)
    assert (text, finish) == ("a<|eot|>bc", "length")


PARTS = st.sampled_from(
    ["a", "b", "ab", " ", "é", "😀", "gam", "ma!", "Ġhello", "ï¿½", "<|eot|>", b"\xf0", b"\x9f"]
)


@given(
    parts=st.lists(PARTS, min_size=1, max_size=10),
    stops=st.lists(st.text("ab😀é� gm!", min_size=1, max_size=4), max_size=3),
    keep=st.booleans(),
    cut=st.integers(1, 20),
)
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_text_is_the_bytes_cut_at_the_first_stop(
    rig: Rig,
    tmp_path_factory: pytest.TempPathFactory,
    parts: list[str | bytes],
    stops: list[str],
    keep: bool,
    cut: int,
) -> None:
    llm = LLM(rig.write(tmp_path_factory.mktemp("any"), *parts), threads=1)
    text, ids, finish, reason = both_ways(
        llm, stop=stops, include_stop_str_in_output=keep, max_tokens=cut
    )
    script = (rig.ids(*parts) + [ord("~")] * 20)[:cut]
    wanted, used, matched = _by_hand(rig, script, stops, keep)
    assert (text, ids, reason) == (wanted, script[:used], matched)
    assert finish == ("length" if matched is None else "stop")


def _by_hand(
    rig: Rig, script: list[int], stops: list[str], keep: bool
) -> tuple[str, int, str | None]:
    """The rule said naively: after each token, decode all and look at every end of the text."""
    raw = b""
    for used, token in enumerate(script, start=1):
        piece = rig.backend.id_to_token(token)
        raw += b"" if piece.startswith("<|") else _bytes_of(rig, token)
        text = _decoded(raw)
        found = [
            (text.index(stop) + len(stop), text.index(stop), stop) for stop in stops if stop in text
        ]
        if found:
            end, start, stop = min(found)
            return text[: end if keep else start], used, stop
    return _decoded(raw), len(script), None


def _bytes_of(rig: Rig, token: int) -> bytes:
    words = {"gam": b"gam", "ma!": b"ma!", "Ġhello": b" hello", "ï¿½": "�".encode()}
    return bytes([token]) if token < 256 else words[rig.backend.id_to_token(token)]


def _decoded(raw: bytes) -> str:
    """Without an incomplete last character."""
    for tail in range(4):
        kept = raw[: len(raw) - tail]
        try:
            raw[len(raw) - tail :].decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                return kept.decode("utf-8", "replace")
    return raw.decode("utf-8", "replace")
