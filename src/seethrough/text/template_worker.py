"""Knows how to render one chat template after another, in a process of its own with hard limits.

Run as a file: it imports nothing of the package. Requests and replies are JSON, one per line.
The limits are the operating system's, so no template can reason its way around them.
"""

from __future__ import annotations

import datetime
import json
import resource
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant wrote; it renders as is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Any) -> nodes.Node:
        """The tag is its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes HTML, which is wrong in a prompt."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def raise_exception(message: str) -> None:
    """What templates call to refuse messages."""
    raise jinja2.exceptions.TemplateError(message)


def strftime_now(form: str) -> str:
    """Today's date, as templates print it."""
    return datetime.datetime.now().strftime(form)


def environment() -> ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


@lru_cache(maxsize=8)
def compiled(source: str) -> tuple[jinja2.Template, bool]:
    """The template, and whether it wants message contents as lists of parts."""
    env = environment()
    return env.from_string(source), iterates_content(env.parse(source))


def iterates_content(tree: nodes.Template) -> bool:
    """Whether the template loops over a message's content (or over a name given its value)."""
    names = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node, set())
    }
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


def flatten(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lists of text parts as one string, for templates that expect a string."""
    flat = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            text = "\n".join(part["text"] for part in content)
            message = {**message, "content": text}
        flat.append(message)
    return flat


def render(request: dict[str, Any]) -> dict[str, Any]:
    """One request: template, variables, limit; the reply is a text or an error."""
    try:
        template, lists = compiled(request["template"])
        variables = request["variables"]
        if not lists:
            variables["messages"] = flatten(variables["messages"])
        return {"text": bounded(template.generate(**variables), request["max_chars"])}
    except jinja2.exceptions.TemplateSyntaxError as error:
        return {"error": f"does not compile: line {error.lineno}: {error.message}"}
    except jinja2.exceptions.SecurityError as error:
        return {"error": f"tried something that is not allowed: {error}"}
    except jinja2.exceptions.TemplateError as error:
        return {"error": f"refused the messages: {error.message}"}
    except MemoryError:
        return {"error": "went over its memory limit"}
    except RecursionError:
        return {"error": "nests too deeply"}
    except Exception as error:  # noqa: BLE001 - a template may raise anything; it is reported
        return {"error": f"failed: {type(error).__name__}: {error}"}


def bounded(pieces: Iterator[str], most: int) -> str:
    """The joined output, or an error as soon as it is too long."""
    text, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > most:
            raise jinja2.exceptions.TemplateError(f"the output is longer than {most} characters")
        text.append(piece)
    return "".join(text)


def main() -> None:
    """Serve until the other end closes."""
    memory = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        reply = json.dumps(render(json.loads(line)))
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
