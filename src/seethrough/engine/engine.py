"""The autoregressive loop (S13): schedule, batch, run, sample, append, until all are done.

    step = schedule -> build_batch -> run (S4 to S9) -> sample (S10 to S12) -> append (S13)

Knows ids, blocks and parameters; text enters and leaves through the front door (`llm.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from seethrough.config import EngineConfig
from seethrough.engine.batch import Scheduled, build_batch
from seethrough.engine.metrics import EngineMetrics, EngineState
from seethrough.engine.outputs import Delta, with_text
from seethrough.engine.request import FinishReason, Request
from seethrough.engine.scheduler import Scheduler
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
        self.metrics = EngineMetrics()
        self.scheduler = Scheduler(pool, config, self.metrics)

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return any(True for _ in self.scheduler.requests)

    @property
    def state(self) -> EngineState:
        """How it stands, with a copy of what it has counted."""
        pool, scheduler = self.pool, self.scheduler
        return EngineState(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks=pool.num_blocks,
            blocks_held=pool.num_blocks - pool.free_blocks,
            blocks_idle=pool.prefix.idle_count,
            counted=replace(self.metrics, finished=dict(self.metrics.finished)),
        )

    def add(self, request: Request) -> None:
        """Queue a request; CapacityError at once if the whole pool could not hold it."""
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """End a request now, wherever it is; it keeps the text that it has."""
        if request.finish_reason is None:
            self._finish(request, "abort")
            self.scheduler.remove(request)
            self._check_idle()

    def step(self, tracer: StepTracer | None = None) -> Iterator[Delta]:
        """One step of the loop; gives what it added to each request as soon as it is added.

        So an interrupt in the middle loses nothing: who was not reached is computed again.
        """
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return
        self._count(scheduled)
        batch = build_batch(scheduled)
        if tracer is not None:
            tracer.begin_step(batch, self.pool)
        logits = self.model.run(batch, self.pool, tracer)  # [R, V]
        row = 0
        try:
            for item in scheduled:
                rows = logits[row : row + len(item.logit_positions)]
                row += len(rows)
                if item.request.finish_reason is not None:
                    continue  # who took a piece of this step has ended it
                self.scheduler.computed(item)
                delta = self._advance(item, rows, tracer)
                if delta.token_ids or delta.finish_reason is not None:
                    yield delta
        finally:
            self.scheduler.drop_finished()
        self._check_idle()

    def _check_idle(self) -> None:
        """Where nothing runs, nothing may be held; `check` says more, and takes longer."""
        if not self.busy and self.pool.free_blocks != self.pool.num_blocks:
            self.check()

    def check(self) -> None:
        """Check the books of the KV pool."""
        check_integrity(self.pool, (request.table for request in self.scheduler.requests))

    def _count(self, scheduled: list[Scheduled]) -> None:
        """Note a step before it runs."""
        now = perf_counter()
        rows = 0
        for request, start, stop in scheduled:
            rows += stop - start
            request.times.first_scheduled = request.times.first_scheduled or now
        self.metrics.steps += 1
        self.metrics.step_tokens = rows
        self.metrics.computed_tokens += rows

    def _advance(self, item: Scheduled, logits: F32, tracer: StepTracer | None) -> Delta:
        """Note what was computed and, at the end of the known tokens, choose the next one."""
        request = item.request
        before = len(request.output_ids)
        try:
            if request.unscored is not None:
                self._score_prompt(item, logits)
            text = self._choose(request, logits[-1], tracer) if item.samples else ""
        except SeethroughError as error:  # this request ends; its neighbours do not notice
            request.error = error
            text = self._finish(request, "error")
        # Last: if an interrupt cuts this short, the rows are computed again, and nothing hangs.
        request.num_computed = item.stop
        return self._delta(request, text, before)

    def _score_prompt(self, item: Scheduled, logits: F32) -> None:
        """Log-probabilities of the prompt tokens that these rows predict."""
        request, scored = item.request, item.scored
        if not request.prompt_logprobs:
            request.prompt_logprobs.append(None)  # nothing predicts the first token
        targets = request.prompt_ids[scored.start + 1 : scored.stop + 1]
        k = request.params.prompt_logprobs or 0
        entries = prompt_logprobs(logits[: len(targets)], targets, k, self._sampling)
        request.prompt_logprobs += [with_text(entry, self.tokenizer) for entry in entries]

    def _choose(self, request: Request, logits: F32, tracer: StepTracer | None) -> str:
        """S10 to S13 for one request; returns its new text."""
        if request.max_tokens == 0:
            return self._finish(request, "length")
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
            text += self._finish(request, "stop", token_id)
        else:
            armed = len(request.output_ids) >= params.min_tokens
            text, stop = request.text.push(token_id, armed=armed)
            if stop is not None:
                text += self._finish(request, "stop", stop)
            elif len(request.output_ids) >= request.max_tokens:
                text += self._finish(request, "length")
        request.times.tokens.append(perf_counter())
        self.metrics.output_tokens += 1
        return text

    def _finish(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None = None
    ) -> str:
        """End a request; returns the text that was still held."""
        self.metrics.finished[reason] += 1
        return request.finish(reason, stop_reason)

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
