"""Knows how a conversation becomes ids: rendered whole, then cut, so that text stays text.

A spelling such as <|im_end|> inside a message must not become the control token that ends it.
Where a message holds one (rare), a random number is put inside the spelling before rendering; the
rendered text is cut at the control tokens that are left, which are the template's own; the number
is taken out again, and the text between is encoded with added tokens switched off.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ParameterError
from .chat_template import render_chat
from .tokenizer import Tokenizer

Message = Mapping[str, Any]


def encode_chat(
    tokenizer: Tokenizer,
    template: str | None,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **options: Any,
) -> list[int]:
    """The ids of a conversation. `options` go to `render_chat`.

    With `continue_final_message` the text ends inside the last message, for the model to go on.

    Raises:
        TemplateError: see `render_chat`.
        ParameterError: no messages, or options that contradict each other.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise ParameterError("messages", messages, "a list of messages is expected")
    if not messages:
        raise ParameterError("messages", [], "there is no message")
    nonce = f"{secrets.randbelow(10**18):018d}"  # digits: no filter changes their case
    end_mark = f"{secrets.randbelow(10**18):018d}"
    guarded, found = _guard(messages, options, tokenizer, nonce)
    if continue_final_message:
        if add_generation_prompt:
            raise ParameterError(
                "continue_final_message", True, "add_generation_prompt must then be false"
            )
        guarded["messages"] = _open_end(guarded["messages"], end_mark)
    text = render_chat(
        template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        add_generation_prompt=add_generation_prompt,
        **guarded,
    )
    if continue_final_message:
        text = _cut_at(text, end_mark)
    if not found:
        return tokenizer.encode(text, add_special_tokens=False)
    return _encode_guarded(tokenizer, text, nonce)


def _guard(
    messages: Sequence[Message], options: Mapping[str, Any], tokenizer: Tokenizer, nonce: str
) -> tuple[dict[str, Any], bool]:
    """Everything that comes from outside, with the nonce inside every marker's spelling."""
    markers = sorted({s for s in tokenizer.added_spellings.values() if len(s) > 1})
    found = False

    def guard(text: str) -> str:
        nonlocal found
        places = sorted({p for m in markers for p in _occurrences(text, m)}, reverse=True)
        for place in places:
            text = f"{text[: place + 1]}{nonce}{text[place + 1 :]}"
        found = found or bool(places)
        return text

    everything = {**options, "messages": list(messages)}
    template_arguments = ("bos_token", "eos_token")
    return {
        key: value if key in template_arguments else _map_strings(value, guard)
        for key, value in everything.items()
    }, found


def _occurrences(text: str, marker: str) -> list[int]:
    """Where `marker` begins in `text`, overlapping ones included."""
    places, start = [], text.find(marker)
    while start >= 0:
        places.append(start)
        start = text.find(marker, start + 1)
    return places


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(v, change) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value


def _open_end(messages: Sequence[Message], mark: str) -> list[Message]:
    """The messages with a mark at the end of the last one's text."""
    *before, last = messages
    content = last.get("content") if isinstance(last, Mapping) else None
    if isinstance(content, str) and content:
        return [*before, {**last, "content": content + mark}]
    if isinstance(content, list) and content and isinstance(content[-1], Mapping):
        text = content[-1].get("text")
        if isinstance(text, str) and text:
            parts = [*content[:-1], {**content[-1], "text": text + mark}]
            return [*before, {**last, "content": parts}]
    raise ParameterError(
        "continue_final_message", True, "the last message has no text to go on from"
    )


def _cut_at(text: str, mark: str) -> str:
    place = text.rfind(mark)
    if place < 0:
        raise ParameterError(
            "continue_final_message", True, "this template does not show the last message's text"
        )
    return text[:place]


def _encode_guarded(tokenizer: Tokenizer, text: str, nonce: str) -> list[int]:
    """Encode text in which only the template's own control tokens are spelled whole."""
    prepared = tokenizer.with_leading_space(text)
    ids, spans = tokenizer.encode_spans(prepared)
    marks = tokenizer.control_ids | tokenizer.added_ids
    result: list[int] = []
    done = 0

    def plain(end: int) -> None:
        piece = prepared[done:end].replace(nonce, "")
        if piece:
            result.extend(tokenizer.encode_plain(piece, opens=done == 0))

    for token_id, (start, end) in zip(ids, spans, strict=True):
        if token_id in marks:
            plain(start)
            result.append(token_id)
            done = end
    plain(len(prepared))
    return result
