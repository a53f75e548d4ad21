"""An engine in its own process: start it, ask it, see what else the processor did meanwhile."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TICK = os.sysconf("SC_CLK_TCK")


class EngineError(Exception):
    """The engine could not be started, or could not do this work."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a run took.

    Attributes:
        others: how much of one core was used by anything but the engine while it ran: idle
            engines that are not idle, other programs, the host. A measurement with a busy
            neighbour is a worse one. None for a run too short for the clock that counts it.
        figures: what else the engine answered: groups of named figures.
    """

    seconds: float
    others: float | None = None
    figures: dict[str, dict[str, float]] = field(default_factory=dict)


class Child:
    """A runner, blocked on its standard input unless it was asked something."""

    def __init__(self, command: Sequence[str], log: Path, threads: int, timeout: float) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log, self._timeout = log, timeout
        counts = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        self.started = time.monotonic()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                env=os.environ | dict.fromkeys(counts, str(threads)),
            )
        self.about: dict[str, Any] = {}
        self._unread = b""

    @property
    def alive(self) -> bool:
        """Whether it can still be asked."""
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Read the engine's first line: what it is. Raises EngineError."""
        self.about = self.receive()
        self.about["load_s"] = time.monotonic() - self.started

    def ask(self, work: dict[str, Any]) -> Answer:
        """Have one work done. Raises EngineError."""
        if not self.alive:
            raise EngineError(self._why(f"ended earlier with code {self._process.returncode}"))
        busy, own, began = _busy_seconds(), self._own_seconds(), time.monotonic()
        self.send(work)
        told = self.receive()
        wall = time.monotonic() - began
        others = (_busy_seconds() - busy) - (self._own_seconds() - own)
        return Answer(
            float(told.pop("seconds")),
            None if wall < 10 / _TICK else max(0.0, others / wall),
            told,
        )

    def send(self, work: dict[str, Any]) -> None:
        """Ask without waiting; it may not be ready yet."""
        assert self._process.stdin is not None
        try:
            rest = memoryview(json.dumps(work).encode() + b"\n")
            while rest:
                rest = rest[self._process.stdin.write(rest) :]
        except OSError as error:  # it ended, and its log says why
            raise EngineError(self._why(str(error))) from None

    def stop(self) -> None:
        """End it: by the end of its input, or by force."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def receive(self) -> dict[str, Any]:
        """The next message. Raises EngineError, also for one that says so."""
        message: dict[str, Any] = json.loads(self._line())
        if "error" in message:
            raise EngineError(message["error"])
        return message

    def _line(self) -> bytes:
        """The next line; `select` and a buffered reader do not go together, so it has its own."""
        assert self._process.stdout is not None
        until = time.monotonic() + self._timeout
        while b"\n" not in self._unread:
            left = max(0.0, until - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                self._process.kill()
                raise EngineError(f"no answer within {self._timeout:.0f} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise EngineError(self._why(f"ended with code {self._process.wait()}"))
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _why(self, what: str) -> str:
        """What happened, with the last line of the log."""
        lines = self._log.read_text(errors="replace").split("\n")
        last = [line.strip() for line in lines if line.strip()][-1:]
        return ": ".join([what, *last]) + f" (log: {self._log})"

    def _own_seconds(self) -> float:
        """Processor time of all its threads."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / _TICK


def _busy_seconds() -> float:
    """Processor time of everything, the host's share (steal) included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = (
        int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICK
