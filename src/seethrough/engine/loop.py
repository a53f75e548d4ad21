"""Steps an engine in a thread of its own while there is work; everybody else sends it calls.

The engine and its jobs belong to that thread alone. A call runs between two steps, so an abort
takes effect within a step, also between the chunks of a long prompt.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from seethrough.engine.jobs import Job, Jobs
from seethrough.errors import EngineStoppedError

T = TypeVar("T")
_QUIET = 1.0  # seconds
Notify = Callable[[list[Job]], None]


class EngineLoop:
    """The thread.

    Args:
        jobs: not to be touched by anybody else from now on.
        notify: called in the thread after every step with the jobs that it gave something, and
            with all open jobs when the thread ends.
        idle: called in the thread when there was nothing to do for a second, once.
    """

    def __init__(self, jobs: Jobs, notify: Notify, idle: Callable[[], None]) -> None:
        self._jobs = jobs
        self._notify = notify
        self._idle = idle
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wanted = threading.Condition()
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="seethrough-engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread, if it was not `stop`."""
        return self._failure

    @property
    def alive(self) -> bool:
        """Whether calls are still answered."""
        return not self._stopping and self._failure is None

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run something between two steps; the future has its result or what it raised.

        Raises:
            EngineStoppedError: the thread has ended.
        """
        future: Future[T] = Future()
        with self._wanted:
            if not self.alive:
                raise self.stopped()
            self._calls.append((work, future))
            self._wanted.notify()
        return future

    def abandon(self, job: Job) -> None:
        """End a job that nobody wants any more, soon; any thread may call this at any moment."""
        self._jobs.abandon(job)
        with self._wanted:
            self._wanted.notify()

    def stop(self) -> None:
        """End every job and the thread; waits for the step that runs. Safe to call twice."""
        with self._wanted:
            self._stopping = True
            self._wanted.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def stopped(self) -> EngineStoppedError:
        """Why no call is answered any more."""
        return EngineStoppedError(self._failure)

    def _run(self) -> None:
        try:
            while self._wait():
                self._answer()
                if self._jobs.busy:
                    self._notify(self._jobs.step())
        except BaseException as error:  # noqa: BLE001 - a bug; every caller is told, none may hang
            self._failure = error
        self._end()

    def _wait(self) -> bool:
        """Wait until there is something to do; False when it is time to end."""
        patience: float | None = _QUIET
        while True:
            with self._wanted:
                if self._wanted.wait_for(self._due, patience):
                    return not self._stopping
            self._idle()  # without the lock: nobody who calls waits for it
            patience = None

    def _due(self) -> bool:
        return self._stopping or bool(self._calls) or self._jobs.busy

    def _answer(self) -> None:
        while self._calls:
            work, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                future.set_exception(error)

    def _end(self) -> None:
        with self._wanted:
            self._stopping = True
            calls, self._calls = list(self._calls), deque()
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(self.stopped())
        self._notify(self._jobs.close_all())
