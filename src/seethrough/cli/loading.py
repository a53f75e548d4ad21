"""What verbs that run a model have in common: reading the prompt, loading, the closing line."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from seethrough.cli.messages import Speaker, size_text
from seethrough.cli.options import engine_settings, recording, sampling_params
from seethrough.cli.terminal import printable
from seethrough.errors import ParameterError
from seethrough.weights.catalog import DEFAULT_MODEL

if TYPE_CHECKING:
    from seethrough.engine.load import LoadReport
    from seethrough.engine.outputs import RequestOutput
    from seethrough.llm import LLM


def read_prompt(arguments: argparse.Namespace, speaker: Speaker) -> str:
    """The prompt of the command line, of standard input (-), or of --file."""
    prompt, file = arguments.prompt, arguments.file
    if prompt is not None and file is not None:
        raise ParameterError("--file", str(file), speaker.text("two_prompts"))
    if file is not None:
        return read_text(file, speaker)
    if prompt is None:
        raise ParameterError("prompt", "", speaker.text("no_prompt"))
    return read_text(Path("/dev/stdin"), speaker) if prompt == "-" else str(prompt)


def read_text(path: Path, speaker: Speaker) -> str:
    """A UTF-8 text, as it is."""
    try:
        raw = sys.stdin.buffer.read() if str(path) == "/dev/stdin" else path.read_bytes()
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = speaker.text("unreadable", path=path, why=error)
        raise ParameterError("--file", str(path), why) from None


def as_chat(prompt: str, system: str) -> list[dict[str, str]]:
    """A system message and the prompt as a conversation."""
    return [{"role": "system", "content": system}, {"role": "user", "content": prompt}]


def load_llm(arguments: argparse.Namespace, speaker: Speaker) -> LLM:
    """Load the model that the flags name, and say what was needed, found and chosen."""
    from seethrough.llm import LLM

    bar = ProgressLine(speaker)
    llm = LLM(
        arguments.model or DEFAULT_MODEL,
        defaults=sampling_params(arguments),
        cache_dir=arguments.cache_dir,
        progress=bar.show,
        **recording(arguments),
        **engine_settings(arguments),
    )
    bar.clear()
    report_loading(llm.report, speaker)
    return llm


def report_loading(report: LoadReport, speaker: Speaker) -> None:
    """Two lines: what is needed and what is there; what was chosen."""
    speaker.note(
        "loading",
        name=report.name,
        family=report.family,
        stored=size_text(report.stored),
        expanded=size_text(report.expanded),
        available=size_text(report.available),
    )
    speaker.note(
        "chosen",
        context=report.max_model_len,
        model_context=report.model_max_len,
        kv=size_text(report.kv_bytes),
        blocks=report.num_kv_blocks,
        block_size=report.block_size,
        dtype=report.kv_dtype,
        threads=report.threads,
        backend=report.backend if report.cpu_path is None else f"cpu ({report.cpu_path})",
    )
    if report.compiled_kernels:
        seconds = f"{report.phases['kernels'] / 1e3:.1f}"
        speaker.note("compiled", count=report.compiled_kernels, seconds=seconds)
    if report.left_aside:
        speaker.note("left_aside", names=", ".join(report.left_aside))
    for note in report.notes:
        if not speaker.quiet:
            print(printable(note), file=sys.stderr)


def report_timing(output: RequestOutput, load_ms: float, speaker: Speaker) -> None:
    """The one line at the end."""
    metrics, first = output.metrics, output.outputs[0]
    stop = "" if first.stop_reason is None else f" ({first.stop_reason!r})"

    def ms(value: float | None) -> str:
        return "–" if value is None else f"{value:.0f}"

    speaker.note(
        "timing",
        prompt=metrics.prompt_tokens,
        completion=metrics.completion_tokens,
        load=ms(load_ms),
        ttft=ms(metrics.ttft_ms),
        tpot=ms(metrics.tpot_ms),
        rate="–" if not metrics.tpot_ms else f"{1000 / metrics.tpot_ms:.1f}",
        reason=f"{first.finish_reason}{stop}",
    )


def report_recording(llm: LLM, request_id: str, speaker: Speaker) -> None:
    """Say under which id the request was kept, or why it was not."""
    llm.recorder.flush()
    if llm.recorder.problem is not None:
        speaker.complain("unrecorded", why=llm.recorder.problem)
    elif llm.recorder.stores:
        speaker.note("recorded", id=request_id)


def report_errors(output: RequestOutput, speaker: Speaker) -> int:
    """Say which samples failed; the exit code."""
    failed = [sample for sample in output.outputs if sample.error is not None]
    for sample in failed:
        speaker.complain("failed", why=sample.error)
    return 1 if failed else 0


class ProgressLine:
    """One line on a terminal that says how far long work is; nothing where there is none."""

    def __init__(self, speaker: Speaker) -> None:
        self._speaker = speaker
        self._on = sys.stderr.isatty() and not speaker.quiet
        self._last = ""

    def show(self, what: str, done: int, total: int | None) -> None:
        """Report progress."""
        percent = done * 100 // total if total else 0
        line = self._speaker.text("progress", what=what, percent=percent)
        if self._on and line != self._last:
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
            self._last = line

    def clear(self) -> None:
        """Take the line away."""
        if self._last:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def colored(arguments: argparse.Namespace) -> bool:
    """Whether to colour: --color, then NO_COLOR, then whether standard output is a terminal."""
    if arguments.color in ("always", "never"):
        return bool(arguments.color == "always")
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
