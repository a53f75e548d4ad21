"""How a runner talks: it loads its engine once, then answers one JSON line for each it reads.

Only the standard library is used here: every peer's own environment runs this file.

    {"work": "tg", "prompt": [ids], "n": 128}         decode n tokens after the prompt's own token
    {"work": "pp", "prompt": [ids]}                   prompt to first token
    {"work": "batch", "prompts": [[ids], ...], "n": 64}   all at once, n output tokens each
    {"work": "beside", "prompts": [[ids], ...], "n": 512, "prompt": [ids]}   the prompts decode, up
                                                          to n tokens each, when the prompt arrives
    {"work": "logits", "prompt": [ids], "path": "x.npy"}  float32 [ids, vocabulary], where an engine
                                                          can say them

The answer is {"seconds": ...}. What counts as seconds: for `tg` from the first output token to the
last, for `pp` from the prompt to the first output token, for `batch` everything, for `beside` from
the arrival of the prompt to its first token. Besides seconds an answer may have groups of figures;
`beside` has

    "inter_token_ms": {"p50", "p99", "max", "count"}   times from a token to the next of the same
                                                       request, where any part of them lies between
                                                       the prompt's arrival and its first token
    "step_ms": {"rows", "p50", "count"}                the steps of the most rows in that time,
                                                       where an engine can say how many it computed
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

_DECODED = 4  # tokens that each request has before the long prompt arrives


class Engine(Protocol):
    """What a runner provides. `about` says version, build and choices of the engine."""

    about: dict[str, Any]

    def tg(self, prompt: list[int], n: int) -> float: ...

    def pp(self, prompt: list[int]) -> float: ...

    def batch(self, prompts: list[list[int]], n: int) -> float: ...


@runtime_checkable
class SaysLogits(Protocol):
    """An engine that can also say the logits of every position of a prompt."""

    def logits(self, prompt: list[int], path: str) -> float: ...


@dataclass(frozen=True)
class Step:
    """What a step gave.

    Attributes:
        tokens: for each token that came, the name of its request.
        rows: tokens that the step computed, where the engine says so.
    """

    tokens: list[int]
    rows: int | None = None


@runtime_checkable
class Stepped(Protocol):
    """An engine that takes requests while others run, and lets itself be stepped.

    `add` queues a request under a name, `step` computes one step, `drop` ends every request.
    """

    def add(self, name: int, prompt: list[int], n: int) -> None: ...

    def step(self) -> Step: ...

    def drop(self) -> None: ...


@dataclass(frozen=True)
class Setup:
    """What a runner is told on its command line.

    Attributes:
        context: tokens of the longest request.
        requests, request_tokens: how many at once, and tokens of each, where all come together.
        beside, beside_tokens: how many decode beside a prompt that fills the context, and tokens of
            each; 0 where that is not asked for.
    """

    model: str
    threads: int
    context: int
    requests: int
    request_tokens: int
    dtype: str
    beside: int = 0
    beside_tokens: int = 0


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


class _Watch:
    """Steps an engine, and notes when the tokens of each request came.

    Attributes:
        last: when each request that decodes had its newest token.
        gaps: times between two tokens of one request, from the long prompt's arrival on.
        steps: rows and seconds of the steps until the long prompt's first token.
        first: when that came.
    """

    def __init__(self, engine: Stepped, requests: int, n: int) -> None:
        self._engine, self._long, self._n = engine, requests, n
        self._counts = [0] * requests
        self.last = [0.0] * requests
        self.forget()

    def forget(self) -> None:
        """What comes now is the first that counts."""
        self.gaps: list[float] = []
        self.steps: list[tuple[int | None, float]] = []
        self.first: float | None = None

    @property
    def decoded(self) -> int:
        """Tokens that every request has at least."""
        return min(self._counts)

    def step(self) -> None:
        """One step. Raises RuntimeError where a request has come to its end."""
        if max(self._counts) >= self._n:
            raise RuntimeError(f"a request had all its {self._n} tokens before the prompt was done")
        began = perf_counter()
        done = self._engine.step()
        now = perf_counter()
        if self.first is None:
            self.steps.append((done.rows, now - began))
            if self._long in done.tokens:
                self.first = now
        for name in done.tokens:
            if name == self._long:
                continue
            if self.first is None or self.last[name] < self.first:
                self.gaps.append(now - self.last[name])
            self.last[name] = now
            self._counts[name] += 1


def beside(
    engine: Stepped, prompts: Sequence[list[int]], n: int, prompt: list[int]
) -> dict[str, Any]:
    """Have the prompts decode, let the long one arrive, and time the tokens until its first.

    One way to measure for every engine. A request that pauses until the long prompt is done is not
    let off: its wait counts in full, though it ends later.
    """
    watch = _Watch(engine, len(prompts), n)
    try:
        for name, ids in enumerate(prompts):
            engine.add(name, ids, n)
        while watch.decoded < _DECODED:
            watch.step()
        watch.forget()
        arrived = perf_counter()
        engine.add(len(prompts), prompt, 1)
        while watch.first is None or min(watch.last) < watch.first:
            watch.step()
    finally:
        engine.drop()
    gaps = watch.gaps
    answer: dict[str, Any] = {
        "seconds": watch.first - arrived,
        "inter_token_ms": {
            "p50": percentile(gaps, 50) * 1e3,
            "p99": percentile(gaps, 99) * 1e3,
            "max": max(gaps) * 1e3,
            "count": len(gaps),
        },
    }
    most = max((rows for rows, _ in watch.steps if rows is not None), default=None)
    if most is not None:
        full = [seconds for rows, seconds in watch.steps if rows == most]
        answer["step_ms"] = {"rows": most, "p50": median(full) * 1e3, "count": len(full)}
    return answer


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many percent do not exceed, between two values if need be (as NumPy)."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _answer(engine: Engine, asked: dict[str, Any]) -> dict[str, Any]:
    if asked["work"] != "beside":
        return {"seconds": _seconds(engine, asked)}
    if not isinstance(engine, Stepped):
        raise ValueError("no request can join while others run")
    return beside(engine, asked["prompts"], asked["n"], asked["prompt"])


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
    for name in ("beside", "beside-tokens"):
        parser.add_argument(f"--{name}", type=int, default=0)
    return Setup(**vars(parser.parse_args()))


def _private_stdout() -> Any:
    """Keep standard output for answers; what an engine prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _say(answers: Any, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
