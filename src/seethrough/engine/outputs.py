"""What a caller gets back. Field names are vLLM's, so that code written for it reads the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from seethrough.engine.request import FinishReason, LogprobDict, Request
from seethrough.errors import SeethroughError
from seethrough.sampling.params import EffectiveParams
from seethrough.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request in milliseconds; None where there was no such token.

    Attributes:
        ttft_ms: from the text's arrival (before S1) to the first token's text.
        tpot_ms: (last − first token) / (tokens − 1).
        queue_ms: from the arrival to the first step that computed any of it.
        prefill_ms: from there to the first token.
        decode_ms: from the first token to the last.
        inter_token_ms: each time from one token to the next, sample after sample.
        preemptions: how often it had to give back its blocks and was computed again.
    """

    ttft_ms: float | None
    tpot_ms: float | None
    prompt_tokens: int
    completion_tokens: int
    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    inter_token_ms: tuple[float, ...] = ()
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample. `finish_reason` is stop, length, abort or error; `error` then says which.

    `token_ids` holds every sampled id, an end token included; `text` ends before it.
    `stop_reason` is the id or the string that stopped the text.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[LogprobDict] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: SeethroughError | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt with its samples.

    `params` are the effective parameters, with their origin; `num_cached_tokens` is how many of the
    prompt's tokens the first sample found computed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobDict | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    params: EffectiveParams
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one sample; text can lag behind the ids (a character, a stop)."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[LogprobDict] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text without loss: bytes that are no text on their own become `bytes:\\xe4…`."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def with_text(entry: LogprobDict, tokenizer: Tokenizer) -> LogprobDict:
    """Log-probabilities with each token's text filled in."""
    return {
        token_id: replace(logprob, decoded_token=token_text(tokenizer, token_id))
        for token_id, logprob in entry.items()
    }


def completion_output(request: Request) -> CompletionOutput:
    """A request as one sample."""
    logprobs = list(request.logprobs) if request.params.logprobs is not None else None
    total = None
    if logprobs is not None:
        pairs = zip(logprobs, request.output_ids, strict=False)
        total = sum(entry[token_id].logprob for entry, token_id in pairs)
    return CompletionOutput(
        index=request.sample_index,
        text=request.text.text,
        token_ids=list(request.output_ids),
        cumulative_logprob=total,
        logprobs=logprobs,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        error=request.error,
    )


def request_output(
    request_id: str, prompt: str | None, samples: Sequence[Request]
) -> RequestOutput:
    """The samples of one prompt together."""
    first = samples[0]
    scored = first.params.prompt_logprobs is not None
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=list(first.prompt_ids),
        prompt_logprobs=list(first.prompt_logprobs) if scored else None,
        outputs=[completion_output(sample) for sample in samples],
        finished=all(sample.finish_reason is not None for sample in samples),
        metrics=_metrics(samples),
        params=first.params,
        num_cached_tokens=first.num_cached_tokens,
    )


def _metrics(samples: Sequence[Request]) -> RequestMetrics:
    arrival = samples[0].times.arrival
    started = min((s.times.first_scheduled for s in samples if s.times.first_scheduled), default=0)
    series = [s.times.tokens for s in samples if s.times.tokens]
    gaps = tuple((b - a) * 1e3 for times in series for a, b in pairwise(times))
    first = min((times[0] for times in series), default=None)
    last = max((times[-1] for times in series), default=None)
    return RequestMetrics(
        ttft_ms=_ms(arrival, first),
        tpot_ms=sum(gaps) / len(gaps) if gaps else None,
        prompt_tokens=len(samples[0].prompt_ids),
        completion_tokens=sum(len(s.output_ids) for s in samples),
        queue_ms=_ms(arrival, started or None),
        prefill_ms=_ms(started, first),
        decode_ms=_ms(first, last),
        inter_token_ms=gaps,
        preemptions=sum(s.num_preemptions for s in samples),
    )


def _ms(start: float | None, stop: float | None) -> float | None:
    return None if start is None or stop is None else (stop - start) * 1e3


def to_json(output: RequestOutput, load_ms: float) -> dict[str, Any]:
    """The object that `--json` prints: flat for one sample, with `choices` for several."""
    choices = [_choice(sample) for sample in output.outputs]
    body: dict[str, Any] = {
        "id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
    }
    if output.prompt_logprobs is not None:
        body["prompt_logprobs"] = [e and logprobs_json(e) for e in output.prompt_logprobs]
    body |= choices[0] if len(choices) == 1 else {"choices": choices}
    metrics = output.metrics
    return body | {
        "params": output.params.to_dict(),
        "metrics": {
            "load_ms": load_ms,
            "ttft_ms": metrics.ttft_ms,
            "tpot_ms": metrics.tpot_ms,
            "prompt_tokens": metrics.prompt_tokens,
            "completion_tokens": metrics.completion_tokens,
            "num_cached_tokens": output.num_cached_tokens,
            "queue_ms": metrics.queue_ms,
            "prefill_ms": metrics.prefill_ms,
            "decode_ms": metrics.decode_ms,
            "preemptions": metrics.preemptions,
        },
    }


def _choice(sample: CompletionOutput) -> dict[str, Any]:
    return {
        "index": sample.index,
        "token_ids": sample.token_ids,
        "text": sample.text,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
        "error": None if sample.error is None else str(sample.error),
        "logprobs": None
        if sample.logprobs is None
        else [logprobs_json(e) for e in sample.logprobs],
    }


def logprobs_json(entry: LogprobDict) -> list[dict[str, Any]]:
    """One position's candidates, best first as ranked."""
    ranked = sorted(entry.items(), key=lambda item: item[1].rank)
    return [
        {"id": i, "logprob": p.logprob, "rank": p.rank, "decoded_token": p.decoded_token}
        for i, p in ranked
    ]
