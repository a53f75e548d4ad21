"""Knows the shape of chat messages, and brings every accepted spelling of one into one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import ParameterError

_DEEPEST = 64


def normalize_messages(
    messages: Sequence[Mapping[str, object]], *, as_list: bool, wrap_strings: bool
) -> list[dict[str, object]]:
    """Messages as a template expects them.

    A field that is null is left out, and content that is null or absent is "". Content in parts
    is passed as a list of parts where the template loops over them (`as_list`), else its texts
    are joined by a line break. Content that is a string becomes one part only where the template
    loops and cannot take a string (`as_list` and `wrap_strings`).

    Raises:
        ParameterError: names the message and the field that is malformed.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ParameterError("messages", messages, "must be a list of messages")
    if not messages:
        raise ParameterError("messages", [], "must hold at least one message")
    chat = []
    for place, message in enumerate(messages):
        name = f"messages[{place}]"
        if not isinstance(message, Mapping):
            raise ParameterError(name, message, "must be an object with a role and a content")
        if not isinstance(message.get("role"), str):
            raise ParameterError(f"{name}.role", message.get("role"), "must be a string")
        fields = {
            str(key): plain_data(value, f"{name}.{key}")
            for key, value in message.items()
            if value is not None and key != "content"
        }
        content = _content(message.get("content"), f"{name}.content")
        if isinstance(content, list) and not as_list:
            content = "\n".join(str(part["text"]) for part in content)
        elif isinstance(content, str) and as_list and wrap_strings:
            content = [{"type": "text", "text": content}] if content else []
        chat.append({**fields, "content": content})
    return chat


def _content(content: object, name: str) -> str | list[dict[str, object]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return _plain_text(content, name)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ParameterError(name, content, "must be a string or a list of parts")
    return [_part(part, f"{name}[{place}]") for place, part in enumerate(content)]


def _part(part: object, name: str) -> dict[str, object]:
    if isinstance(part, str):
        return {"type": "text", "text": _plain_text(part, name)}
    if not isinstance(part, Mapping):
        raise ParameterError(name, part, "a part must be an object with a type")
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise ParameterError(
            f"{name}.type", kind, "this engine reads text only; parts may be 'text' or 'refusal'"
        )
    text = part.get(str(kind))
    if not isinstance(text, str):
        raise ParameterError(f"{name}.{kind}", text, "must be a string")
    return {"type": "text", "text": _plain_text(text, name)}


def plain_data(value: object, name: str, depth: int = 0) -> object:
    """A copy of `value` made of JSON's own types, so that a template meets no live object.

    Raises:
        ParameterError: `value` holds something else, or is nested too deeply.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return _plain_text(value, name)
    if depth >= _DEEPEST:
        raise ParameterError(name, "…", f"is nested more than {_DEEPEST} deep")
    if isinstance(value, Mapping):
        return {
            _plain_text(key, name) if isinstance(key, str) else str(key): plain_data(
                item, f"{name}.{key}", depth + 1
            )
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain_data(item, f"{name}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise ParameterError(name, value, f"{type(value).__name__} is not a JSON type")


def _plain_text(text: str, name: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ParameterError(
            name, text, f"has a lone surrogate at character {error.start}: not valid Unicode"
        ) from error
    return str.__str__(text)
