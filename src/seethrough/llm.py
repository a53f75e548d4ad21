"""The front door in Python: `LLM(model).generate / chat / stream / trace`.

from seethrough import LLM
llm = LLM("smollm2-135m-instruct")
print(llm.generate("Neural Bits Newsletter is", temperature=0, max_tokens=16)[0].outputs[0].text)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from seethrough.config import EngineConfig
from seethrough.engine.intake import Encoder, Intake
from seethrough.engine.jobs import Job, Jobs
from seethrough.engine.load import LoadReport, Progress, load
from seethrough.engine.metrics import EngineState
from seethrough.engine.outputs import Delta, RequestOutput
from seethrough.engine.prompts import (
    ChatOptions,
    Message,
    Prompt,
    PromptReader,
    as_prompts,
    conversations,
    params_for,
)
from seethrough.engine.recorder import (
    DEFAULT_BYTES,
    DEFAULT_REQUESTS,
    Provenance,
    Recorded,
    Recorder,
    Store,
)
from seethrough.errors import ParameterError, SeethroughError
from seethrough.model.load import ModelWeights
from seethrough.model.spec import TransformerSpec
from seethrough.sampling.params import EffectiveParams, SamplingParams
from seethrough.text.tokenizer import Tokenizer
from seethrough.trace.replay import Replay
from seethrough.trace.runs import TracedRuns
from seethrough.trace.trace import Trace
from seethrough.trace.tracer import DEFAULT_BYTE_BUDGET, TraceFilter

BatchProgress = Callable[[int, int], None]


class LLM:
    """A loaded model. Runs in the caller's process; one thread at a time may use it.

    Args:
        model: a GGUF file, a folder, a short name, or a hub id that was pulled.
        defaults: sampling parameters for all requests (what a command line sets); a request's own
            values come first, the model's generation_config after.
        cache_dir: where pulled models lie.
        progress: called with (phase, done, total) while loading.
        record: a directory in which finished requests are kept, so that `replay` finds them later;
            without one the last of them are in memory. Prompts are private: it is off by default.
        record_limit: how many requests are kept.
        record_bytes: how many bytes they may take.
        **settings: the fields of `EngineConfig`: threads, max_model_len, kv_cache_dtype, backend,
            block_size, num_kv_blocks, max_num_batched_tokens, max_num_seqs,
            long_prefill_token_threshold, enable_prefix_caching.

    Attributes:
        recorder: the last finished requests.
        prompts, intake, jobs: its parts, for the fronts that stand on it.

    Raises:
        SeethroughError: with what was found, what was expected, and what to do.
    """

    def __init__(
        self,
        model: str | Path = "smollm2-135m-instruct",
        *,
        defaults: SamplingParams | None = None,
        cache_dir: Path | None = None,
        progress: Progress | None = None,
        record: str | Path | None = None,
        record_limit: int = DEFAULT_REQUESTS,
        record_bytes: int = DEFAULT_BYTES,
        **settings: Any,
    ) -> None:
        config = _config(settings)
        store = _store(record, record_limit, record_bytes)
        self._loaded = load(str(model), config, cache_dir, progress)
        self._engine = self._loaded.engine
        self.prompts = PromptReader(self._loaded.tokenizer, self.spec.vocab_size)
        self.intake = Intake(self._loaded, defaults)
        self.recorder = Recorder(
            Provenance.of(self._loaded, str(model)),
            limit=record_limit,
            max_bytes=record_bytes,
            store=store,
        )
        self.jobs = Jobs(self._engine, self.recorder.finished)
        self._traced = TracedRuns(
            self.report.name, self.spec, self.tokenizer, self.prompts, self.intake, self.jobs
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._loaded.tokenizer

    @property
    def spec(self) -> TransformerSpec:
        """What the model is made of."""
        return self._loaded.weights.spec

    @contextmanager
    def stage_times(self) -> Iterator[dict[str, float]]:
        """While it is open, seconds by stage (S4 to S9) are added up in the dict that it gives."""
        times: dict[str, float] = {}
        model = self._loaded.engine.model
        model.stage_seconds = times
        try:
            yield times
        finally:
            model.stage_seconds = None

    @property
    def weights(self) -> ModelWeights:
        """The tensors as they are stored, under canonical names."""
        return self._loaded.weights

    @property
    def report(self) -> LoadReport:
        """What loading found and chose."""
        return self._loaded.report

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and output may have together."""
        return self._loaded.report.max_model_len

    @property
    def state(self) -> EngineState:
        """What runs and waits now, the blocks, and what was counted since loading."""
        return self._engine.state

    def effective(self, params: SamplingParams | None = None) -> EffectiveParams:
        """What a request with these parameters would run with, and who set each of them."""
        return self.intake.effective(params)

    def rest(self) -> None:
        """What an engine does when nobody asks for anything: check its books, write its records.

        Raises:
            KVIntegrityError: a bug: the blocks of the cache do not add up.
        """
        self._engine.check()
        self.recorder.flush()

    def forget_prefixes(self) -> None:
        """Empty the prefix cache: no later prompt finds anything that was computed so far."""
        self._engine.pool.forget()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        progress: BatchProgress | None = None,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Complete one prompt or a list of prompts, which run as one batch; outputs in order.

        A prompt is a string or `{"prompt_token_ids": [...]}`; ids are used exactly as given.
        Parameters come as `SamplingParams` (one, or one per prompt) or as keywords.

        Args:
            cache_salt: only requests with the same salt share what the prefix cache holds.
            progress: called with (prompts done, prompts in all) as they finish.

        Raises:
            ParameterError, ContextLengthError, CapacityError: before anything runs.
        """
        many = as_prompts(prompts)
        asked = params_for(len(many), params, sampling)
        encoders = [partial(self.prompts.encode, prompt) for prompt in many]
        return self._complete(encoders, asked, cache_salt, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template: ChatOptions | None = None,
        cache_salt: str | None = None,
        progress: BatchProgress | None = None,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of conversations, with the model's own template.

        `cache_salt` and `progress` are those of `generate`.

        Raises:
            TemplateError: there is no template, or it refused the messages.
        """
        many = conversations(messages)
        asked = params_for(len(many), params, sampling)
        encoders = [partial(self.prompts.render, chat, template) for chat in many]
        return self._complete(encoders, asked, cache_salt, progress)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> Stream:
        """Complete one prompt, token by token: iterate over the result.

        Closing it, or leaving its `with` block, ends the request at once and frees its memory;
        `.output()` then holds what was there. A stream that is dropped unfinished (a `break`, an
        exception in the loop) ends before the next step or request.
        """
        (param,) = params_for(1, params, sampling)
        return self._stream(partial(self.prompts.encode, prompt), param, cache_salt)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        template: ChatOptions | None = None,
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> Stream:
        """`chat` for one conversation, token by token."""
        (param,) = params_for(1, params, sampling)
        return self._stream(partial(self.prompts.render, messages, template), param, cache_salt)

    def trace(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stages: Iterable[str] | None = None,
        layers: Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        tokens: Iterable[int] | None = None,
        byte_budget: int = DEFAULT_BYTE_BUDGET,
        forced: Mapping[int, int] | None = None,
        **sampling: Any,
    ) -> Trace:
        """Complete one prompt, or answer one conversation, and keep the values of its stages.

        Args:
            prompt: a prompt, or a list of messages, which goes through the model's template.
            stages, layers, heads, tokens: keep only these; `tokens` are positions of the sequence.
            byte_budget: what does not fit is left out and listed in `Trace.omitted`.
            forced: ids by output index (0 is the first) that are taken whatever would be chosen.

        Raises:
            TraceError: no such stage, layer or head; or another request is still running.
        """
        chosen = TraceFilter.build(self.spec, stages, layers, heads, tokens, byte_budget)
        (param,) = params_for(1, params, sampling)
        encode: Encoder
        if isinstance(prompt, (str, Mapping)):
            encode = partial(self.prompts.encode, prompt)
        else:
            encode = partial(self.prompts.render, prompt, None)
        return self._traced.trace(encode, param, chosen, forced)

    def follow(
        self,
        other: Trace,
        params: SamplingParams | None = None,
        *,
        stages: Iterable[str] | None = None,
        layers: Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        tokens: Iterable[int] | None = None,
        byte_budget: int = DEFAULT_BYTE_BUDGET,
        **sampling: Any,
    ) -> Trace:
        """Run the ids of another model's trace, prompt and output, and keep the same values.

        Every output token is the other's, whatever this model would choose, so that each position
        stands beside its own (`trace.diff`). Where the text ends is the other's as well, and the
        seed; what else is sampled with is this model's own.

        Raises:
            DiffError: the ids mean other tokens in this model, or end its text earlier.
            TraceError: as `trace`.
        """
        chosen = TraceFilter.build(self.spec, stages, layers, heads, tokens, byte_budget)
        (asked,) = params_for(1, params, sampling)
        return self._traced.follow(other, asked, chosen)

    def replay(
        self,
        which: str | Recorded = "last",
        params: SamplingParams | None = None,
        *,
        sample: int = 0,
        stages: Iterable[str] | None = None,
        layers: Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        tokens: Iterable[int] | None = None,
        byte_budget: int = DEFAULT_BYTE_BUDGET,
        forced: Mapping[int, int] | None = None,
        **sampling: Any,
    ) -> Replay:
        """Run a recorded request again, alone, and keep the values of its stages.

        Args:
            which: a request id, `last`, or a record.
            params, sampling: what shall be otherwise than it was ("what if").
            sample: which of its samples.
            stages, layers, heads, tokens, byte_budget: as `trace` has them.
            forced: ids by output index that are taken whatever would be chosen.

        Raises:
            RecordError: no such request is recorded.
            TraceError: as `trace`.
        """
        recorded = which if isinstance(which, Recorded) else self.recorder.get(which)
        chosen = TraceFilter.build(self.spec, stages, layers, heads, tokens, byte_budget)
        (asked,) = params_for(1, params, sampling)
        now = self.recorder.provenance.origin.fingerprint
        return self._traced.replay(recorded, sample, asked, chosen, forced, now)

    # ------------------------------------------------------------------ running

    def _complete(
        self,
        encoders: Sequence[Encoder],
        asked: Sequence[SamplingParams],
        cache_salt: str | None,
        progress: BatchProgress | None,
    ) -> list[RequestOutput]:
        """Admit all, run until all are done; whatever happens, none is left running."""
        jobs: list[Job] = []
        try:
            for index, (encode, param) in enumerate(zip(encoders, asked, strict=True)):
                try:
                    jobs.append(self.intake.prepare(encode, param, cache_salt))
                    self.jobs.submit(jobs[-1])
                except SeethroughError as error:
                    if len(encoders) > 1:
                        error.add_note(f"prompt {index} of {len(encoders)}, counted from 0")
                    raise
            self._run(jobs, progress)
        finally:
            for job in jobs:
                self.jobs.close(job)
        return [job.output() for job in jobs]

    def _run(self, jobs: Sequence[Job], progress: BatchProgress | None) -> None:
        left = set(jobs)
        while left and self.jobs.busy:
            for job in self.jobs.step():
                if job in left and not job.running:
                    left.remove(job)
                    if progress is not None:
                        progress(len(jobs) - len(left), len(jobs))

    def _stream(self, encode: Encoder, param: SamplingParams, cache_salt: str | None) -> Stream:
        job = self.intake.prepare(encode, param, cache_salt)
        self.jobs.submit(job)
        return Stream(self.jobs, job)


class Stream:
    """The tokens of one prompt as they come. Iterate once; close it to stop early.

    Several may be open at the same time: they run as one batch, whoever asks for the next token.
    """

    def __init__(self, jobs: Jobs, job: Job) -> None:
        self._jobs = jobs
        self._job = job

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        try:
            while not self._job.fresh and self._job.running:
                self._jobs.step()
        except BaseException:  # Ctrl-C among them: nothing may be left running
            self.close()
            raise
        if self._job.fresh:
            return self._job.fresh.popleft()
        self.close()
        raise StopIteration

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the request now, if it still runs; safe to call at any time."""
        self._jobs.close(self._job)

    def __del__(self) -> None:
        # The collector may call this in the middle of a step: the job is only noted here.
        self._jobs.abandon(self._job)

    def output(self) -> RequestOutput:
        """What is there so far."""
        return self._job.output()


def _config(settings: Mapping[str, Any]) -> EngineConfig:
    for name, value in settings.items():
        if name not in EngineConfig.__dataclass_fields__:
            known = ", ".join(EngineConfig.__dataclass_fields__)
            raise ParameterError(name, value, f"no such engine setting; known: {known}")
    return EngineConfig(**settings)


def _store(record: str | Path | None, limit: int, max_bytes: int) -> Store | None:
    for name, value in (("record_limit", limit), ("record_bytes", max_bytes)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ParameterError(name, value, "0 or more is expected")
    if record is None:
        return None
    if str(record) == "":
        raise ParameterError("record", record, "a directory is expected")
    if limit == 0:
        raise ParameterError("record_limit", limit, "room for at least one request is expected")
    from seethrough.engine.record_store import RecordStore  # SQLite is for those who want it

    return RecordStore(Path(record), limit=limit, max_bytes=max_bytes)
