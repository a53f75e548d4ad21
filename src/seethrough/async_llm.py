"""The front door for asyncio: one engine in a thread of its own, any number of callers.

llm = AsyncLLM("smollm2-135m-instruct")
async with llm.stream("Neural Bits Newsletter is", max_tokens=16) as stream:
    async for delta in stream:
        print(delta.text, end="")
await llm.close()
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from seethrough.engine.intake import Encoder
from seethrough.engine.jobs import Job
from seethrough.engine.load import LoadReport, Progress
from seethrough.engine.loop import EngineLoop
from seethrough.engine.metrics import EngineState
from seethrough.engine.outputs import Delta, RequestOutput
from seethrough.engine.prompts import ChatOptions, Message, Prompt, params_for
from seethrough.errors import EngineStoppedError
from seethrough.llm import LLM
from seethrough.sampling.params import SamplingParams
from seethrough.text.tokenizer import Tokenizer


class AsyncLLM:
    """A loaded model for many callers at once, on one event loop or several.

    Its arguments are those of `LLM`. Prompts are encoded in worker threads, so a long one delays
    nobody. A call that is cancelled ends its request within a step and frees its memory.
    """

    def __init__(
        self,
        model: str | Path = "smollm2-135m-instruct",
        *,
        defaults: SamplingParams | None = None,
        cache_dir: Path | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        llm = LLM(model, defaults=defaults, cache_dir=cache_dir, progress=progress, **settings)
        self._llm = llm
        self._bells = _Bells()
        self._loop = EngineLoop(llm.jobs, self._bells.ring, llm.rest)
        # Also when nobody closes it: at the latest when the interpreter ends.
        self._end = weakref.finalize(self, self._loop.stop)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._llm.tokenizer

    @property
    def report(self) -> LoadReport:
        """What loading found and chose."""
        return self._llm.report

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and output may have together."""
        return self._llm.max_model_len

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> RequestOutput:
        """Complete one prompt. Call it many times at once: the calls run as one batch.

        Raises:
            ParameterError, ContextLengthError, CapacityError: before anything runs.
            EngineStoppedError: the engine was closed, or a bug ended it.
        """
        return await _whole(self.stream(prompt, params, cache_salt=cache_salt, **sampling))

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        template: ChatOptions | None = None,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> RequestOutput:
        """Answer one conversation with the model's own template."""
        return await _whole(
            self.stream_chat(messages, params, template=template, cache_salt=cache_salt, **sampling)
        )

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> AsyncStream:
        """Complete one prompt, token by token: `async for` over the result.

        Leaving its `async with` block, or `close`, ends the request. Nothing runs before the first
        token is asked for.
        """
        (param,) = params_for(1, params, sampling)
        return self._stream(partial(self._llm.prompts.encode, prompt), param, cache_salt)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        template: ChatOptions | None = None,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> AsyncStream:
        """`chat`, token by token."""
        (param,) = params_for(1, params, sampling)
        return self._stream(
            partial(self._llm.prompts.render, messages, template), param, cache_salt
        )

    async def state(self) -> EngineState:
        """What runs and waits now, the blocks, and what was counted since loading."""
        return await asyncio.wrap_future(self._loop.call(lambda: self._llm.state))

    async def close(self) -> None:
        """End all requests, then the engine's thread; safe to call twice."""
        await asyncio.to_thread(self._end)
        self._llm.recorder.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _stream(self, encode: Encoder, param: SamplingParams, salt: str | None) -> AsyncStream:
        return AsyncStream(self, partial(self._llm.intake.prepare, encode, param, salt))


class AsyncStream:
    """The tokens of one prompt as they come. Iterate once."""

    def __init__(self, owner: AsyncLLM, prepare: Callable[[], Job]) -> None:
        self._owner = owner  # lives as long as its streams
        self._prepare = prepare
        self._jobs = owner._llm.jobs
        self._loop = owner._loop
        self._bells = owner._bells
        self._job: Job | None = None
        self._closed = False

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Delta:
        if self._job is None and self._closed:
            raise StopAsyncIteration
        try:
            job = self._job or await self._start()
            while not job.fresh and job.running and not self._closed:
                await self._bells.wait(job)
        except BaseException:  # a cancelled caller among them: nothing may be left running
            self._leave()
            raise
        if job.fresh:
            return job.fresh.popleft()
        self._leave()
        if self._loop.failure is not None and job.aborted:
            raise self._loop.stopped()
        raise StopAsyncIteration

    async def _start(self) -> Job:
        """Encode and check in a worker thread, then queue."""
        job = await asyncio.to_thread(self._prepare)
        self._job = job
        self._bells.hang(job)
        await asyncio.wrap_future(self._loop.call(partial(self._jobs.submit, job)))
        return job

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the request now, if it still runs, and wait until its memory is free."""
        ended = self._leave()
        if ended is not None:
            await asyncio.wrap_future(ended)

    def _leave(self) -> Future[None] | None:
        """Ask the engine to end the request; the future of that, the first time."""
        self._closed = True
        if self._job is None or not self._bells.take(self._job):
            return None
        try:
            return self._loop.call(partial(self._jobs.close, self._job))
        except EngineStoppedError:  # then it has ended every request
            return None

    def __del__(self) -> None:
        # The collector may call this anywhere: the job is only noted here.
        if self._job is not None and not self._closed:
            self._loop.abandon(self._job)
            self._bells.forget(self._job)

    def output(self) -> RequestOutput:
        """What is there so far.

        Raises:
            RuntimeError: nothing was asked for yet, so there is no request.
        """
        if self._job is None:
            raise RuntimeError("the stream has not been started: iterate over it first")
        return self._job.output()


class _Bells:
    """Wakes who waits for a job: one event each, rung on its own event loop."""

    def __init__(self) -> None:
        self._events: dict[Job, tuple[asyncio.AbstractEventLoop, asyncio.Event]] = {}

    def hang(self, job: Job) -> None:
        """From now on somebody on this event loop waits for the job."""
        self._events[job] = asyncio.get_running_loop(), asyncio.Event()

    def take(self, job: Job) -> bool:
        """The job is over for whoever waited; whether somebody did."""
        found = self._events.pop(job, None)
        if found is not None:
            _wake(found[0], [found[1]])
        return found is not None

    def forget(self, job: Job) -> None:
        """Nobody is there any more."""
        self._events.pop(job, None)

    async def wait(self, job: Job) -> None:
        """Until the engine has done something for the job."""
        _, event = self._events[job]
        await event.wait()
        event.clear()

    def ring(self, jobs: Sequence[Job]) -> None:
        """Called by the engine's thread: one wake-up per event loop, however many wait there."""
        waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        for job in jobs:
            found = self._events.get(job)  # its caller may just have left
            if found is not None:
                waiting.setdefault(found[0], []).append(found[1])
        for loop, events in waiting.items():
            _wake(loop, events)


def _wake(loop: asyncio.AbstractEventLoop, events: Sequence[asyncio.Event]) -> None:
    try:
        loop.call_soon_threadsafe(_set_all, events)
    except RuntimeError:
        if not loop.is_closed():
            raise
        # Whoever waited there is gone with it.


def _set_all(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        event.set()


async def _whole(stream: AsyncStream) -> RequestOutput:
    async with stream:
        async for _ in stream:
            pass
    return stream.output()
