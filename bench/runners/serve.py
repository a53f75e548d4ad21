"""How a runner talks: it loads its engine once, then answers one JSON line for each it reads.

Only the standard library is used here: every peer's own environment runs this file.

    {"work": "tg", "prompt": [ids], "n": 128}         decode n tokens after the prompt's own token
    {"work": "pp", "prompt": [ids]}                   prompt to first token
    {"work": "batch", "prompts": [[ids], ...], "n": 64}   all at once, n output tokens each
    {"work": "beside", "prompts": [[ids], ...], "prompt": [ids]}   the prompts decode; then the long
                                                          prompt comes, until its first token
    {"work": "logits", "prompt": [ids], "path": "x.npy"}  float32 [ids, vocabulary], where an engine
                                                          can say them

The answer is {"seconds": ...}. What counts as seconds: for `tg` from the first output token to the
last, for `pp` from the prompt to the first output token, for `batch` everything, for `beside` from
the long prompt to its first token; it comes with "gap_ms", the times between two tokens of those
that decode meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


class Engine(Protocol):
    """What a runner provides. `about` says version, build and choices of the engine."""

    about: dict[str, Any]

    def tg(self, prompt: list[int], n: int) -> float: ...

    def pp(self, prompt: list[int]) -> float: ...

    def batch(self, prompts: list[list[int]], n: int) -> float: ...


@runtime_checkable
class RunsBeside(Protocol):
    """An engine whose requests come and go while others run."""

    def beside(self, prompts: list[list[int]], prompt: list[int]) -> tuple[float, list[float]]: ...


@runtime_checkable
class SaysLogits(Protocol):
    """An engine that can also say the logits of every position of a prompt."""

    def logits(self, prompt: list[int], path: str) -> float: ...


@dataclass(frozen=True)
class Setup:
    """What a runner is told on its command line."""

    model: str
    threads: int
    context: int
    requests: int
    request_tokens: int
    dtype: str


def main(build: Callable[[Setup], Engine]) -> None:
    """Load, say that the engine is ready, and answer until standard input ends."""
    imported = time.monotonic()
    answers = _private_stdout()
    try:
        engine = build(_setup())
        _say(answers, {"ready": True, "imported_at": imported, **engine.about})
    except Exception as error:  # noqa: BLE001 - whatever it is, the reader is told and reports it
        _say(answers, _failure(error))
        sys.exit(1)
    for line in sys.stdin:
        try:
            answer = _answer(engine, json.loads(line))
        except Exception as error:  # noqa: BLE001 - one work that fails does not end the others
            answer = _failure(error)
        _say(answers, answer)


def _answer(engine: Engine, asked: dict[str, Any]) -> dict[str, Any]:
    if asked["work"] != "beside":
        return {"seconds": _seconds(engine, asked)}
    if not isinstance(engine, RunsBeside):
        raise ValueError("this engine takes all requests at once or none")
    seconds, gaps = engine.beside(asked["prompts"], asked["prompt"])
    gaps.sort()
    last = len(gaps) - 1
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        "seconds": seconds,
        "gap_ms": {name: gaps[round(share * last)] * 1e3 for name, share in shares.items()},
    }


def _seconds(engine: Engine, asked: dict[str, Any]) -> float:
    work = asked["work"]
    if work == "tg":
        return engine.tg(asked["prompt"], asked["n"])
    if work == "pp":
        return engine.pp(asked["prompt"])
    if work == "batch":
        return engine.batch(asked["prompts"], asked["n"])
    if work == "logits" and isinstance(engine, SaysLogits):
        return engine.logits(asked["prompt"], asked["path"])
    raise ValueError(f"unknown work {work!r}")


def _failure(error: Exception) -> dict[str, Any]:
    """The whole of it goes to the log, its last line to the reader."""
    traceback.print_exc()
    return {"error": f"{type(error).__name__}: {error}"}


def _setup() -> Setup:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bf16")
    for name in ("threads", "context", "requests", "request-tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return Setup(**vars(parser.parse_args()))


def _private_stdout() -> Any:
    """Keep standard output for answers; what an engine prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _say(answers: Any, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
