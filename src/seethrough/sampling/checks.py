"""Checks of one value each: the right type, in range, or a ParameterError that says what to send.

Knows nothing of which parameters exist. A check returns the value in its plain Python form (numpy
scalars become int and float, lists become tuples), so that nothing the caller keeps can change it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from seethrough.errors import ParameterError

Check = Callable[[str, object], object]

# Every 32-bit token id has at most ten digits; longer keys are refused before int() reads them.
_ID_TEXT = re.compile(r"[0-9]{1,10}")


def number(low: float, high: float, *, above_low: bool = False) -> Check:
    """A finite real number in [low, high], or in (low, high] with `above_low`."""
    wanted = f"a number in {'(' if above_low else '['}{low:g}, {high:g}]"

    def check(name: str, value: object) -> float:
        if isinstance(value, bool | np.bool_) or not isinstance(
            value, int | float | np.integer | np.floating
        ):
            raise ParameterError(name, value, f"expected {wanted}, got {type(value).__name__}")
        if not isinstance(value, int | np.integer) and not math.isfinite(value):
            raise ParameterError(name, value, f"expected {wanted}, and it must be finite")
        # Compared before float(): an integer of 400 digits has no float.
        if not low <= value <= high or (above_low and value == low):
            raise ParameterError(name, value, f"expected {wanted}")
        return float(value)

    return check


def integer(low: int, high: int) -> Check:
    """An integer in [low, high]; bool and float are not integers here."""
    wanted = f"an integer in [{low}, {high}]"

    def check(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ParameterError(name, value, f"expected {wanted}, got {type(value).__name__}")
        if not low <= value <= high:
            raise ParameterError(name, value, f"expected {wanted}")
        return int(value)

    return check


def boolean(name: str, value: object) -> bool:
    """True or False, nothing that merely counts as such."""
    if not isinstance(value, bool | np.bool_):
        raise ParameterError(name, value, f"expected true or false, got {type(value).__name__}")
    return bool(value)


def one_of(choices: Sequence[str]) -> Check:
    """One of the given words."""

    def check(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ParameterError(name, value, f"expected one of {', '.join(choices)}")
        return value

    return check


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ParameterError(name, value, f"expected a string, got {type(value).__name__}")
    if not value:
        raise ParameterError(name, value, "an empty string matches everywhere; leave it out")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        why = "the string holds a lone surrogate, which no text can contain"
        raise ParameterError(name, value, why) from error
    return value


def _items(name: str, value: object, what: str, most: int | None) -> list[object]:
    if isinstance(value, np.ndarray) and value.ndim == 1:
        value = value.tolist()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        why = f"expected a list of {what}, got {type(value).__name__}"
        raise ParameterError(name, value, why)
    if most is not None and len(value) > most:
        raise ParameterError(name, value, f"expected at most {most} {what}, got {len(value)}")
    return list(value)


def strings(most: int, *, one_alone: bool = False) -> Check:
    """A list of at most `most` non-empty strings; with `one_alone` a single string stands for one.

    An empty list means none, which is how a request overrides a list from the command line.
    """

    def check(name: str, value: object) -> tuple[str, ...]:
        if one_alone and isinstance(value, str):
            return (_text(name, value),)
        return tuple(_text(name, item) for item in _items(name, value, "strings", most))

    return check


_token_id = integer(0, 2**32 - 1)


def token_ids(*, may_be_empty: bool = True) -> Check:
    """A list of token ids; repeated ids are kept once, in the order given."""

    def check(name: str, value: object) -> tuple[object, ...]:
        ids = tuple(dict.fromkeys(_token_id(name, i) for i in _items(name, value, "ids", None)))
        if not ids and not may_be_empty:
            raise ParameterError(name, value, "the list is empty: nothing could be generated")
        return ids

    return check


def id_sequences(most: int, longest: int) -> Check:
    """A list of at most `most` non-empty id sequences of at most `longest` ids each."""

    def check(name: str, value: object) -> tuple[tuple[object, ...], ...]:
        sequences = []
        for item in _items(name, value, "id sequences", most):
            ids = tuple(_token_id(name, i) for i in _items(name, item, "ids", longest))
            if not ids:
                raise ParameterError(name, value, "an empty id sequence bans nothing; leave it out")
            sequences.append(ids)
        return tuple(sequences)

    return check


def biases(low: float, high: float) -> Check:
    """A map from token id (an int, or its decimal digits as JSON gives them) to a bias."""
    bias = number(low, high)

    def check(name: str, value: object) -> dict[int, object]:
        if not isinstance(value, Mapping):
            why = f"expected a map from token id to bias, got {type(value).__name__}"
            raise ParameterError(name, value, why)
        checked: dict[int, object] = {}
        for key, given in value.items():
            if isinstance(key, str):
                if not _ID_TEXT.fullmatch(key):
                    raise ParameterError(name, key, "this key is not a token id (digits only)")
                key = int(key)
            token = _token_id(name, key)
            if not isinstance(token, int) or token in checked:
                raise ParameterError(name, key, "this token id appears twice")
            checked[token] = bias(f"{name}[{token}]", given)
        return checked

    return check
