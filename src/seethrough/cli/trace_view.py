"""A whole trace as text: for every output token each stage with shape, time and a glance.

Reads the trace and the stage table; knows no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from seethrough.cli.messages import Speaker
from seethrough.cli.probability import quoted
from seethrough.cli.table import pad
from seethrough.stages import STAGE, STAGES, Stage
from seethrough.trace.values import DERIVED

if TYPE_CHECKING:
    from seethrough.sampling.record import Candidate, SamplingRecord
    from seethrough.trace.trace import StepTrace, Trace

_SHOWN = 4  # values of a glance
_CANDIDATES = 5
# What these hold are words and numbers of the request, not arrays of a step.
_OPENING = ("S0", "S1", "S2")
WORDS = (*_OPENING, "S13")


def print_trace(trace: Trace, speaker: Speaker) -> None:
    """The request, then one block per output token."""
    print(speaker.text("trace_prompt", n=len(trace.prompt_token_ids)))
    for stage in _OPENING:
        if trace.chosen.wants(stage, None):
            print_words(trace, stage, speaker)
    for step in trace.steps:
        _print_step(trace, step, speaker)
    print()
    print_words(trace, "S13", speaker)


def print_words(trace: Trace, stage_id: str, speaker: Speaker) -> None:
    """One of the stages that hold words, on one line."""
    stage = STAGE[stage_id]
    name = pad(f"{stage.id:<6}{stage.name.pick(speaker.language)}", 32)
    if stage.id == "S13":
        finish = trace.output.outputs[0]
        stop = "" if finish.stop_reason is None else f" ({finish.stop_reason!r})"
        print(f"{name}{speaker.text('trace_end', reason=f'{finish.finish_reason}{stop}')}")
    elif stage.id == "S0":
        params = trace.output.params
        chosen = [
            f"{field}={getattr(params, field)} ({origin})"
            for field, origin in params.origin.items()
            if origin != "engine" or field in ("temperature", "seed")
        ]
        print(f"{name}{', '.join(chosen)}")
    elif stage.id == "S1":
        spent = trace.steps[0].stage_seconds("S1") if trace.steps else None
        print(f"{name}{_time(spent)}{' '.join(map(quoted, trace.prompt_tokens))}")
    else:
        print(f"{name}{_time(None)}{trace.prompt_token_ids}")


def _print_step(trace: Trace, step: StepTrace, speaker: Speaker) -> None:
    token = "–" if step.token_id is None else quoted(trace.output_tokens[step.index])
    print()
    print(
        speaker.text(
            "trace_step",
            index=step.index,
            text=token,
            first=step.positions[0],
            last=step.positions[-1],
        )
    )
    for stage in STAGES:
        if stage.id in (*_OPENING, "S13") or not trace.chosen.wants(stage.id, None):
            continue
        _print_stage(trace, step, stage, speaker)
        if step.record is not None and stage.id in ("S10", "S11"):
            _print_sampling(step.record, stage.id, trace, speaker)
        if stage.id == "S12":
            _print_choice(step, trace, speaker)


def _print_stage(trace: Trace, step: StepTrace, stage: Stage, speaker: Speaker) -> None:
    """One line per value of the stage that the trace holds."""
    held = [key for key in trace.keys(step.index) if key[0] == stage.id]
    outputs = [value.name for value in stage.outputs]
    names = [n for n in dict.fromkeys(key[1] for key in held) if n in outputs]
    title = f"{stage.id:<6}{stage.name.pick(speaker.language)}"
    spent = step.stage_seconds(stage.id)
    if not names:
        silent = stage.id in ("S12",) or any(lost.stage == stage.id for lost in trace.omitted)
        if not silent:
            print(f"{pad(title, 32)}{_time(spent)}{speaker.text('trace_skipped')}")
        return
    for place, name in enumerate(names):
        layers = [key[2] for key in held if key[1] == name and key[2] is not None]
        layer = layers[-1] if layers else None
        value = trace.array(stage.id, name, layer=layer, step=step.index)
        note = speaker.text("trace_layers", n=len(layers), layer=layer) if layers else ""
        if stage.id == "S6.4":  # one operation makes the scores and weighs the values
            note = f"{note} {speaker.text('trace_timed_with', stage='S6.5')}"
        if name in DERIVED:
            note = f"{note} {speaker.text('trace_derived')}".strip()
        first = place == 0
        left = pad(title if first else "", 32) + (_time(spent) if first else _time(None))
        shape = f"{name} {list(value.shape)}"
        print(f"{left}{shape:<28} {glance(value)}  {note}".rstrip())


def glance(value: NDArray[Any]) -> str:
    """Minimum, mean and maximum of the finite values, and the first few of the last row."""
    last = value.reshape(-1, value.shape[-1])[-1][:_SHOWN]
    first = " ".join(f"{x:.3g}" if value.dtype.kind == "f" else f"{x}" for x in last)
    more = " …" if value.size > last.size else ""
    if value.dtype.kind != "f":
        return f"{first}{more}"
    finite = value[np.isfinite(value)]
    if finite.size == 0:
        return "–"
    numbers = finite.astype(np.float64)
    low, mean, high = numbers.min(), numbers.mean(), numbers.max()
    return f"[{low:.3g} … {mean:.3g} … {high:.3g}]  {first}{more}"


def _print_sampling(record: SamplingRecord, stage: str, trace: Trace, speaker: Speaker) -> None:
    """Every active step: its parameters, how many survive, the candidates before and after."""
    vocabulary = trace.spec.vocab_size
    before = vocabulary
    for step in record.steps:
        if step.stage == stage:
            shown = ", ".join(f"{name}={value}" for name, value in step.params.items())
            effect = speaker.text(
                "trace_survivors",
                before=before,
                after=step.survivors,
                mass=f"{step.mass_kept:.1%}",
                changed=step.changed,
            )
            print(f"        {step.name} ({shown}): {effect}")
            print(f"          {speaker.text('trace_before')}  {_candidates(step.before, trace)}")
            print(f"          {speaker.text('trace_after')}  {_candidates(step.after, trace)}")
        before = step.survivors


def _print_choice(step: StepTrace, trace: Trace, speaker: Speaker) -> None:
    """The candidates that were left, u, and what was taken."""
    record = step.record
    if record is None or record.token_id is None:
        return
    print(f"        {_candidates(record.candidates, trace)}")
    drawn = (
        speaker.text("trace_greedy")
        if record.u is None
        else speaker.text("trace_draw", u=f"{record.u:.9f}")
    )
    print(f"        {drawn}")
    chosen = speaker.text(
        "trace_choice",
        id=record.token_id,
        text=quoted(trace.output_tokens[step.index]),
        prob=f"{record.prob or 0:.2%}",
    )
    print(f"        {chosen}")


def _candidates(candidates: list[Candidate], trace: Trace) -> str:
    return "  ".join(
        f"{quoted(trace.texts[c.token_id])} {c.prob:.1%} ({c.logit:.2f})"
        for c in candidates[:_CANDIDATES]
    )


def _time(seconds: float | None) -> str:
    return f"{'–':>9}  " if seconds is None else f"{seconds * 1e3:>6.2f} ms  "
