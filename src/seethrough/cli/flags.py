"""What a flag is: its name, its help in two languages, how its text is read, its environment twin.

`--max-model-len` has the twin `SEETHROUGH_MAX_MODEL_LEN`; a flag on the command line wins.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seethrough.stages import Language, Text


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. Without `convert` it is a switch, with a --no- form."""

    name: str
    help: Text
    convert: Callable[[str], Any] | None = None
    metavar: str = ""
    choices: tuple[str, ...] = ()
    repeat: bool = False

    @property
    def dest(self) -> str:
        """The attribute that holds its value; None where it was not given."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """Its environment twin."""
        return f"SEETHROUGH_{self.dest.upper()}"


def add_flag(parser: argparse.ArgumentParser, flag: Flag, language: Language) -> None:
    """Register a flag; its help names its environment twin."""
    words = f"{flag.help.pick(language)} [{flag.variable}]".replace("%", "%%")
    if flag.convert is None:
        action = argparse.BooleanOptionalAction
        parser.add_argument(f"--{flag.name}", action=action, default=None, help=words)
        return
    parser.add_argument(
        f"--{flag.name}",
        type=flag.convert,
        metavar=flag.metavar or None,
        choices=flag.choices or None,
        action="append" if flag.repeat else "store",
        default=None,
        help=words,
    )


def fill_from_environment(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    flags: Sequence[Flag],
    environment: Mapping[str, str],
) -> None:
    """Give flags that were not on the command line the value of their environment twin."""
    for flag in flags:
        given = environment.get(flag.variable)
        if given is None or getattr(arguments, flag.dest) is not None:
            continue
        try:
            value = _read(flag, given)
        except (ValueError, argparse.ArgumentTypeError) as error:
            parser.error(f"{flag.variable}={given!r}: {error}")
        setattr(arguments, flag.dest, value)


def _read(flag: Flag, given: str) -> Any:
    if flag.convert is None:
        return switch(given)
    if flag.repeat:
        return [flag.convert(item) for item in _items(given)]
    if flag.choices and given not in flag.choices:
        raise ValueError(f"choose from {', '.join(flag.choices)}")
    return flag.convert(given)


def _items(given: str) -> list[str]:
    """A JSON list of strings, or the whole text as the only item."""
    if given.startswith("["):
        items = json.loads(given)
        if not all(isinstance(item, str) for item in items):
            raise ValueError("a JSON list of strings is expected")
        return list(items)
    return [given]


def switch(given: str) -> bool:
    """1, true, yes, on; 0, false, no, off."""
    lowered = given.lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError("1 or 0 is expected")


def integer(given: str) -> int:
    """A whole number."""
    try:
        return int(given)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{given!r} is not a whole number") from None


def number(given: str) -> float:
    """A number."""
    try:
        return float(given)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{given!r} is not a number") from None


def text(given: str) -> str:
    """Any text."""
    return given


def folder(given: str) -> Path:
    """A directory; an empty text, which would be the one that we are in, is none."""
    if not given:
        raise argparse.ArgumentTypeError("a directory is expected")
    return Path(given)


def integers(given: str) -> list[int]:
    """Numbers with commas between them; a range such as 0-3 stands for 0,1,2,3."""
    numbers: list[int] = []
    for part in given.split(","):
        first, dash, last = part.strip().partition("-")
        if dash and first.isdigit() and last.isdigit():
            if int(last) - int(first) > 1_000_000:
                raise argparse.ArgumentTypeError(f"{part!r} is too long a range")
            numbers += range(int(first), int(last) + 1)
        else:
            numbers.append(integer(part.strip()))
    return numbers


def names(given: str) -> list[str]:
    """Words with commas between them."""
    return [part.strip() for part in given.split(",")]


def id_value(given: str) -> tuple[int, float]:
    """ID=VALUE."""
    token_id, equals, value = given.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{given!r}: ID=VALUE is expected")
    return integer(token_id), number(value)


def id_pair(given: str) -> tuple[int, int]:
    """POSITION=ID."""
    position, equals, token_id = given.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{given!r}: POSITION=ID is expected")
    return integer(position), integer(token_id)


def name_value(given: str) -> tuple[str, Any]:
    """NAME=VALUE; the value is read as JSON, or else as text."""
    name, equals, value = given.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{given!r}: NAME=VALUE is expected")
    return name.replace("-", "_"), json_or_text(value)


def json_or_text(value: str) -> Any:
    """A value as JSON has it, or the text as it is."""
    try:
        return json.loads(value)
    except ValueError:
        return value
