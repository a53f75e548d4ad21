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
from seethrough.sampling import adjust, truncate
from seethrough.sampling.bans import Bans, History
from seethrough.sampling.choose import choose, greedy
from seethrough.sampling.logprobs import Logprob, check_finite, top_logprobs, view
from seethrough.sampling.params import EffectiveParams
from seethrough.sampling.philox import uniform
from seethrough.sampling.record import SamplingRecord
from seethrough.sampling.softmax import Row

__all__ = ["History", "Sampled", "Step", "sample", "steps"]


class Step(NamedTuple):
    """One active step: its name, stage, the parameters to show, and what it does to a row."""

    name: str
    stage: Literal["S10", "S11"]
    params: dict[str, Any]
    apply: Callable[[Row], Row]


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
    record: SamplingRecord | None = None,
) -> Sampled:
    """Choose the next token of one sample.

    Args:
        logits: float32 [V], as the model gave them; never written to.
        bans: from `prepare_bans`, once per request.
        output_index: which output token this is, from 0.
        sample_index: which of the request's `n` samples this is, from 0.
        record: filled with what every step did; the result is the same with and without.

    Raises:
        NonFiniteLogitsError: NaN, +inf, or no finite logit.
        NoCandidatesError: bans left nothing.
    """
    check_finite(logits)
    row = logits
    for step in steps(params, history, bans):
        after = step.apply(row)
        if step.name in _BANS and np.isneginf(after.max()):
            raise NoCandidatesError(
                f"after {step.name} no token is left to choose from at output token "
                f"{output_index}. Together, allowed_token_ids, bad_words and min_tokens forbid "
                "everything; relax one of them."
            )
        if record is not None:
            record.add_step(step.name, step.stage, step.params, row, after)
        row = after
    u = None if params.greedy else uniform(params.seed, output_index, sample_index)
    token_id = greedy(row) if u is None else choose(row, u)[1]
    if record is not None:
        record.finish(row, u, token_id)
    logprobs = None
    if params.logprobs is not None:
        scores, subtract = view(params.logprobs_mode, logits, row)
        logprobs = top_logprobs(scores, subtract, token_id, params.logprobs)
    return Sampled(token_id, u, logprobs)


_BANS = ("allowed_token_ids", "bad_words", "min_tokens")


def steps(params: EffectiveParams, history: History, bans: Bans) -> Iterator[Step]:
    """The steps that are active for these parameters and ids, in order."""
    yield from _ban_steps(params, history, bans)
    yield from _penalty_steps(params, history)
    if params.greedy:
        return  # the highest stays the highest: nothing to scale, nothing to truncate
    if params.temperature != 1:
        apply = partial(adjust.temperature, value=params.temperature)
        yield Step("temperature", "S10", {"temperature": params.temperature}, apply)
    yield from _truncation_steps(params)


def _ban_steps(params: EffectiveParams, history: History, bans: Bans) -> Iterator[Step]:
    if bans.allowed is not None:
        shown = {"allowed_token_ids": len(bans.allowed)}
        yield Step("allowed_token_ids", "S10", shown, partial(adjust.keep_only, ids=bans.allowed))
    bad = bans.bad_ids(history)
    if bad.size:
        yield Step("bad_words", "S10", {"banned": bad.tolist()}, partial(adjust.ban, ids=bad))
    reached = len(history.output_ids)
    if reached < params.min_tokens and bans.ends.size:
        shown = {"min_tokens": params.min_tokens, "output_tokens": reached}
        yield Step("min_tokens", "S10", shown, partial(adjust.ban, ids=bans.ends))


def _penalty_steps(params: EffectiveParams, history: History) -> Iterator[Step]:
    if params.logit_bias:
        shown: dict[str, Any] = {"logit_bias": {str(i): b for i, b in params.logit_bias.items()}}
        yield Step("logit_bias", "S10", shown, partial(adjust.logit_bias, bias=params.logit_bias))
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    if penalties == (1, 0, 0):
        return
    output = np.asarray(history.output_ids, dtype=np.intp)
    if params.repetition_penalty != 1:
        seen = np.concatenate([np.asarray(history.prompt_ids, dtype=np.intp), output])
        shown = {"repetition_penalty": params.repetition_penalty}
        apply = partial(adjust.repetition_penalty, seen=seen, penalty=params.repetition_penalty)
        yield Step("repetition_penalty", "S10", shown, apply)
    if params.presence_penalty and output.size:
        shown = {"presence_penalty": params.presence_penalty}
        apply = partial(adjust.presence_penalty, output=output, penalty=params.presence_penalty)
        yield Step("presence_penalty", "S10", shown, apply)
    if params.frequency_penalty and output.size:
        shown = {"frequency_penalty": params.frequency_penalty}
        apply = partial(adjust.frequency_penalty, output=output, penalty=params.frequency_penalty)
        yield Step("frequency_penalty", "S10", shown, apply)


def _truncation_steps(params: EffectiveParams) -> Iterator[Step]:
    if params.top_k > 0:
        apply = partial(truncate.top_k, k=params.top_k)
        yield Step("top_k", "S11", {"top_k": params.top_k}, apply)
    if params.top_p < 1:
        apply = partial(truncate.top_p, p=params.top_p)
        yield Step("top_p", "S11", {"top_p": params.top_p}, apply)
    if params.min_p > 0:
        apply = partial(truncate.min_p, share=params.min_p)
        yield Step("min_p", "S11", {"min_p": params.min_p}, apply)
    if params.typical_p < 1:
        apply = partial(truncate.typical_p, p=params.typical_p)
        yield Step("typical_p", "S11", {"typical_p": params.typical_p}, apply)
