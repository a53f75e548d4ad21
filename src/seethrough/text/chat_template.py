"""Knows how messages become the text that a model's chat template makes of them.

Templates come with models, so they are hostile until proven otherwise: each is rendered in
Jinja's immutable sandbox, in a helper process with limits on memory, time and output.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from ..errors import ParameterError, TemplateError

MAX_CHARS = 1_000_000
MAX_SECONDS = 2.0
MAX_MEMORY = 512 * 1024 * 1024
_START_SECONDS = 20.0  # a helper process on a loaded machine
_RESERVED = (
    "messages",
    "tools",
    "documents",
    "bos_token",
    "eos_token",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "chat_template",
)

Message = Mapping[str, Any]


def render_chat(
    template: str | None,
    messages: Sequence[Message],
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    max_seconds: float = MAX_SECONDS,
    **arguments: Any,
) -> str:
    """The conversation as text, special tokens spelled out.

    Args:
        template: Jinja source, as the model ships it.
        messages: objects with `role` and `content` (a string, null, or a list of text parts).
        arguments: further variables of the template, under their own names.

    Raises:
        TemplateError: there is no template, it does not compile, it refused the messages (with its
            own words), or it went over its limits.
        ParameterError: a message that no template can take, or a reserved argument.
    """
    if template is None:
        raise TemplateError(
            "this model has no chat template. Give one (chat_template=...), or complete a plain "
            "prompt instead of a chat."
        )
    for name in arguments:
        if name in _RESERVED:
            raise ParameterError(name, arguments[name], "reserved: the engine sets it itself")
    variables = {
        **arguments,
        "messages": [check_message(message) for message in messages],
        "tools": tools,
        "documents": documents,
        "add_generation_prompt": add_generation_prompt,
    }
    tokens = {"bos_token": bos_token, "eos_token": eos_token}
    variables |= {name: token for name, token in tokens.items() if token is not None}
    request = {"template": template, "variables": variables, "max_chars": MAX_CHARS}
    try:
        line = json.dumps(request)
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError(
            "messages", type(messages), f"cannot be sent as JSON: {error}"
        ) from None
    reply = _worker.ask(line, max_seconds)
    if "error" in reply:
        raise TemplateError(f"the chat template {reply['error']}")
    return str(reply["text"])


def check_message(message: Any) -> dict[str, Any]:
    """A message as templates expect it: null content is empty text, parts are text only.

    Raises:
        ParameterError: names what is wrong.
    """
    if not isinstance(message, Mapping):
        raise ParameterError("messages", message, 'an object such as {"role": …, "content": …}')
    if not isinstance(message.get("role"), str):
        raise ParameterError("messages", dict(message), "a message needs a role (a string)")
    checked = dict(message)
    content = checked.get("content")
    if content is None:
        checked["content"] = ""
    elif isinstance(content, list):
        checked["content"] = [_check_part(part) for part in content]
    elif not isinstance(content, str):
        raise ParameterError("content", content, "a string or a list of text parts is expected")
    return checked


def _check_part(part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise ParameterError("content", kind, "only text parts are supported by this model")
    if not isinstance(part.get("text"), str):
        raise ParameterError("content", part, "a text part needs a text (a string)")
    return dict(part)


class _Worker:
    """The helper process: started on first use, and anew after it had to be ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, line: str, seconds: float) -> dict[str, Any]:
        """Send one request, wait for its reply; the process dies if it takes too long."""
        with self._lock:
            process = self._running()
            reply = self._exchange(process, line.encode("utf-8") + b"\n", seconds)
        if reply is None:
            return {"error": f"took longer than {seconds} s, or more memory than it may, to render"}
        answer: dict[str, Any] = json.loads(reply)
        return answer

    def stop(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.stop()
            script = Path(__file__).with_name("template_worker.py")
            self._process = subprocess.Popen(
                [sys.executable, str(script), str(MAX_MEMORY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TZ": _time_zone()},
                start_new_session=True,  # Ctrl-C is for the caller
            )
            hello = {"template": "", "variables": {"messages": []}, "max_chars": 1}
            line = json.dumps(hello).encode() + b"\n"
            if self._exchange(self._process, line, _START_SECONDS) is None:
                raise TemplateError("the process that renders chat templates did not start")
        return self._process

    def _exchange(
        self, process: subprocess.Popen[bytes], line: bytes, seconds: float
    ) -> bytes | None:
        """Write a line and read one; None, and no process any more, if that took too long."""
        if process.stdin is None or process.stdout is None:
            raise TemplateError("the process that renders chat templates has no pipes")
        try:
            process.stdin.write(line)
            process.stdin.flush()
            return _read_line(process.stdout.fileno(), monotonic() + seconds)
        except (BrokenPipeError, EOFError, TimeoutError):
            self.stop()
            return None
        except BaseException:  # Ctrl-C in between: the next reply would answer the last question
            self.stop()
            raise


def _read_line(fd: int, deadline: float) -> bytes:
    """Read up to the end of a line; TimeoutError at the deadline, EOFError if the pipe closes."""
    data = bytearray()
    while not data.endswith(b"\n"):
        left = deadline - monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            raise TimeoutError
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def _time_zone() -> str:
    return os.environ.get("TZ", "")


_worker = _Worker()
atexit.register(_worker.stop)
