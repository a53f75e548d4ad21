"""`seethrough diff A B "prompt"`: two models, or two ways to run one, stage by stage.

A and B are MODEL[,NAME=VALUE…]: a model with engine settings and sampling parameters of its own.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from seethrough.cli.diff_view import print_diff
from seethrough.cli.flags import name_value
from seethrough.cli.loading import load_llm, read_prompt, report_errors
from seethrough.cli.messages import Speaker
from seethrough.cli.terminal import print_json
from seethrough.cli.trace import keep, selection
from seethrough.config import EngineConfig
from seethrough.errors import ParameterError
from seethrough.sampling.params import SamplingParams

if TYPE_CHECKING:
    from seethrough.llm import LLM
    from seethrough.trace.trace import Trace

_DEFAULT_TOKENS = 3
_DEFAULT_TOLERANCE = 1e-2
_SETTINGS = tuple(field.name for field in fields(EngineConfig))
_SAMPLING = tuple(field.name for field in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class Side:
    """A or B: which model, how it is run, and what is sampled."""

    model: str | None
    settings: dict[str, Any]
    sampling: dict[str, Any]


def run(arguments: argparse.Namespace, speaker: Speaker) -> int:
    """Trace A, let B follow its ids, compare."""
    from seethrough.trace.diff import diff

    tolerance = _tolerance(arguments)
    a_side, b_side = (_side(name, getattr(arguments, name.lower()), speaker) for name in "AB")
    prompt = read_prompt(arguments, speaker)
    if arguments.max_tokens is None:
        arguments.max_tokens = _DEFAULT_TOKENS
    seen = selection(arguments)
    a = _traced(a_side, arguments, speaker, lambda llm, ask: llm.trace(prompt, **ask, **seen))
    gc.collect()  # A's weights go before B's come
    b = _traced(b_side, arguments, speaker, lambda llm, ask: llm.follow(a, **ask, **seen))
    found = diff(a, b)
    if arguments.json:
        body = {"a": arguments.a, "b": arguments.b, **found.to_dict(tolerance)}
        print_json(body)
    else:
        every = arguments.layer is not None or arguments.stage is not None
        print_diff(found, a, tolerance, speaker, every_layer=every)
    for trace in (a, b):
        keep(trace, arguments, speaker)
    failed = max(report_errors(trace.output, speaker) for trace in (a, b))
    return 1 if failed or (arguments.check and not found.identical) else 0


def _tolerance(arguments: argparse.Namespace) -> float:
    tolerance = _DEFAULT_TOLERANCE if arguments.tolerance is None else arguments.tolerance
    if not 0 <= tolerance < math.inf:
        raise ParameterError("--tolerance", tolerance, "0 or more is expected")
    return float(tolerance)


def _side(name: str, spec: str | None, speaker: Speaker) -> Side:
    """Take MODEL[,NAME=VALUE…] apart; a value with commas goes into the next flag, not here."""
    if spec is None:
        raise ParameterError(name, "", speaker.text("diff_sides"))
    model, *given = spec.split(",")
    settings: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for part in given:
        try:
            key, value = name_value(part)
        except argparse.ArgumentTypeError as error:
            raise ParameterError(name, spec, str(error)) from None
        if key in _SETTINGS:
            settings[key] = value
        elif key in _SAMPLING:
            sampling[key] = value
        else:
            known = ", ".join((*_SETTINGS, *_SAMPLING))
            raise ParameterError(f"{name}: {key}", value, f"no such setting; known: {known}")
    SamplingParams.from_dict(sampling)
    EngineConfig(**settings)
    return Side(model or None, settings, sampling)


def _traced(
    side: Side,
    arguments: argparse.Namespace,
    speaker: Speaker,
    work: Callable[[LLM, dict[str, Any]], Trace],
) -> Trace:
    """Load one side, trace, let it go."""
    own = argparse.Namespace(**vars(arguments))
    own.model = side.model or arguments.model
    for name, value in side.settings.items():
        setattr(own, name, value)
    # Every position's logits are wanted, and only the trace holds them.
    return work(load_llm(own, speaker), {**side.sampling, "prompt_logprobs": 0})
