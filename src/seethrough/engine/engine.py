"""The autoregressive loop (S13): admit, batch, run, sample, append, until every request is done.

    step = schedule -> build_batch -> run (S4 to S9) -> sample (S10 to S12) -> append (S13)

Knows ids, blocks and parameters; text enters and leaves through the front door (`llm.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from seethrough.config import EngineConfig
from seethrough.engine.batch import Scheduled, build_batch
from seethrough.engine.outputs import Delta, with_text
from seethrough.engine.request import Request
from seethrough.errors import SeethroughError
from seethrough.kernels.batch import ForwardBatch
from seethrough.kv.check import check_integrity
from seethrough.kv.pool import KVPool
from seethrough.model.run import Model, OpTracer
from seethrough.sampling.logprobs import prompt_logprobs
from seethrough.sampling.ops import NUMPY, SamplingOps
from seethrough.sampling.record import SamplingRecord
from seethrough.sampling.sampler import Sampled, sample
from seethrough.text.tokenizer import Tokenizer

F32 = NDArray[np.float32]


class StepTracer(OpTracer, Protocol):
    """What the engine shows to a tracer, besides every operation."""

    def begin_step(self, batch: ForwardBatch, pool: KVPool) -> None:
        """Called before the operations of a step."""
        ...

    def new_record(self) -> SamplingRecord | None:
        """Where the sampler notes its steps, or None."""
        ...

    def token_done(
        self, sampled: Sampled, record: SamplingRecord | None, text: str, seconds: float
    ) -> None:
        """Called when a token was chosen; `seconds` is what its text took."""
        ...


class Engine:
    """Runs requests over one program and one KV pool. Not thread-safe: one caller steps it."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        tokenizer: Tokenizer,
        config: EngineConfig,
        sampling: SamplingOps[Any] = NUMPY,
    ) -> None:
        self.model = model
        self.pool = pool
        self.tokenizer = tokenizer
        self._sampling = sampling
        self._budget = config.max_num_batched_tokens
        # Every running request gets at least one row in every step.
        self._most_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._waiting or self._running)

    @property
    def requests(self) -> Iterator[Request]:
        """All requests that are not finished."""
        yield from self._running
        yield from self._waiting

    def add(self, request: Request) -> None:
        """Queue a request; CapacityError at once if the whole pool could not hold it."""
        self.pool.require(request.positions_needed)
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request now, wherever it is; it keeps the text that it has."""
        if request.finish_reason is None:
            request.finish("abort")
            self._drop_finished()

    def step(self, tracer: StepTracer | None = None) -> Iterator[Delta]:
        """One step of the loop; gives what it added to each request as soon as it is added.

        So an interrupt in the middle loses nothing: who was not reached is computed again.
        """
        scheduled = self._schedule()
        if not scheduled:
            return
        batch = build_batch(scheduled)
        if tracer is not None:
            tracer.begin_step(batch, self.pool)
        logits = self.model.run(batch, self.pool, tracer)  # [R, V]
        row = 0
        try:
            for item in scheduled:
                count = len(item.logit_positions)
                yield self._advance(item, logits[row : row + count], tracer)
                row += count
        finally:
            self._drop_finished()

    def check(self) -> None:
        """Check the books of the KV pool."""
        check_integrity(self.pool, (request.table for request in self.requests))

    def _schedule(self) -> list[Scheduled]:
        """Decodes first, then as much prefill as the token budget holds, in order of arrival."""
        self._admit()
        budget = self._budget
        scheduled = []
        now = perf_counter()
        for request in sorted(self._running, key=lambda r: r.remaining > 1):
            take = min(request.remaining, budget)
            if take == 0:
                continue
            budget -= take
            request.times.first_scheduled = request.times.first_scheduled or now
            start = request.num_computed
            scheduled.append(Scheduled(request, start, start + take))
        return scheduled

    def _admit(self) -> None:
        """Start waiting requests in order while all blocks that they can ever need are free."""
        while self._waiting and len(self._running) < self._most_running:
            request = self._waiting[0]
            if self.pool.blocks_for(request.positions_needed) > self.pool.free_blocks:
                return
            request.table.reserve(request.positions_needed)
            self._running.append(self._waiting.popleft())

    def _advance(self, item: Scheduled, logits: F32, tracer: StepTracer | None) -> Delta:
        """Note what was computed and, at the end of the known tokens, choose the next one."""
        request = item.request
        before = len(request.output_ids)
        try:
            if item.scores_prompt:
                self._score_prompt(item, logits)
            text = self._choose(request, logits[-1], tracer) if item.samples else ""
        except SeethroughError as error:  # this request ends; its neighbours do not notice
            request.error = error
            text = request.finish("error")
        # Last: if an interrupt cuts this short, the rows are computed again, and nothing hangs.
        request.num_computed = item.stop
        return self._delta(request, text, before)

    def _score_prompt(self, item: Scheduled, logits: F32) -> None:
        """Log-probabilities of the prompt tokens that these rows predict."""
        request, k = item.request, item.request.params.prompt_logprobs
        if k is None:
            return
        if item.start == 0:
            request.prompt_logprobs.append(None)  # nothing predicts the first token
        targets = request.prompt_ids[item.start + 1 : item.stop + 1]
        entries = prompt_logprobs(logits[: len(targets)], targets, k, self._sampling)
        request.prompt_logprobs += [with_text(entry, self.tokenizer) for entry in entries]

    def _choose(self, request: Request, logits: F32, tracer: StepTracer | None) -> str:
        """S10 to S13 for one request; returns its new text."""
        if request.max_tokens == 0:
            return request.finish("length")
        record = None if tracer is None else tracer.new_record()
        index = len(request.output_ids)
        sampled = sample(
            logits,
            request.params,
            request.history,
            request.bans,
            output_index=index,
            sample_index=request.sample_index,
            forced=request.forced.get(index),
            record=record,
            ops=self._sampling,
        )
        started = perf_counter()
        text = self._append(request, sampled)
        if tracer is not None:
            tracer.token_done(sampled, record, text, perf_counter() - started)
        return text

    def _append(self, request: Request, sampled: Sampled) -> str:
        """The token joins the sequence, or ends it; returns the text that became final."""
        token_id, params = sampled.token_id, request.params
        request.output_ids.append(token_id)
        if sampled.logprobs is not None:
            request.logprobs.append(with_text(sampled.logprobs, self.tokenizer))
        ends = token_id in request.end_ids and not params.ignore_eos
        text, stop = "", None
        if ends or token_id in params.stop_token_ids:
            if params.include_stop_str_in_output:
                text, _ = request.text.push(token_id, armed=False)
            text += request.finish("stop", token_id)
        else:
            armed = len(request.output_ids) >= params.min_tokens
            text, stop = request.text.push(token_id, armed=armed)
            if stop is not None:
                text += request.finish("stop", stop)
            elif len(request.output_ids) >= request.max_tokens:
                text += request.finish("length")
        request.times.last_token = perf_counter()
        request.times.first_token = request.times.first_token or request.times.last_token
        return text

    def _delta(self, request: Request, text: str, before: int) -> Delta:
        scored = request.params.logprobs is not None
        return Delta(
            request_id=request.request_id,
            index=request.sample_index,
            text=text,
            token_ids=request.output_ids[before:],
            logprobs=request.logprobs[before:] if scored else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )

    def _drop_finished(self) -> None:
        self._running = [r for r in self._running if r.finish_reason is None]
        self._waiting = deque(r for r in self._waiting if r.finish_reason is None)
