"""Renders chat templates in a process of its own; imports jinja2, and nothing of this package.

The process is the limit: a template can use up its time or memory, but then only this process
ends. It reads one JSON object a line from standard input and answers one line on standard output:
{"text": …} or {"error": …, "kind": "template" | "limit"}.
"""

from __future__ import annotations

import json
import signal
import sys
from datetime import datetime
from types import FrameType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

MEMORY_BYTES = 512 << 20
KEPT_TEMPLATES = 8
READY = b"ready\n"  # the first line: Python and jinja2 are loaded


class OverLimitError(BaseException):
    """The template used more time or made more text than it may.

    Not an Exception: jinja2 swallows those while it folds constants.
    """


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks text for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The tag is its body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class GuardedNamespace(jinja2.utils.Namespace):
    """`namespace(...)` that keeps no underscored names, so it cannot shadow Python's own."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        names = dict(*args, **kwargs)
        for name in names:
            _refuse_underscore(name)
        super().__init__(names)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")


def _raise_exception(message: object) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for: that of transformers."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    env.globals["namespace"] = GuardedNamespace
    return env


def _render(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> str:
    parts = []
    made = 0
    for part in template.generate(**variables):
        made += len(part)
        if made > max_chars:
            raise OverLimitError(f"it made more than {max_chars} characters")
        parts.append(part)
    return "".join(parts)


def answer(
    env: jinja2.Environment, known: dict[str, jinja2.Template], job: dict[str, Any]
) -> dict[str, str]:
    """Render one job; whatever the template does wrong becomes an answer."""
    try:
        signal.setitimer(signal.ITIMER_REAL, job["seconds"])
        _limit_cpu(job["seconds"])
        template = known.get(job["template"])
        if template is None:
            if len(known) >= KEPT_TEMPLATES:
                known.pop(next(iter(known)))
            template = known[job["template"]] = env.from_string(job["template"])
        text = _render(template, job["variables"], job["max_chars"])
        text.encode("utf-8")
        return {"text": text}
    except OverLimitError as error:
        return {"error": str(error), "kind": "limit"}
    except MemoryError:
        return {"error": "it used too much memory", "kind": "limit"}
    except RecursionError:
        return {"error": "it calls itself too deeply", "kind": "limit"}
    except jinja2.exceptions.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}", "kind": "syntax"}
    except jinja2.exceptions.SecurityError as error:
        return {"error": f"unsafe: {error}", "kind": "template"}
    except jinja2.exceptions.TemplateError as error:
        return {"error": str(error.message), "kind": "template"}
    except Exception as error:  # noqa: BLE001 - a template can raise anything
        return {"error": f"{type(error).__name__}: {error}"[:2000], "kind": "template"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _out_of_time(_signal: int, _frame: FrameType | None) -> None:
    raise OverLimitError("it ran out of time")


def _limit_process() -> None:
    try:
        import resource
    except ImportError:  # not on Windows; the parent's own deadline still holds
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_cpu(seconds: float) -> None:
    """End the process, whatever it is doing, some CPU seconds from now: no parent may be left."""
    try:
        import resource
    except ImportError:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    allowed = int(used.ru_utime + used.ru_stime + seconds) + 3
    resource.setrlimit(resource.RLIMIT_CPU, (allowed, resource.RLIM_INFINITY))


def main() -> None:
    """Answer jobs until standard input ends."""
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    env = environment()
    known: dict[str, jinja2.Template] = {}
    _limit_process()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sink.write(READY)
    sink.flush()
    for line in source:
        reply = answer(env, known, json.loads(line))
        sink.write(json.dumps(reply).encode() + b"\n")
        sink.flush()


if __name__ == "__main__":
    main()
