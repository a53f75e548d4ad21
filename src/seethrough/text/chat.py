"""Knows how a chat becomes ids, with nothing that a user wrote becoming a control token.

The chat is rendered whole and tokenized without adding special tokens, as transformers does. Where
the messages (or tools, documents, template arguments) hold the spelling of a marker:

    1. a random nonce is put inside each spelling, and the chat is rendered;
    2. the rendered text is tokenized: the markers found now are the template's own;
    3. each stretch between two markers that holds a nonce is tokenized again without the nonce,
       by a twin of the tokenizer that has no markers; the other stretches stay as they are.

One exception: plain markers that the template itself looks for (`'</think>' in content`) keep
their meaning in assistant messages, since there they are the model's own.

Limit: a template that deletes or replaces characters inside a message could still join a marker
out of parts that were none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import TemplateError
from .chat_template import ChatTemplate, as_template, render_chat
from .markers import Markers, Nonce, compared_markers, markers_of
from .messages import plain_data
from .tokenizer import Tokenizer


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate | str | None,
    messages: Sequence[Mapping[str, object]],
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    documents: Sequence[Mapping[str, object]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **template_kwargs: object,
) -> list[int]:
    """The ids of a chat; see the module's text for what happens to markers in messages.

    Raises:
        ParameterError: a message or another argument is malformed, or two contradict.
        TemplateError: there is no template, it failed, or it tears message text apart.
    """
    chosen = as_template(template)
    guard = _Guard(tokenizer, chosen)
    given: dict[str, Any] = {
        "messages": guard.messages(messages),
        "tools": guard.cover(plain_data(tools, "tools")),
        "documents": guard.cover(plain_data(documents, "documents")),
    }
    covered: dict[str, Any] = {k: guard.cover(plain_data(v, k)) for k, v in template_kwargs.items()}
    rendered = render_chat(
        chosen,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **given,
        **covered,
    )
    if not guard.used:
        return tokenizer.encode(rendered, add_special_tokens=False)
    return guard.encode(rendered)


class _Guard:
    """Covers markers in one chat's inputs, and tokenizes what was rendered from them."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.used = False
        self._tokenizer = tokenizer
        self._markers: Markers = markers_of(tokenizer)
        self._looked_for = compared_markers(tokenizer, template.facts.compared)
        self._nonce = Nonce()

    def messages(self, messages: object) -> object:
        """The messages, covered; an assistant's may hold what the template looks for."""
        plain = plain_data(messages, "messages")
        if not isinstance(plain, list):
            return plain  # refused, with a better message, where messages are read
        return [
            self.cover(
                message,
                self._looked_for
                if isinstance(message, dict) and message.get("role") == "assistant"
                else frozenset(),
            )
            for message in plain
        ]

    def cover(self, value: object, leave: frozenset[str] = frozenset()) -> object:
        """`value` with the nonce inside every marker of every string and key."""
        if isinstance(value, str):
            return self._cover_text(value, leave)
        if isinstance(value, list):
            return [self.cover(item, leave) for item in value]
        if isinstance(value, dict):
            return {self.cover(k, leave): self.cover(v, leave) for k, v in value.items()}
        return value

    def _cover_text(self, text: str, leave: frozenset[str]) -> str:
        places = self._markers.places(text, leave)
        normalized = self._tokenizer.normalize(text)
        if normalized != text and len(self._markers.places(normalized, leave)) > len(places):
            places = list(range(len(text)))  # a marker that shows only after normalizing
        if not places:
            return text
        self.used = True
        return self._nonce.put_inside(text, places)

    def encode(self, rendered: str) -> list[int]:
        """Ids of a rendered text that holds nonces."""
        tokenizer = self._tokenizer
        prepared = tokenizer.with_leading_space(rendered)
        found, spans = tokenizer.encode_spans(prepared)
        ids: list[int] = []
        stretch: list[int] = []
        begin = 0
        for token_id, (start, end) in zip(found, spans, strict=True):
            if not self._is_marker(token_id, prepared[start:end]):
                stretch.append(token_id)
                continue
            ids += self._stretch(prepared[begin:start], stretch, opens=begin == 0)
            ids.append(token_id)
            stretch = []
            begin = end
        return ids + self._stretch(prepared[begin:], stretch, opens=begin == 0)

    def _is_marker(self, token_id: int, text: str) -> bool:
        """Whether `text` was matched as an added token (and not the model's <unk> for it)."""
        spelling = self._tokenizer.added_spellings.get(token_id)
        if spelling is None:
            return False
        return spelling in text or spelling.lower() in self._tokenizer.normalize(text).lower()

    def _stretch(self, text: str, ids: list[int], *, opens: bool) -> list[int]:
        clean, torn = self._nonce.take_out(text)
        if torn:
            raise TemplateError(
                "a message holds the spelling of a control token, and the chat template cuts or "
                "changes that very place. Remove the spelling from the message."
            )
        return ids if clean == text else self._tokenizer.encode_plain(clean, opens=opens)
