"""Threads that run a step together: asleep between steps, in compiled code within one.

The caller is thread 0. A worker waits for work without using its core; inside a step it holds no
interpreter lock and meets the others at an atomic barrier only.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from time import perf_counter

from seethrough.kernels.cpu.compiled import Kernels
from seethrough.kernels.cpu.memory import aligned
from seethrough.kernels.cpu.record import COUNTER_BYTES

_Call = Callable[[int], None]


class Workers:
    """`count` threads, the caller's among them."""

    def __init__(self, count: int, kernels: Kernels, most_records: int) -> None:
        self.count = count
        self._run = kernels.callable("run_records", 6)
        self._sweep = kernels.callable("sweep_barriers", 3)
        self._barrier = aligned(128)
        self._counters = aligned(COUNTER_BYTES * most_records)
        self._queues: list[SimpleQueue[_Call | None]] = []
        weakref.finalize(self, _end, self._queues)
        for number in range(1, count):
            queue: SimpleQueue[_Call | None] = SimpleQueue()
            self._queues.append(queue)
            name = f"seethrough-worker-{number}"
            threading.Thread(target=_serve, args=(queue, number), name=name, daemon=True).start()

    @property
    def barrier(self) -> int:
        """Address of the barrier that a step's threads meet at."""
        return int(self._barrier.ctypes.data)

    @property
    def counters(self) -> int:
        """Address of the counters of work, one per record."""
        return int(self._counters.ctypes.data)

    def run(self, records: int, first: int, stop: int, step: int) -> None:
        """Run records first .. stop - 1 on all threads; returns when they are done."""
        self._together(lambda t: self._run(records, first, stop, step, t, self.count))

    def barrier_seconds(self, count: int = 20_000) -> float:
        """What one meeting of all threads takes."""
        self._together(lambda t: self._sweep(self.barrier, 100, self.count))
        started = perf_counter()
        self._together(lambda t: self._sweep(self.barrier, count, self.count))
        return (perf_counter() - started) / count

    def close(self) -> None:
        """Let the threads end; safe to call twice."""
        _end(self._queues)

    def _together(self, call: _Call) -> None:
        # All meet at a barrier at the end of compiled code, so nobody is left behind in it.
        for queue in self._queues:
            queue.put(call)
        call(0)


def _serve(queue: SimpleQueue[_Call | None], number: int) -> None:
    while (call := queue.get()) is not None:
        call(number)
        del call  # it holds what it works on; asleep, a worker keeps nothing alive


def _end(queues: list[SimpleQueue[_Call | None]]) -> None:
    while queues:
        queues.pop().put(None)
