"""Stop strings against a plain search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seethrough.errors import ParameterError
from seethrough.text.stop import StopChecker

SMALL = st.text("ab<", max_size=14)
STOPS = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=4)


def naive(text: str, stops: list[str], first_end: int, include: bool) -> tuple[str, str | None]:
    """The first place where a stop ends at or after `first_end` characters; longest of equals."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending and end > first_end:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def held_by_rule(text: str, stops: list[str]) -> int:
    return max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


@settings(deadline=None, max_examples=600)
@given(SMALL, STOPS, st.lists(st.integers(0, 5), max_size=8), st.integers(0, 6), st.booleans())
def test_any_chunking_equals_the_search_of_the_whole_text(
    text: str, stops: list[str], sizes: list[int], unarmed: int, include: bool
) -> None:
    checker = StopChecker(stops, include_stop_str_in_output=include)
    expected, stop = naive(text, stops, min(unarmed, len(text)), include)
    given_out = ""
    pieces = [(text[:unarmed][i : i + 2], False) for i in range(0, len(text[:unarmed]), 2)]
    rest = text[unarmed:]
    for size in [*sizes, len(rest)]:
        pieces.append((rest[:size], True))
        rest = rest[size:]
    seen = ""
    for piece, armed in pieces:
        seen += piece
        new, matched = checker.push(piece, armed)
        given_out += new
        assert expected.startswith(given_out)  # nothing of a match is ever given out
        if matched is None:
            assert len(seen) - len(given_out) == held_by_rule(seen, stops)  # nor more held
        else:
            assert matched == stop
    assert checker.matched == stop
    assert given_out + checker.flush() == expected


def test_a_stop_over_token_borders() -> None:
    """vllm-project/vllm#3574, osaurus-ai/vmlx-swift PR#109."""
    checker = StopChecker(["</s>"])
    assert checker.push("hello<") == ("hello", None)
    assert checker.push("/") == ("", None)
    assert checker.push("s> and more") == ("", "</s>")
    assert checker.push("even more") == ("", "</s>")
    assert checker.flush() == ""


def test_the_match_that_completes_first_wins_and_then_the_longest() -> None:
    assert StopChecker(["abcd", "bc"]).push("xabcd") == ("xa", "bc")
    assert StopChecker(["c", "abc"]).push("xabc") == ("x", "abc")


def test_text_before_min_tokens_does_not_end_the_text() -> None:
    """vllm-project/vllm#21987: only the last character must arrive armed."""
    checker = StopChecker(["END"])
    assert checker.push("END E", armed=False) == ("END ", None)
    assert checker.push("ND") == ("", "END")
    late = StopChecker(["END"])
    assert late.push("aEND", armed=False) == ("aEND", None)
    assert late.push("b") == ("b", None)


@pytest.mark.parametrize("stops", [[""], ["a", ""], "abc", [None], [3]])
def test_what_is_no_stop_is_refused(stops: object) -> None:
    """sgl-project/sglang PR#38712."""
    with pytest.raises(ParameterError):
        StopChecker(stops)  # type: ignore[arg-type]
