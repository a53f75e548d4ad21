"""JSON from an untrusted file to one dict: strict, and bounded before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from seethrough.errors import WeightFormatError

MAX_JSON_BYTES = 8 << 20
# A value needs a comma, a colon or a bracket of its own, so their number bounds the number of
# Python objects: about 50 MB at this limit. A safetensors entry takes 12 marks, so 40,000 fit.
MAX_MARKS = 500_000
MAX_DEPTH = 32
_MARKS = np.zeros(256, dtype=np.bool_)
_MARKS[list(b",:[{")] = True


def parse_object(data: bytes, path: Path, what: str) -> dict[str, Any]:
    """Parse UTF-8 JSON whose top is an object.

    Refused with a `WeightFormatError` that names `what`: duplicate keys, NaN and Infinity, lone
    surrogates, nesting deeper than `MAX_DEPTH`, more than `MAX_JSON_BYTES` or `MAX_MARKS`.
    """
    if len(data) > MAX_JSON_BYTES:
        raise WeightFormatError(
            path, f"{what} has {len(data)} bytes, more than the limit of {MAX_JSON_BYTES}"
        )
    marks = int(np.count_nonzero(_MARKS[np.frombuffer(data, dtype=np.uint8)]))
    if marks > MAX_MARKS:
        raise WeightFormatError(path, f"{what} holds too many values (over {MAX_MARKS} , : [ {{)")
    try:
        value = json.loads(
            str(data, "utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
        _check(value)
    except RecursionError:
        raise WeightFormatError(path, f"{what} is nested too deeply") from None
    except ValueError as error:  # also JSONDecodeError, UnicodeDecodeError, integers too long
        raise WeightFormatError(path, f"{what} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise WeightFormatError(path, f"{what} must be a JSON object, found {type(value).__name__}")
    return value


def read_object(path: Path, what: str) -> dict[str, Any]:
    """Read and parse a small JSON file such as `config.json`; errors as in `parse_object`."""
    try:
        if not path.is_file():
            raise WeightFormatError(path, f"{what} is missing or not a regular file")
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise WeightFormatError(path, f"cannot be read: {error.strerror}") from None
    return parse_object(data, path, what)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key[:80]!r} appears twice")
            seen.add(key)
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check(value: Any) -> None:
    """Depth and lone surrogates, without recursion."""
    layer, depth = [value], 0
    while layer:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        below: list[Any] = []
        for item in layer:
            if isinstance(item, dict):
                below.extend(item.keys())
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, str):
                item.encode()  # UnicodeEncodeError (a ValueError) for a lone surrogate
        layer, depth = below, depth + 1
