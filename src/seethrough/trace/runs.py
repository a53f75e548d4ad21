"""Runs one request alone with a tracer: a prompt, the ids of another model's trace, or a record."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from seethrough.engine.fingerprint import Fingerprint
from seethrough.engine.intake import Encoder, Intake
from seethrough.engine.jobs import Job, Jobs
from seethrough.engine.prompts import PromptReader
from seethrough.engine.recorder import Recorded
from seethrough.errors import DiffError, ParameterError, TraceError
from seethrough.model.spec import TransformerSpec
from seethrough.sampling.params import SamplingParams
from seethrough.text.tokenizer import Tokenizer
from seethrough.trace.replay import Replay
from seethrough.trace.trace import Trace
from seethrough.trace.tracer import TraceFilter, Tracer

# What says where a text ends, and which prompt rows have logits.
_LENGTH_FIELDS = ("min_tokens", "ignore_eos", "stop", "stop_token_ids", "prompt_logprobs")


@dataclass(frozen=True, slots=True)
class TracedRuns:
    """The traced runs of one engine. None of them takes from its prefix cache or leaves a record.

    Attributes:
        model: the name that its traces carry.
    """

    model: str
    spec: TransformerSpec
    tokenizer: Tokenizer
    prompts: PromptReader
    intake: Intake
    jobs: Jobs

    def trace(
        self,
        encode: Encoder,
        asked: SamplingParams,
        chosen: TraceFilter,
        forced: Mapping[int, int] | None,
    ) -> Trace:
        """Run a prompt; see `LLM.trace`."""
        arrival = time.perf_counter()
        text, ids = encode()
        seconds = time.perf_counter() - arrival
        effective = self.intake.effective(asked)
        if effective.n > 1:
            raise ParameterError("n", effective.n, "a trace follows one sample")
        job = self.intake.job(text, ids, effective, arrival, alone=True, forced=forced)
        return self._run(job, chosen, seconds)

    def follow(self, other: Trace, asked: SamplingParams, chosen: TraceFilter) -> Trace:
        """Run another trace's prompt and output; see `LLM.follow`."""
        ids, output = other.prompt_token_ids, other.output.outputs[0].token_ids
        self._check_pieces(other)
        was = other.output.params
        same = {name: getattr(was, name) for name in _LENGTH_FIELDS}
        effective = replace(self.intake.effective(asked), n=1, **same, max_tokens=len(output))
        if effective.origin["seed"] == "engine":
            effective = replace(effective, seed=was.seed)
        forced = dict(enumerate(output))
        now = time.perf_counter()
        job = self.intake.job(other.prompt, ids, effective, now, alone=True, forced=forced)
        found = self._run(job, chosen)
        ran = found.output.outputs[0]
        if len(ran.token_ids) < len(output) and ran.error is None:
            raise DiffError(
                f"B ends its text at output token {len(ran.token_ids) - 1} ({ran.stop_reason!r}), "
                f"where A goes on; with ignore_eos both go on"
            )
        return found

    def replay(
        self,
        recorded: Recorded,
        sample: int,
        asked: SamplingParams,
        chosen: TraceFilter,
        forced: Mapping[int, int] | None,
        fingerprint: Fingerprint,
    ) -> Replay:
        """Run a recorded sample; see `LLM.replay`. `fingerprint` is of what it runs on now."""
        was = recorded.sample(sample)
        if asked.n is not None and asked.n > 1:
            raise ParameterError("n", asked.n, "a replay runs one sample")
        changed = bool(asked.to_dict() or forced)
        # Of a request that was ended from outside, as much as there was; at least the prompt.
        ended = was.finish_reason == "abort" and not changed
        most = max(len(was.token_ids), 1) if ended else None
        given = {"prompt": recorded.prompt, "prompt_token_ids": list(recorded.prompt_ids)}
        text, ids = self.prompts.encode(given)
        params = replace(recorded.params, max_tokens=recorded.max_tokens).changed(asked)
        now = time.perf_counter()
        job = self.intake.job(text, ids, params, now, alone=True, samples=[sample], forced=forced)
        return Replay(recorded, was, self._run(job, chosen, most=most), fingerprint)

    def _check_pieces(self, other: Trace) -> None:
        """An id must be the same text in both vocabularies."""
        ids = other.prompt_token_ids + other.output.outputs[0].token_ids
        if max(ids) >= self.spec.vocab_size:
            raise DiffError(
                f"B has {self.spec.vocab_size} tokens, but A uses the id {max(ids)}: their "
                "vocabularies differ"
            )
        for token_id, piece, own in zip(ids, other.tokens, self.tokenizer.pieces(ids), strict=True):
            if piece != own:
                raise DiffError(f"the id {token_id} is {piece!r} in A and {own!r} in B")

    def _run(
        self, job: Job, chosen: TraceFilter, seconds: float = 0.0, most: int | None = None
    ) -> Trace:
        """Run a job of one sample for at most so many tokens; making its ids took `seconds`."""
        if self.jobs.busy:
            raise TraceError("a stream of this LLM is still open: finish or close it first")
        tracer = Tracer(self.spec, chosen)
        (request,) = job.requests
        pieces = self.tokenizer.pieces(request.prompt_ids)
        tracer.prompt(job.prompt, request.prompt_ids, pieces, seconds)
        self.jobs.submit(job)
        try:
            while job.running and (most is None or len(request.output_ids) < most):
                self.jobs.step(tracer)
        finally:
            self.jobs.close(job)
        return tracer.finish(job.output(), self.tokenizer, self.model)
