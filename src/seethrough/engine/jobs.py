"""Jobs: a prompt with its samples, and who gets what a step gave. One thread at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from seethrough.engine.engine import Engine, StepTracer
from seethrough.engine.outputs import Delta, RequestOutput, request_output
from seethrough.engine.request import Request


class Job:
    """One prompt, its samples, and the pieces that nobody has taken yet.

    Attributes:
        served: whether it is what somebody asked for, and not a look at how an answer comes to be.
    """

    def __init__(self, request_id: str, prompt: str | None, *, served: bool = True) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.served = served
        self.requests: list[Request] = []
        self.fresh: deque[Delta] = deque()

    @property
    def running(self) -> bool:
        """Whether any sample is not finished."""
        return any(request.finish_reason is None for request in self.requests)

    @property
    def aborted(self) -> bool:
        """Whether any sample was ended from outside."""
        return any(request.finish_reason == "abort" for request in self.requests)

    def output(self) -> RequestOutput:
        """What is there so far."""
        return request_output(self.request_id, self.prompt, self.requests)


class Jobs:
    """The jobs of one engine. `finished` is told of every served job that ran and has ended."""

    def __init__(self, engine: Engine, finished: Callable[[Job], None] = lambda job: None) -> None:
        self._engine = engine
        self._finished = finished
        self._open: dict[str, Job] = {}
        self._abandoned: deque[Job] = deque()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def busy(self) -> bool:
        """Whether the engine has anything to do, once the abandoned are gone."""
        self.end_abandoned()
        return self._engine.busy

    def submit(self, job: Job) -> None:
        """Queue all samples, or none.

        Raises:
            CapacityError: the whole pool could not hold one of them.
        """
        self.end_abandoned()
        self._open[job.request_id] = job
        try:
            for request in job.requests:
                self._engine.add(request)
        except BaseException:
            self.close(job)
            raise

    def step(self, tracer: StepTracer | None = None) -> list[Job]:
        """One engine step; what it gave goes to the jobs that asked for it, which are returned."""
        self.end_abandoned()
        given: dict[str, Job] = {}
        for delta in self._engine.step(tracer):
            job = given[delta.request_id] = self._open[delta.request_id]
            job.fresh.append(delta)
            if delta.finish_reason is not None and not job.running:
                self._note(job)
        return list(given.values())

    def _note(self, job: Job) -> None:
        if job.served and any(request.times.first_scheduled for request in job.requests):
            self._finished(job)

    def close(self, job: Job) -> None:
        """End what still runs, and forget the job; safe to call twice."""
        ended = job.running
        for request in job.requests:
            self._engine.abort(request)
        if self._open.pop(job.request_id, None) is not None and ended:
            self._note(job)

    def close_all(self) -> list[Job]:
        """Close every job; returns those that were open."""
        closed = list(self._open.values())
        for job in closed:
            self.close(job)
        return closed

    def abandon(self, job: Job) -> None:
        """Note that nobody wants the job any more; may be called in the middle of a step."""
        self._abandoned.append(job)

    def end_abandoned(self) -> None:
        """Close the jobs that were abandoned."""
        while self._abandoned:
            self.close(self._abandoned.popleft())
