"""Knows how messages become one prompt text through a model's chat template; knows no ids."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jinja2
from jinja2 import nodes

from ..errors import ParameterError, TemplateError
from .messages import normalize_messages, plain_data
from .template_process import TemplateLimits, TemplateProcess, shared_process
from .template_worker import environment

RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
        "chat_template",
        "template",
        "tokenize",
        "conversation",
    }
)
_TAIL = "CONTINUE_FINAL_MESSAGE_TAG "
_NO_TEMPLATE = (
    "this model has no chat template, so a chat cannot be turned into a prompt. Give one with "
    "--chat-template FILE (a Jinja template), or send a plain prompt to completions."
)


@dataclass(frozen=True)
class TemplateFacts:
    """What the template's source tells before it is run."""

    content_as_list: bool  # it loops over the parts of a message's content
    asks_if_string: bool  # it tests whether something is a string
    compared: frozenset[
        str
    ]  # strings that it looks for: `'</think>' in content`, split('</think>')


class ChatTemplate:
    """One model's chat template.

    Attributes:
        source: the Jinja source.
        facts: what was read from the source.
    """

    def __init__(
        self,
        source: str,
        limits: TemplateLimits | None = None,
        process: TemplateProcess | None = None,
    ) -> None:
        """Parse `source`; nothing of it runs yet.

        Raises:
            TemplateError: the source does not parse; the message gives the line.
        """
        self.source = source
        self.facts = read_facts(source)
        self._limits = limits or TemplateLimits()
        self._process = process or shared_process()

    def warm_up(self) -> None:
        """Start the process that renders, so that the first chat does not wait for it."""
        self._process.start()

    def run(self, variables: Mapping[str, object]) -> str:
        """Render with exactly these variables.

        Raises:
            TemplateError: it does not compile, raised, or went over its limits.
        """
        return self._process.render(self.source, variables, self._limits)


def as_template(template: ChatTemplate | str | None) -> ChatTemplate:
    """`template` as an object.

    Raises:
        TemplateError: there is none, or it does not parse.
    """
    if template is None or template == "":
        raise TemplateError(_NO_TEMPLATE)
    return ChatTemplate(template) if isinstance(template, str) else template


def render_chat(
    template: ChatTemplate | str | None,
    messages: Sequence[Mapping[str, object]],
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
    tools: Sequence[Mapping[str, object]] | None = None,
    documents: Sequence[Mapping[str, object]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **template_kwargs: object,
) -> str:
    """The prompt text of a chat.

    Raises:
        ParameterError: a message or another argument is malformed, or two contradict.
        TemplateError: no template, or it failed; a message that the template itself raises
            through `raise_exception` is passed on.
    """
    chosen = as_template(template)
    for name in template_kwargs:
        if name in RESERVED:
            raise ParameterError(
                f"chat_template_kwargs.{name}", template_kwargs[name], "this name is reserved"
            )
    chat = normalize_messages(
        messages,
        as_list=chosen.facts.content_as_list,
        wrap_strings=not chosen.facts.asks_if_string,
    )
    if continue_final_message:
        _mark_end(chat, add_generation_prompt)
    text = chosen.run(
        {
            **{name: plain_data(value, name) for name, value in template_kwargs.items()},
            "messages": chat,
            "tools": plain_data(tools, "tools"),
            "documents": plain_data(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
            **{
                k: v
                for k, v in (("bos_token", bos_token), ("eos_token", eos_token))
                if v is not None
            },
        }
    )
    return _cut_at_mark(text) if continue_final_message else text


def _mark_end(chat: list[dict[str, object]], add_generation_prompt: bool) -> None:
    """Put a mark after the final message's text, so that the rendered text can be cut there."""
    name = "continue_final_message"
    if add_generation_prompt:
        raise ParameterError(name, True, "contradicts add_generation_prompt; set that to false")
    if not chat or chat[-1].get("role") != "assistant":
        role = chat[-1].get("role") if chat else None
        raise ParameterError(name, True, f"the last message must be the assistant's, not {role!r}")
    last = chat[-1]
    content = last.get("content")
    if isinstance(content, list):
        part = content[-1] if content else None
        if not isinstance(part, dict) or not str(part.get("text", "")).strip():
            raise ParameterError(name, True, "the last message has no text to continue")
        last["content"] = [*content[:-1], {**part, "text": f"{part['text']}{_TAIL}"}]
        return
    if not isinstance(content, str) or not content.strip():
        raise ParameterError(name, True, "the last message has no text to continue")
    last["content"] = content + _TAIL


def _cut_at_mark(text: str) -> str:
    """Cut at the mark, as transformers does: a template that trims gets its text trimmed."""
    place = text.rfind(_TAIL.strip())
    if place < 0:
        raise ParameterError(
            "continue_final_message",
            True,
            "this model's template leaves out or changes the last message, so it cannot be "
            "continued",
        )
    head = text[:place]
    return head if text[place:].startswith(_TAIL) else head.rstrip()


@functools.lru_cache(maxsize=32)
def read_facts(source: str) -> TemplateFacts:
    """What `source` tells about itself.

    Raises:
        TemplateError: it does not parse.
    """
    try:
        tree = environment().parse(source)
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise TemplateError(
            f"the chat template does not parse, line {error.lineno}: {error.message}"
        ) from error
    except RecursionError as error:
        raise TemplateError("the chat template is nested too deeply to parse") from error
    contents = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node, frozenset())
    }
    return TemplateFacts(
        content_as_list=any(
            _is_content(loop.iter, frozenset(contents)) for loop in tree.find_all(nodes.For)
        ),
        asks_if_string=any(test.name == "string" for test in tree.find_all(nodes.Test)),
        compared=frozenset(_compared(tree)),
    )


def _is_content(node: nodes.Node | None, names: frozenset[str]) -> bool:
    """Whether `node` is a message's content, maybe through filters."""
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Const)
        and node.arg.value == "content"
    )


def _compared(tree: nodes.Template) -> list[str]:
    """Text constants inside comparisons and call arguments."""
    found = []
    for asking in tree.find_all((nodes.Compare, nodes.Call)):
        for constant in asking.find_all(nodes.Const):
            if isinstance(constant.value, str) and re.search(r"\S", constant.value):
                found.append(constant.value)
    return found
