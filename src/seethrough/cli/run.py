"""`seethrough run`: complete one prompt, streamed."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from seethrough.cli.loading import (
    as_chat,
    colored,
    load_llm,
    read_prompt,
    report_errors,
    report_recording,
    report_timing,
)
from seethrough.cli.messages import Speaker
from seethrough.cli.probability import paint, print_alternatives
from seethrough.cli.terminal import as_shown, print_json

if TYPE_CHECKING:
    from seethrough.engine.outputs import Delta, RequestOutput
    from seethrough.llm import LLM, Stream


def run(arguments: argparse.Namespace, speaker: Speaker) -> int:
    """Stream the text to standard output; everything else goes to standard error."""
    prompt = read_prompt(arguments, speaker)
    llm = load_llm(arguments, speaker)
    stream = _start(llm, prompt, arguments.system)
    interrupted = False
    printer = Printer(color=colored(arguments), silent=bool(arguments.json))
    try:
        for delta in stream:
            printer.show(delta)
    except KeyboardInterrupt:
        interrupted = True
    stream.close()
    output = stream.output()
    if arguments.json:
        from seethrough.engine.outputs import to_json

        print_json(to_json(output, llm.report.load_ms))
    else:
        printer.finish(output, speaker)
        _show_logprobs(output, speaker)
    code = report_errors(output, speaker)
    report_timing(output, llm.report.load_ms, speaker)
    report_recording(llm, output.request_id, speaker)
    return 130 if interrupted else code


def _start(llm: LLM, prompt: str, system: str | None) -> Stream:
    if system is None:
        return llm.stream(prompt)
    return llm.stream_chat(as_chat(prompt, system))


class Printer:
    """Writes text as it comes. Samples after the first wait for the end: one text at a time."""

    def __init__(self, *, color: bool, silent: bool) -> None:
        self._color = color
        self._silent = silent
        self._written = 0

    def show(self, delta: Delta) -> None:
        """Write what one step added to the first sample."""
        if self._silent or delta.index != 0 or not delta.text:
            return
        self._written += len(delta.text)
        text = as_shown(delta.text)
        if self._color:
            text = paint(text, delta.token_ids, delta.logprobs)
        print(text, end="", flush=True)

    def finish(self, output: RequestOutput, speaker: Speaker) -> None:
        """Write what an interrupt left over, then the other samples."""
        first, *others = output.outputs
        print(as_shown(first.text[self._written :]))
        for sample in others:
            print(speaker.text("sample", index=sample.index))
            print(as_shown(sample.text))
        sys.stdout.flush()


def _show_logprobs(output: RequestOutput, speaker: Speaker) -> None:
    for sample in output.outputs:
        if sample.logprobs:
            print_alternatives(sample.token_ids, sample.logprobs, output.params.logprobs_mode)
