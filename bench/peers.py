"""Compares seethrough with other engines: the same work, in turns, in the same minutes.

    bench/peers.py --install llama.cpp
    bench/peers.py --peers llama.cpp --work tg pp batch start
    bench/peers.py --peers llama.cpp vllm --work batch beside --batch 16 64

Each engine is one process that loads its model once. A round asks every engine for the same work,
one after the other, so that whatever slows the machine slows all of them. NAME@FILE lets a peer
run another file than ours (its own best format). What cannot be run is named with the reason. The
last line is one JSON object with every run.

`beside` is what users feel when somebody else sends a long prompt: requests decode, the prompt
arrives, and the times between their tokens are taken until the prompt has its own first token.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from child import Answer, Child, EngineError
from installed import OURS, PEERS, RUNNERS, default_peers_dir, install, missing, python_of
from work import KINDS, Pair, Workload, choose, pair

from seethrough.config import Backend, EngineConfig
from seethrough.engine.load import choose_sizes
from seethrough.engine.measure import Limits, limits
from seethrough.model.load import ModelWeights, understand
from seethrough.weights.catalog import DEFAULT_MODEL
from seethrough.weights.checkpoint import open_checkpoint
from seethrough.weights.files import resolve_model

_SETTLE = 0.2  # seconds between turns: OpenMP threads spin for a moment after their work

_GAPS = ("p50", "p99", "max")
_WARM_UP = (Workload("pp", 64), Workload("tg", 16, 8))


@dataclass(slots=True)
class Engine:
    """One that takes part: what to start, and the process once it runs."""

    label: str
    name: str
    command: list[str]
    log: Path
    child: Child | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """How ours runs, as `limits` wants to know it."""

    threads: int
    kv_bytes_per_token: int
    backend: Backend = "cpu"


@dataclass(slots=True)
class Result:
    """All runs of one workload: seconds by engine, in rounds.

    Attributes:
        limit: tokens a second that this machine allows for our file, measured just before.
        figures: what else the engines answered: by group, then by engine, in rounds.
    """

    work: Workload
    limit: float | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    others: dict[str, list[float]] = field(default_factory=dict)
    figures: dict[str, dict[str, list[dict[str, float]]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Session:
    """What holds for the whole comparison."""

    threads: int
    timeout: float
    rounds: int
    vocab: int


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Raises SystemExit with a message for what makes no sense."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ", ".join(PEERS)
    parser.add_argument("--install", nargs="+", choices=PEERS, metavar="NAME", help=known)
    parser.add_argument("--peers-dir", type=Path, default=default_peers_dir())
    parser.add_argument(
        "--peers", nargs="*", default=list(PEERS), metavar="NAME[@FILE]", help=known
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF file or a pulled model")
    parser.add_argument("--work", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--tg", type=_count, default=128, help="tokens to decode")
    parser.add_argument("--depths", type=_count, nargs="+", default=[128, 1024, 4096, 8192])
    parser.add_argument("--pp", type=_count, nargs="+", default=[128, 512, 4096])
    parser.add_argument("--batch", type=_count, nargs="+", default=[16], help="requests at once")
    parser.add_argument("--batch-in", type=_count, default=128)
    parser.add_argument("--batch-out", type=_count, default=64)
    parser.add_argument("--beside", type=_count, default=8, help="requests that decode beside …")
    parser.add_argument("--beside-prompt", type=_count, default=4000, help="… a prompt as long")
    parser.add_argument("--rounds", type=_count, default=5)
    parser.add_argument("--threads", type=_count, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--timeout", type=_count, default=900, help="seconds for one answer")
    asked = parser.parse_args(arguments)
    for label in asked.peers:
        if label.partition("@")[0] not in PEERS:
            parser.error(f"unknown peer {label!r}; known: {known}")
    return asked


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("1 or more is expected")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, or compare."""
    asked = parse(arguments)
    if asked.install:
        return _install_all(asked.install, asked.peers_dir)
    files = resolve_model(asked.model)
    weights = understand(open_checkpoint(files))
    works = _workloads(asked, weights)
    kv = choose_sizes(weights, EngineConfig(), 1 << 62).kv
    setup = Setup(asked.threads, kv.bytes_per_token)
    found = limits(weights, setup, works[0].prompt, works[0].prompt)
    _print_limits(found, works[0].prompt)
    engines, unavailable = _prepare(asked, files.weights[0], works)
    session = Session(asked.threads, asked.timeout, asked.rounds, weights.spec.vocab_size)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no engine is left behind
    try:
        unavailable |= _start_all(engines, session)
        _print_engines(engines, unavailable)
        results = [_measure(engines, work, session, _limit(work, weights, setup)) for work in works]
    finally:
        for engine in engines:
            if engine.child is not None:
                engine.child.stop()
    print(json.dumps(_to_json(asked, found, engines, unavailable, results)))
    return 0 if any(engine.name == OURS and engine.child for engine in engines) else 1


def _install_all(names: Sequence[str], peers_dir: Path) -> int:
    reasons = {name: install(name, peers_dir) for name in dict.fromkeys(names)}
    for name, reason in reasons.items():
        print(f"{name}: {reason or 'installed'}")
    return int(any(reasons.values()))


def _workloads(asked: argparse.Namespace, weights: ModelWeights) -> list[Workload]:
    return choose(
        asked.work,
        context=weights.spec.max_positions,
        tg=asked.tg,
        depths=asked.depths,
        pp=asked.pp,
        batch=(asked.batch, asked.batch_in, asked.batch_out),
        beside=(asked.beside, asked.beside_prompt),
    )


# ---------------------------------------------------------------------- starting


def _prepare(
    asked: argparse.Namespace, model: Path, works: Sequence[Workload]
) -> tuple[list[Engine], dict[str, str]]:
    """The engines that can be tried, ours first, and why the others cannot."""
    engines: list[Engine] = []
    unavailable: dict[str, str] = {}
    for label in dict.fromkeys([OURS, *asked.peers]):
        name, _, other = label.partition("@")
        try:
            reason = None if name == OURS else missing(name, asked.peers_dir)
            if reason is None:
                file = Path(other) if other else model
                command = _command(name, file, asked, works)
                engines.append(Engine(label, name, command, _log(asked.peers_dir, label)))
                continue
        except (OSError, ValueError) as error:  # a file that is not there or cannot be unpacked
            reason = str(error)
        unavailable[label] = reason
    return engines, unavailable


def _command(
    name: str, file: Path, asked: argparse.Namespace, works: Sequence[Workload]
) -> list[str]:
    """How to start a runner. All engines get the same context, no longer than is needed."""
    peer = PEERS.get(name)
    if not file.exists():
        raise ValueError(f"{file}: no such file")
    if peer is not None and peer.reads == "folder":
        from folder import unpacked

        file = unpacked(file, asked.peers_dir / "models")
    runner = peer.runner if peer else "run_seethrough.py"
    batch = [work for work in works if work.kind == "batch"]
    beside = [work for work in works if work.kind == "beside"]
    return [
        str(python_of(name, asked.peers_dir)),
        str(RUNNERS / runner),
        f"--model={file}",
        f"--threads={asked.threads}",
        f"--context={max(work.length for work in (*works, *_WARM_UP))}",
        f"--requests={max([work.requests for work in batch], default=1)}",
        f"--request-tokens={max([work.length for work in batch], default=256)}",
        f"--beside={max([work.requests for work in beside], default=0)}",
        f"--beside-tokens={max([work.decoding_length for work in beside], default=0)}",
        f"--dtype={peer.dtype if peer else 'bf16'}",
    ]


def _log(peers_dir: Path, label: str) -> Path:
    return peers_dir / "logs" / f"{label.replace('/', '_')}.log"


def _start_all(engines: Sequence[Engine], session: Session) -> dict[str, str]:
    """Load one after the other, and let each do a little work; the reasons of those that fail."""
    failed: dict[str, str] = {}
    for engine in engines:
        print(f"loading {engine.label} …", file=sys.stderr, flush=True)
        child = Child(engine.command, engine.log, session.threads, session.timeout)
        try:
            child.wait_ready()
            for work in _WARM_UP:
                child.ask(work.ask(0, session.vocab))
        except EngineError as error:
            failed[engine.label] = str(error)
            child.stop()
        else:
            engine.child = child
    return failed


# ---------------------------------------------------------------------- measuring


def _limit(work: Workload, weights: ModelWeights, setup: Setup) -> float | None:
    """What the machine allows at this moment."""
    if work.kind in ("batch", "beside"):
        return None
    found = limits(weights, setup, work.prompt + work.n // 2, work.prompt)
    return found.tg_tok_s if work.kind == "tg" else found.pp_tok_s


def _measure(
    engines: Sequence[Engine], work: Workload, session: Session, limit: float | None = None
) -> Result:
    """All rounds of one workload, and its lines of the table.

    One more round goes first and is not counted: memory is touched for the first time in it, code
    is compiled, files come into the page cache.
    """
    result = Result(work, limit)
    running = [engine for engine in engines if engine.child is not None]
    for number in range(session.rounds + 1):
        for engine in running:
            if engine.label not in result.failed:
                _turn(engine, number, result, session)
    _print_result(result)
    return result


def _turn(engine: Engine, number: int, result: Result, session: Session) -> None:
    """One engine's run in one round. A failure takes it out of this workload."""
    ask = result.work.ask(1 + number, session.vocab)
    assert engine.child is not None
    time.sleep(_SETTLE)
    try:
        if result.work.kind == "start":
            answer = Answer(_start_once(engine, ask, session))
        else:
            answer = engine.child.ask(ask)
    except EngineError as error:
        result.failed[engine.label] = str(error)
        for runs in (result.seconds, *result.figures.values()):
            runs.pop(engine.label, None)
        return
    if number == 0:
        return
    result.seconds.setdefault(engine.label, []).append(answer.seconds)
    if answer.others is not None:
        result.others.setdefault(engine.label, []).append(answer.others)
    for group, figures in answer.figures.items():
        result.figures.setdefault(group, {}).setdefault(engine.label, []).append(figures)


def _start_once(engine: Engine, ask: dict[str, Any], session: Session) -> float:
    """From starting a process to its first token."""
    log = engine.log.with_suffix(".start.log")
    child = Child(engine.command, log, session.threads, session.timeout)
    try:
        child.send(ask)
        child.wait_ready()
        child.receive()
        arrived = time.monotonic()
    finally:
        child.stop()
    peer = PEERS.get(engine.name)
    if peer is not None and not peer.own_python:
        return arrived - float(child.about["imported_at"])
    return arrived - child.started


# ---------------------------------------------------------------------- telling


def _print_limits(found: Limits, depth: int) -> None:
    print(
        f"limits of this machine, now: reads {found.read_gb_s:.1f} GB/s, so {found.tg_tok_s:.1f} "
        f"tok/s decoding one request of our file at depth {depth}; multiplies the file's blocks at "
        f"{found.gop_s:.0f} GOP/s, so {found.pp_tok_s:.0f} tok/s of a prompt as long",
        flush=True,
    )


def _print_engines(engines: Sequence[Engine], unavailable: dict[str, str]) -> None:
    for engine in engines:
        if engine.child is not None:
            about = engine.child.about
            print(f"{engine.label}: {about['version']}; {about['build']}")
    for label, reason in unavailable.items():
        print(f"{label}: cannot be measured: {reason}")
    sys.stdout.flush()


def _print_result(result: Result) -> None:
    """One block of the table. `others` is the worst run: one is enough to spoil a spread."""
    work, ours = result.work, result.seconds.get(OURS)
    worst = max((max(shares) for shares in result.others.values()), default=None)
    note = "" if worst is None else f"   (others used up to {worst:.0%} of a core)"
    print(f"\n{work.name}{note}")
    for label, seconds in result.seconds.items():
        line = f"  {label:<28} {work.figure(statistics.median(seconds)):>14}"
        if label == OURS and result.limit is not None and work.tokens is not None:
            share = work.tokens / statistics.median(seconds) / result.limit
            line += f"   {share:.0%} of the limit ({result.limit:.0f} tok/s)"
        if ours is not None and label != OURS:
            found = pair(ours, seconds)
            line += f"   ours is {found.ratio:.2f} × ({found.low:.2f} … {found.high:.2f})"
        print(line)
        _print_figures(result, label)
    for label, reason in result.failed.items():
        print(f"  {label:<28} failed: {reason}")
    sys.stdout.flush()


def _print_figures(result: Result, label: str) -> None:
    """The times between tokens, and what a step took: a second line where they were measured."""
    told = [
        f"{name} {statistics.median(runs):.1f} ms"
        + ("" if found is None else f" ({found.ratio:.2f} ×)")
        for name, runs, found in _gaps(result, label)
    ]
    if not told:
        return
    line = f"    from token to token: {', '.join(told)}"
    steps = result.figures.get("step_ms", {}).get(label)
    if steps is not None:
        rows, step = (statistics.median(run[name] for run in steps) for name in ("rows", "p50"))
        line += f"; a step of {rows:.0f} rows {step:.1f} ms"
    print(line)


def _gaps(result: Result, label: str) -> Iterator[tuple[str, list[float], Pair | None]]:
    """Each figure of the times between tokens: its name, its runs, and ours against them."""
    runs = result.figures.get("inter_token_ms", {})
    for name in _GAPS if label in runs else ():
        theirs = [run[name] for run in runs[label]]
        ours = [run[name] for run in runs.get(OURS, [])]
        yield name, theirs, pair(ours, theirs) if ours and label != OURS else None


def _to_json(
    asked: argparse.Namespace,
    found: Limits,
    engines: Sequence[Engine],
    unavailable: dict[str, str],
    results: Sequence[Result],
) -> dict[str, Any]:
    """Everything, each single run included."""
    return {
        "model": asked.model,
        "threads": asked.threads,
        "rounds": asked.rounds,
        "limits": asdict(found),
        "engines": {e.label: e.child.about for e in engines if e.child is not None},
        "unavailable": unavailable,
        "workloads": [_result_json(result) for result in results],
    }


def _result_json(result: Result) -> dict[str, Any]:
    ours = result.seconds.get(OURS)
    return {
        "name": result.work.name,
        **asdict(result.work),
        "limit_tok_s": result.limit,
        "seconds": result.seconds,
        "median": {label: statistics.median(all_) for label, all_ in result.seconds.items()},
        "ours_over_peer": {
            label: asdict(pair(ours, seconds))
            for label, seconds in result.seconds.items()
            if ours is not None and label != OURS
        },
        "figures": result.figures,
        "figures_median": {
            group: {label: _medians(runs) for label, runs in by_label.items()}
            for group, by_label in result.figures.items()
        },
        "inter_token_ours_over_peer": {
            label: {
                name: asdict(found) for name, _, found in _gaps(result, label) if found is not None
            }
            for label in result.figures.get("inter_token_ms", {})
            if ours is not None and label != OURS
        },
        "others": result.others,
        "failed": result.failed,
    }


def _medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


if __name__ == "__main__":
    sys.exit(main())
