"""Logits to one token id: the steps in their order (S10, S11), then the choice (S12).

Knows one row of one sample. Batches, stop strings and the end of a request are the engine's.
The order is the documented one: bans, bias, penalties, temperature, top-k, top-p, min-p, typical.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from seethrough.errors import NoCandidatesError
from seethrough.sampling.bans import Bans, History
from seethrough.sampling.logprobs import Logprob, top_logprobs
from seethrough.sampling.ops import NUMPY, SamplingOps
from seethrough.sampling.params import EffectiveParams
from seethrough.sampling.record import SamplingRecord
from seethrough.sampling.softmax import Row

__all__ = ["History", "Sampled", "Step", "sample", "steps"]


class Step(NamedTuple):
    """One active step: its name, stage, parameters to show, and what it does to candidates."""

    name: str
    stage: Literal["S10", "S11"]
    params: dict[str, Any]
    apply: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The choice. `u` is None for greedy; `logprobs` is None unless the request asked for it."""

    token_id: int
    u: float | None
    logprobs: dict[int, Logprob] | None


def sample(
    logits: Row,
    params: EffectiveParams,
    history: History,
    bans: Bans,
    *,
    output_index: int,
    sample_index: int = 0,
    forced: int | None = None,
    record: SamplingRecord | None = None,
    ops: SamplingOps[Any] = NUMPY,
) -> Sampled:
    """Choose the next token of one sample.

    Args:
        logits: float32 [V], as the model gave them; never written to.
        bans: from `prepare_bans`, once per request.
        output_index: which output token this is, from 0.
        sample_index: which of the request's `n` samples this is, from 0.
        forced: take this id instead of the one that would be chosen; it may be a banned one.
        record: filled with what every step did; the result is the same with and without.
        ops: the backend; the result is the same with each.

    Raises:
        NonFiniteLogitsError: NaN, +inf, or no finite logit.
        NoCandidatesError: bans left nothing.
    """
    x = ops.begin(logits)
    before = None if record is None else ops.row(x)
    for step in steps(params, history, bans, ops):
        x = step.apply(x)
        if step.name in _BANS and ops.is_empty(x):
            raise NoCandidatesError(
                f"after {step.name} no token is left to choose from at output token "
                f"{output_index}. Together, allowed_token_ids, bad_words and min_tokens forbid "
                "everything; relax one of them."
            )
        if record is not None and before is not None:
            after = ops.row(x)
            record.add_step(step.name, step.stage, step.params, before, after)
            before = after
    u = None if params.greedy else ops.uniform(params.seed, output_index, sample_index)
    if forced is not None:
        token_id = forced
    else:
        token_id = ops.greedy(x) if u is None else ops.choose(x, u)
    if record is not None:
        record.finish(ops.row(x), u, token_id)
    return Sampled(token_id, u, _scores(logits, x, params, token_id, ops))


def _scores(
    logits: Row, x: Any, params: EffectiveParams, token_id: int, ops: SamplingOps[Any]
) -> dict[int, Logprob] | None:
    """The token and the best beside it in the view that the request chose, if it asked."""
    if params.logprobs is None:
        return None
    mode = params.logprobs_mode
    scored = ops.begin(logits) if mode.startswith("raw") else x
    subtract = ops.log_total(scored) if mode.endswith("logprobs") else 0.0
    return top_logprobs(scored, subtract, token_id, params.logprobs, ops)


_BANS = ("allowed_token_ids", "bad_words", "min_tokens")


def steps(
    params: EffectiveParams, history: History, bans: Bans, ops: SamplingOps[Any] = NUMPY
) -> Iterator[Step]:
    """The steps that are active for these parameters and ids, in order."""
    yield from _ban_steps(params, history, bans, ops)
    yield from _penalty_steps(params, history, ops)
    if params.greedy:
        return  # the highest stays the highest: nothing to scale, nothing to truncate
    if params.temperature != 1:
        apply = partial(ops.temperature, value=params.temperature)
        yield Step("temperature", "S10", {"temperature": params.temperature}, apply)
    yield from _truncation_steps(params, ops)


def _ban_steps(
    params: EffectiveParams, history: History, bans: Bans, ops: SamplingOps[Any]
) -> Iterator[Step]:
    if bans.allowed is not None:
        shown = {"allowed_token_ids": len(bans.allowed)}
        yield Step("allowed_token_ids", "S10", shown, partial(ops.keep_only, ids=bans.allowed))
    bad = bans.bad_ids(history)
    if bad.size:
        yield Step("bad_words", "S10", {"banned": bad.tolist()}, partial(ops.ban, ids=bad))
    reached = len(history.output_ids)
    if reached < params.min_tokens and bans.ends.size:
        shown = {"min_tokens": params.min_tokens, "output_tokens": reached}
        yield Step("min_tokens", "S10", shown, partial(ops.ban, ids=bans.ends))


def _penalty_steps(
    params: EffectiveParams, history: History, ops: SamplingOps[Any]
) -> Iterator[Step]:
    if params.logit_bias:
        shown: dict[str, Any] = {"logit_bias": {str(i): b for i, b in params.logit_bias.items()}}
        yield Step("logit_bias", "S10", shown, partial(ops.logit_bias, bias=params.logit_bias))
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    if penalties == (1, 0, 0):
        return
    output = np.asarray(history.output_ids, dtype=np.intp)
    if params.repetition_penalty != 1:
        seen = np.concatenate([np.asarray(history.prompt_ids, dtype=np.intp), output])
        shown = {"repetition_penalty": params.repetition_penalty}
        apply = partial(ops.repetition_penalty, seen=seen, penalty=params.repetition_penalty)
        yield Step("repetition_penalty", "S10", shown, apply)
    if params.presence_penalty and output.size:
        shown = {"presence_penalty": params.presence_penalty}
        apply = partial(ops.presence_penalty, output=output, penalty=params.presence_penalty)
        yield Step("presence_penalty", "S10", shown, apply)
    if params.frequency_penalty and output.size:
        shown = {"frequency_penalty": params.frequency_penalty}
        apply = partial(ops.frequency_penalty, output=output, penalty=params.frequency_penalty)
        yield Step("frequency_penalty", "S10", shown, apply)


def _truncation_steps(params: EffectiveParams, ops: SamplingOps[Any]) -> Iterator[Step]:
    if params.top_k > 0:
        apply = partial(ops.top_k, k=params.top_k)
        yield Step("top_k", "S11", {"top_k": params.top_k}, apply)
    if params.top_p < 1:
        apply = partial(ops.top_p, p=params.top_p)
        yield Step("top_p", "S11", {"top_p": params.top_p}, apply)
    if params.min_p > 0:
        apply = partial(ops.min_p, share=params.min_p)
        yield Step("min_p", "S11", {"min_p": params.min_p}, apply)
    if params.typical_p < 1:
        apply = partial(ops.typical_p, p=params.typical_p)
        yield Step("typical_p", "S11", {"typical_p": params.typical_p}, apply)
