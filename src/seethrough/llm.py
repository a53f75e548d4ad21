"""The front door in Python: `LLM(model).generate / chat / stream / trace`.

from seethrough import LLM
llm = LLM("smollm2-135m-instruct")
print(llm.generate("Neural Bits Newsletter is", temperature=0, max_tokens=16)[0].outputs[0].text)
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from seethrough.config import EngineConfig
from seethrough.engine.load import LoadReport, Progress, load
from seethrough.engine.outputs import Delta, RequestOutput, request_output
from seethrough.engine.prompts import (
    ChatOptions,
    Encoded,
    Message,
    Prompt,
    PromptReader,
    as_prompts,
    conversations,
    params_for,
)
from seethrough.engine.request import Request, Times
from seethrough.engine.text_output import TextOutput
from seethrough.errors import ContextLengthError, ParameterError, SeethroughError, TraceError
from seethrough.kv.pool import BlockTable
from seethrough.model.load import ModelWeights
from seethrough.model.spec import TransformerSpec
from seethrough.sampling.bans import prepare_bans
from seethrough.sampling.params import EffectiveParams, SamplingParams, check_vocab, resolve
from seethrough.text.tokenizer import Tokenizer
from seethrough.trace.trace import Trace
from seethrough.trace.tracer import DEFAULT_BYTE_BUDGET, TraceFilter, Tracer

Encoder = Callable[[], Encoded]


class LLM:
    """A loaded model. Runs in the caller's process; one thread at a time may use it.

    Args:
        model: a GGUF file, a folder, a short name, or a hub id that was pulled.
        defaults: sampling parameters for all requests (what a command line sets); a request's own
            values come first, the model's generation_config after.
        cache_dir: where pulled models lie.
        progress: called with (phase, done, total) while loading.
        **settings: the fields of `EngineConfig`: threads, max_model_len, kv_cache_dtype, backend,
            block_size, num_kv_blocks, max_num_batched_tokens, max_num_seqs.

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
        **settings: Any,
    ) -> None:
        self._loaded = load(str(model), _config(settings), cache_dir, progress)
        self._engine = self._loaded.engine
        self._prompts = PromptReader(self._loaded.tokenizer, self.spec.vocab_size)
        self._defaults = defaults
        self._jobs: dict[str, Job] = {}
        self._abandoned: deque[Job] = deque()
        self._count = 0

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

    def effective(self, params: SamplingParams | None = None) -> EffectiveParams:
        """What a request with these parameters would run with, and who set each of them."""
        return resolve(
            params or SamplingParams(),
            self._defaults,
            self._loaded.generation_config,
            lambda: secrets.randbits(64),
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Complete one prompt or a list of prompts, which run as one batch; outputs in order.

        A prompt is a string or `{"prompt_token_ids": [...]}`; ids are used exactly as given.
        Parameters come as `SamplingParams` (one, or one per prompt) or as keywords.

        Raises:
            ParameterError, ContextLengthError, CapacityError: before anything runs.
        """
        many = as_prompts(prompts)
        asked = params_for(len(many), params, sampling)
        return self._complete([partial(self._prompts.encode, prompt) for prompt in many], asked)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template: ChatOptions | None = None,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of conversations, with the model's own template.

        Raises:
            TemplateError: there is no template, or it refused the messages.
        """
        many = conversations(messages)
        asked = params_for(len(many), params, sampling)
        return self._complete(
            [partial(self._prompts.render, chat, template) for chat in many], asked
        )

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **sampling: Any
    ) -> Stream:
        """Complete one prompt, token by token: iterate over the result.

        Closing it, or leaving its `with` block, ends the request at once and frees its memory;
        `.output()` then holds what was there. A stream that is dropped unfinished (a `break`, an
        exception in the loop) ends before the next step or request.
        """
        (param,) = params_for(1, params, sampling)
        return Stream(self, self._admit(partial(self._prompts.encode, prompt), param))

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        template: ChatOptions | None = None,
        **sampling: Any,
    ) -> Stream:
        """`chat` for one conversation, token by token."""
        (param,) = params_for(1, params, sampling)
        return Stream(self, self._admit(partial(self._prompts.render, messages, template), param))

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
        self._end_abandoned()
        if self._engine.busy:
            raise TraceError("a stream of this LLM is still open: finish or close it first")
        chosen = TraceFilter.build(self.spec, stages, layers, heads, tokens, byte_budget)
        (param,) = params_for(1, params, sampling)
        tracer = Tracer(self.spec, chosen)
        encode: Encoder
        if isinstance(prompt, (str, Mapping)):
            encode = partial(self._prompts.encode, prompt)
        else:
            encode = partial(self._prompts.render, prompt, None)
        job = self._admit(encode, param, tracer)
        try:
            if len(job.requests) > 1:
                raise ParameterError("n", len(job.requests), "a trace follows one sample")
            job.requests[0].forced = self._checked_forced(forced or {})
            while job.running:
                self._step(tracer)
        finally:
            self._close(job)
        return tracer.finish(job.output(), self.tokenizer, self.report.name)

    # ------------------------------------------------------------------ running

    def _complete(
        self, encoders: Sequence[Encoder], asked: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Admit all, run until all are done; whatever happens, none is left running."""
        jobs: list[Job] = []
        try:
            for index, (encode, param) in enumerate(zip(encoders, asked, strict=True)):
                try:
                    jobs.append(self._admit(encode, param))
                except SeethroughError as error:
                    if len(encoders) > 1:
                        error.add_note(f"prompt {index} of {len(encoders)}, counted from 0")
                    raise
            while any(job.running for job in jobs):
                self._step()
        finally:
            for job in jobs:
                self._close(job)
        return [job.output() for job in jobs]

    def _step(self, tracer: Tracer | None = None) -> None:
        """One engine step; what it gave goes to the jobs that asked for it."""
        self._end_abandoned()
        for delta in self._engine.step(tracer):
            self._jobs[delta.request_id].fresh.append(delta)

    def _close(self, job: Job) -> None:
        """End what still runs, and forget the job."""
        for request in job.requests:
            self._engine.abort(request)
        self._jobs.pop(job.request_id, None)

    def _end_abandoned(self) -> None:
        """Close the jobs whose streams nobody holds any more."""
        while self._abandoned:
            self._close(self._abandoned.popleft())

    # ------------------------------------------------------------------ from prompt to request

    def _admit(self, encode: Encoder, asked: SamplingParams, tracer: Tracer | None = None) -> Job:
        """Check one prompt, give every parameter its value (S0), and queue its samples."""
        arrival = perf_counter()
        self._end_abandoned()
        text, ids = encode()
        if tracer is not None:
            tracer.prompt(text, ids, self.tokenizer.pieces(ids), perf_counter() - arrival)
        model, vocab_size = self._loaded, self.spec.vocab_size
        params = self.effective(asked)
        check_vocab(params, vocab_size)
        spell = partial(self.tokenizer.encode, add_special_tokens=False)
        bans = prepare_bans(params, model.end_ids, vocab_size, spell)
        max_tokens = self._max_tokens(len(ids), params)
        self._count += 1
        job = Job(f"req-{self._count}", text)
        self._jobs[job.request_id] = job
        try:
            for index in range(params.n):
                request = Request(
                    request_id=job.request_id,
                    prompt_ids=ids,
                    params=params,
                    bans=bans,
                    end_ids=model.end_ids,
                    max_tokens=max_tokens,
                    table=BlockTable(self._engine.pool),
                    # The answer continues the prompt: a space that opens it is a real one.
                    text=TextOutput(self.tokenizer, params, at_start=False),
                    times=Times(arrival),
                    sample_index=index,
                )
                job.requests.append(request)
                self._engine.add(request)
        except BaseException:
            self._close(job)
            raise
        return job

    def _checked_forced(self, forced: Mapping[int, int]) -> dict[int, int]:
        for index, token_id in forced.items():
            if index < 0:
                raise ParameterError("forced", index, "output tokens count from 0")
            if not 0 <= token_id < self.spec.vocab_size:
                why = f"this model's token ids are 0 to {self.spec.vocab_size - 1}"
                raise ParameterError("forced", token_id, why)
        return dict(forced)

    def _max_tokens(self, prompt_tokens: int, params: EffectiveParams) -> int:
        """The output limit; unset fills the context."""
        room = self.max_model_len - prompt_tokens
        wanted = params.max_tokens if params.max_tokens is not None else max(room, 1)
        if wanted > room:
            raise ContextLengthError(prompt_tokens, wanted, self.max_model_len)
        if params.min_tokens > wanted:
            raise ParameterError("min_tokens", params.min_tokens, f"only {wanted} tokens fit")
        return wanted


class Job:
    """One prompt, its samples, and the pieces that nobody has taken yet."""

    def __init__(self, request_id: str, prompt: str | None) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.requests: list[Request] = []
        self.fresh: deque[Delta] = deque()

    @property
    def running(self) -> bool:
        """Whether any sample is not finished."""
        return any(request.finish_reason is None for request in self.requests)

    def output(self) -> RequestOutput:
        """What is there so far."""
        return request_output(self.request_id, self.prompt, self.requests)


class Stream:
    """The tokens of one prompt as they come. Iterate once; close it to stop early.

    Several may be open at the same time: they run as one batch, whoever asks for the next token.
    """

    def __init__(self, llm: LLM, job: Job) -> None:
        self._llm = llm
        self._job = job

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        try:
            while not self._job.fresh and self._job.running:
                self._llm._step()
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
        self._llm._close(self._job)

    def __del__(self) -> None:
        # The collector may call this in the middle of a step: the job is only noted here.
        self._llm._abandoned.append(self._job)

    def output(self) -> RequestOutput:
        """What is there so far."""
        return self._job.output()


def _config(settings: Mapping[str, Any]) -> EngineConfig:
    for name, value in settings.items():
        if name not in EngineConfig.__dataclass_fields__:
            known = ", ".join(EngineConfig.__dataclass_fields__)
            raise ParameterError(name, value, f"no such engine setting; known: {known}")
    return EngineConfig(**settings)
