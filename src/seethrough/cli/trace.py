"""`seethrough trace`: every stage of every token with its real numbers, or one matrix of them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from seethrough.cli.loading import as_chat, load_llm, read_prompt, report_errors
from seethrough.cli.matrix import print_matrix
from seethrough.cli.messages import Speaker, size_text
from seethrough.cli.terminal import print_json
from seethrough.cli.trace_view import WORDS, print_trace, print_words
from seethrough.errors import ParameterError
from seethrough.trace.filter import DEFAULT_BYTE_BUDGET

if TYPE_CHECKING:
    from seethrough.trace.trace import Trace

_DEFAULT_TOKENS = 3


def run(arguments: argparse.Namespace, speaker: Speaker) -> int:
    """Trace a prompt and show what was asked for."""
    prompt = read_prompt(arguments, speaker)
    if arguments.max_tokens is None:
        arguments.max_tokens = _DEFAULT_TOKENS
    check_selection(arguments)
    llm = load_llm(arguments, speaker)
    trace = llm.trace(
        prompt if arguments.system is None else as_chat(prompt, arguments.system),
        **selection(arguments),
    )
    if arguments.json:
        print_json(trace.to_dict())
    else:
        show(trace, arguments, speaker)
    keep(trace, arguments, speaker)
    return report_errors(trace.output, speaker)


def selection(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the flags say that a trace shall hold; one matrix needs nothing but itself."""
    given = vars(arguments)
    kinds = ("stage", "layer", "head", "token")
    chosen = {f"{kind}s": _only(given.get(kind)) or given.get(f"{kind}s") for kind in kinds}
    return {**chosen, "byte_budget": arguments.byte_budget or DEFAULT_BYTE_BUDGET}


def show(trace: Trace, arguments: argparse.Namespace, speaker: Speaker) -> None:
    """Print one matrix, or one stage in words, or all of it."""
    if arguments.stage in WORDS:
        print_words(trace, arguments.stage, speaker)
    elif arguments.stage is not None:
        print_matrix(
            trace, arguments.stage, arguments.value, arguments.layer, arguments.head, speaker
        )
    else:
        print_trace(trace, speaker)


def keep(trace: Trace, arguments: argparse.Namespace, speaker: Speaker) -> None:
    """Write the file that was asked for, and say what did not fit into the trace."""
    if getattr(arguments, "out", None) is not None:
        trace.save(arguments.out)
        speaker.note("trace_written", path=arguments.out)
    if trace.omitted:
        first = trace.omitted[0]
        speaker.complain(
            "trace_omitted",
            count=len(trace.omitted),
            budget=size_text(trace.chosen.byte_budget),
            first=f"{first.stage} {first.name}",
        )


def check_selection(arguments: argparse.Namespace) -> None:
    """One matrix is named by --stage; the others only make sense with it."""
    for name in ("layer", "head", "token", "value"):
        if getattr(arguments, name) is not None and arguments.stage is None:
            raise ParameterError(f"--{name}", getattr(arguments, name), "needs --stage")


def _only(value: Any) -> list[Any] | None:
    return None if value is None else [value]
