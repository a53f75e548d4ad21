"""What may be given as a prompt, and how it becomes ids (S1, S2): text, ids, or a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seethrough.errors import ParameterError
from seethrough.sampling.params import SamplingParams
from seethrough.text.chat import encode_chat
from seethrough.text.tokenizer import Tokenizer, check_text

Prompt = str | Mapping[str, Any]
Message = Mapping[str, Any]
Encoded = tuple[str | None, list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation is rendered. `arguments` go to the template under their own names."""

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
        """The ids of the rendered conversation."""
        return encode_chat(
            tokenizer,
            self.chat_template or tokenizer.chat_template,
            messages,
            tools=self.tools,
            documents=self.documents,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            **self.arguments,
        )


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Turns prompts into their text and ids, and checks the ids against the embedding table."""

    tokenizer: Tokenizer
    vocab_size: int

    def encode(self, prompt: Prompt) -> Encoded:
        """S1 and S2, or ids exactly as given."""
        if isinstance(prompt, str):
            encoded = self.tokenizer.encode(prompt)
            if not encoded:
                why = "it gives no token, and this tokenizer adds no BOS token"
                raise ParameterError("prompt", prompt, why)
            return prompt, self._checked(encoded)
        if not isinstance(prompt, Mapping) or set(prompt) - {"prompt", "prompt_token_ids"}:
            why = 'a string, {"prompt": "..."} or {"prompt_token_ids": [...]} is expected'
            raise ParameterError("prompt", prompt, why)
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise ParameterError("prompt", text, "a string is expected")
        if ids is not None:
            check_text(text or "")  # it is shown and recorded, if it is not encoded
            return text, self._checked(ids)
        return self.encode(text or "")

    def render(self, messages: Sequence[Message], options: ChatOptions | None) -> Encoded:
        """A conversation: rendered whole, then tokenized without adding special tokens."""
        options = options or ChatOptions()
        ids = self._checked(options.encode(self.tokenizer, messages))
        return self.tokenizer.decode(ids, skip_special_tokens=False), ids

    def _checked(self, ids: Sequence[Any]) -> list[int]:
        if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes)):
            raise ParameterError("prompt_token_ids", ids, "a list of token ids is expected")
        if not ids:
            raise ParameterError("prompt_token_ids", ids, "at least one token is needed")
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise ParameterError("prompt_token_ids", token_id, "is not an integer")
            if not 0 <= token_id < self.vocab_size:
                why = f"the embedding table has the ids 0 to {self.vocab_size - 1}"
                raise ParameterError("prompt_token_ids", token_id, why)
        return list(ids)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or a list of them, as a list."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ParameterError("prompts", prompts, "a prompt or a list of prompts is expected")
    return list(prompts)


def params_for(
    count: int,
    params: SamplingParams | Sequence[SamplingParams] | None,
    sampling: Mapping[str, Any],
) -> list[SamplingParams]:
    """One set of parameters per prompt, from an object, a list of objects, or keywords."""
    if params is None:
        return [SamplingParams.from_dict(sampling)] * count
    if sampling:
        name, value = next(iter(sampling.items()))
        raise ParameterError(name, value, "give either a SamplingParams or keywords, not both")
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise ParameterError("params", params, "SamplingParams or a list of them is expected")
    if len(params) != count:
        raise ParameterError("params", len(params), f"there are {count} prompts")
    return list(params)


def conversations(messages: Any) -> list[Sequence[Message]]:
    """One conversation or a list of them, as a list."""
    if not isinstance(messages, Sequence):
        raise ParameterError("messages", messages, "a list of messages is expected")
    if messages and all(isinstance(m, Sequence) and not isinstance(m, str) for m in messages):
        return list(messages)
    return [messages]
