"""Knows how to have a template rendered by another process within limits; knows no chat."""

from __future__ import annotations

import functools
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import TemplateError
from .template_worker import READY

_WORKER = Path(__file__).with_name("template_worker.py")
_START_SECONDS = 30.0  # a cold start of Python on a busy machine
_GRACE_SECONDS = 0.5  # the worker stops itself first; this long after, it is killed


@dataclass(frozen=True)
class TemplateLimits:
    """What one rendering may use. The text that goes in counts on top of `max_chars`."""

    seconds: float = 2.0
    max_chars: int = 1 << 20


class TemplateProcess:
    """One worker process, started when needed and again after it had to be killed.

    Any thread may call `render`; calls take turns.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._ready = False

    def start(self) -> None:
        """Start the worker without waiting for it, so that the first rendering need not."""
        with self._lock:
            self._ensure()

    def close(self) -> None:
        """End the worker; a later rendering starts a fresh one."""
        with self._lock:
            self._kill()

    def render(self, template: str, variables: Mapping[str, object], limits: TemplateLimits) -> str:
        """The rendered text.

        Raises:
            TemplateError: the template does not compile, raised, or went over a limit.
        """
        payload = json.dumps(variables)
        job = {
            "template": template,
            "variables": variables,
            "seconds": limits.seconds,
            "max_chars": limits.max_chars + len(payload),
        }
        with self._lock:
            reply = self._exchange(json.dumps(job).encode() + b"\n", limits)
        if "text" in reply:
            return reply["text"]
        raise _as_error(reply, limits)

    def _exchange(self, job: bytes, limits: TemplateLimits) -> dict[str, str]:
        self._ensure()
        if not self._ready and self._guarded(b"", _START_SECONDS) != READY:
            self._kill()
            raise TemplateError("the process that renders chat templates did not start")
        self._ready = True
        line = self._guarded(job, limits.seconds + _GRACE_SECONDS)
        if line is None:
            self._kill()
            return {"error": "it ran out of time or memory", "kind": "limit"}
        reply: dict[str, str] = json.loads(line)
        return reply

    def _guarded(self, job: bytes, seconds: float) -> bytes | None:
        """Send and receive; a worker that was left in the middle is not used again."""
        try:
            return self._send_and_receive(job, time.monotonic() + seconds)
        except BrokenPipeError:
            return None
        except BaseException:  # Ctrl-C: the next reply would answer this question
            self._kill()
            raise

    def _ensure(self) -> None:
        """Have a worker of this very process."""
        if self._process is not None and self._owner == os.getpid():
            if self._process.poll() is None:
                return
            self._kill()
        # -P keeps this folder off the worker's path; it finds jinja2 where this process does.
        # Of the environment it needs the time zone alone, and a template has no business there.
        environ = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if "TZ" in os.environ:
            environ["TZ"] = os.environ["TZ"]
        command = [sys.executable, "-P", str(_WORKER)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=environ,
                start_new_session=True,  # Ctrl-C is for this process
            )
        except OSError as error:
            raise TemplateError(f"cannot start {command} to render chats: {error}") from error
        self._owner = os.getpid()
        self._ready = False
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    def _send_and_receive(self, job: bytes, deadline: float) -> bytes | None:
        """The worker's line; None if the deadline passed or the worker ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        out, inn = self._process.stdin.fileno(), self._process.stdout.fileno()
        unsent = memoryview(job)
        chunks: list[bytes] = []
        while True:
            remaining = deadline - time.monotonic()
            writers = [out] if unsent else []
            if remaining <= 0:
                return None
            readable, writable, _ = select.select([inn], writers, [], remaining)
            if writable:
                unsent = unsent[os.write(out, unsent[:65536]) :]
            if readable:
                chunk = os.read(inn, 1 << 20)
                if not chunk:
                    return None
                chunks.append(chunk)
                if chunk.endswith(b"\n"):
                    return b"".join(chunks)

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


@functools.lru_cache(maxsize=1)
def shared_process() -> TemplateProcess:
    """The one worker that all templates of this process share."""
    return TemplateProcess()


def _as_error(reply: Mapping[str, str], limits: TemplateLimits) -> TemplateError:
    if reply["kind"] == "limit":
        return TemplateError(
            f"the chat template was stopped: {reply['error']}. It may take {limits.seconds:g} s "
            f"and make {limits.max_chars} characters more than it is given."
        )
    if reply["kind"] == "syntax":
        return TemplateError(f"the chat template does not compile: {reply['error']}")
    return TemplateError(f"the chat template refused the messages: {reply['error']}")
