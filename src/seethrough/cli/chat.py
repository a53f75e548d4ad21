"""`seethrough chat`: several turns with the model's own template.

Every turn renders the whole history and is a request of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seethrough.cli.flags import json_or_text
from seethrough.cli.loading import (
    colored,
    load_llm,
    report_errors,
    report_recording,
    report_timing,
)
from seethrough.cli.messages import Speaker
from seethrough.cli.probability import paint
from seethrough.cli.terminal import as_shown, print_json
from seethrough.errors import ParameterError, SeethroughError
from seethrough.sampling.params import SamplingParams

if TYPE_CHECKING:
    from seethrough.llm import LLM


def run(arguments: argparse.Namespace, speaker: Speaker) -> int:
    """Read, answer, repeat; end of input ends with 0, an interrupt at the prompt with 130."""
    llm = load_llm(arguments, speaker)
    conversation = Conversation(llm, speaker, arguments.system, color=colored(arguments))
    if sys.stdin.isatty():
        import readline  # noqa: F401 - line editing for input()

        speaker.note("chat_hello", name=llm.report.name)
    while (line := _read_line()) is not None:
        if not line.strip():
            continue
        try:
            if line.startswith("/"):
                if not conversation.command(line):
                    return 0
            else:
                conversation.say(line)
        except SeethroughError as error:  # the conversation stays as it was
            speaker.complain("error", why=error)
    return 0


def _read_line() -> str | None:
    """The next line without its end, or None when there is no more."""
    if sys.stdin.isatty():
        try:
            return input("> ")
        except EOFError:
            print()
            return None
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


class Conversation:
    """The turns so far, the system message, and the parameters that were set on the way."""

    def __init__(self, llm: LLM, speaker: Speaker, system: str | None, *, color: bool) -> None:
        self._llm = llm
        self._speaker = speaker
        self._system = system
        self._color = color
        self._turns: list[dict[str, str]] = []
        self._params: dict[str, Any] = {}
        self._commands: dict[str, Callable[[str], None]] = {
            "/clear": self._clear,
            "/drop": self._drop,
            "/system": self._set_system,
            "/params": self._set_params,
            "/save": self._save,
            "/help": self._help,
        }

    @property
    def messages(self) -> list[dict[str, str]]:
        """The whole history, system message first."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return system + self._turns

    def say(self, text: str) -> None:
        """One turn. An error leaves the history as it was; an interrupt keeps what was said."""
        asked = {"role": "user", "content": text}
        params = SamplingParams.from_dict(self._params)
        stream = self._llm.stream_chat([*self.messages, asked], params)
        written, stopped = 0, False
        try:
            for delta in stream:
                if delta.index == 0:
                    written += len(delta.text)
                    shown = as_shown(delta.text)
                    if self._color:
                        shown = paint(shown, delta.token_ids, delta.logprobs)
                    print(shown, end="", flush=True)
        except KeyboardInterrupt:
            stopped = True
        stream.close()
        output = stream.output()
        print(as_shown(output.outputs[0].text[written:]), flush=True)
        if stopped:
            self._speaker.note("chat_stopped")
        if report_errors(output, self._speaker) == 0:
            self._turns += [asked, {"role": "assistant", "content": output.outputs[0].text}]
        report_timing(output, self._llm.report.load_ms, self._speaker)
        report_recording(self._llm, output.request_id, self._speaker)

    def command(self, line: str) -> bool:
        """Carry out a slash command; False ends the chat."""
        name, _, rest = line.strip().partition(" ")
        if name in ("/quit", "/exit"):
            return False
        act = self._commands.get(name)
        if act is None:
            self._speaker.complain("chat_unknown", name=name)
        else:
            act(rest.strip())
        return True

    def _clear(self, _: str) -> None:
        self._turns.clear()
        self._speaker.note("chat_cleared")

    def _drop(self, _: str) -> None:
        self._speaker.note("chat_dropped" if self._turns else "chat_nothing")
        del self._turns[-2:]

    def _set_system(self, text: str) -> None:
        if text:
            self._system = text
        if self._system is None:
            self._speaker.note("chat_no_system")
        else:
            self._speaker.note("chat_system", text=self._system)

    def _set_params(self, text: str) -> None:
        """`name=value …`; a value is read as JSON, or else as text. null takes it back."""
        wanted = dict(self._params)
        for word in text.split():
            name, equals, value = word.partition("=")
            if not equals:
                raise ParameterError(name, "", "name=value is expected")
            wanted[name] = json_or_text(value)
        SamplingParams.from_dict(wanted)
        self._params = {name: value for name, value in wanted.items() if value is not None}
        effective = self._llm.effective(SamplingParams.from_dict(self._params))
        print_json(effective.to_dict())

    def _save(self, path: str) -> None:
        if not path:
            self._speaker.complain("chat_save_where")
            return
        body = {"model": self._llm.report.name, "params": self._params, "messages": self.messages}
        try:
            Path(path).write_text(json.dumps(body, ensure_ascii=False, indent=2) + "\n", "utf-8")
        except OSError as error:
            self._speaker.complain("unreadable", path=path, why=error.strerror)
        else:
            self._speaker.note("chat_saved", path=path)

    def _help(self, _: str) -> None:
        self._speaker.note("chat_help")
