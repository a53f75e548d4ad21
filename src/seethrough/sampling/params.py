"""What a request may ask of sampling: names, ranges, and which source wins for each field.

Knows no tokenizer and no model: ids are compared with a vocabulary size in `check_vocab`, and words
become ids in `bans`. Names are those of vLLM and the OpenAI API.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from seethrough.errors import ParameterError
from seethrough.sampling import checks

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_N = 128
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_IDS = 256
MAX_TEMPERATURE = 1e6
# Longer than any context; a limit only so that no number of 400 digits travels on.
MAX_TOKENS = 2**31 - 1

LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
Origin = Literal["request", "command line", "model", "engine"]
_ORIGINS = ("request", "command line", "model", "engine")
_REQUEST: Origin = "request"
_MAY_BE_NONE = ("max_tokens", "logprobs", "prompt_logprobs", "allowed_token_ids")

_CHECKS: dict[str, checks.Check] = {
    "temperature": checks.number(0, MAX_TEMPERATURE),
    "top_k": checks.integer(-1, MAX_TOKENS),
    "top_p": checks.number(0, 1),
    "min_p": checks.number(0, 1),
    "typical_p": checks.number(0, 1, above_low=True),
    "repetition_penalty": checks.number(0, 1e6, above_low=True),
    "presence_penalty": checks.number(-2, 2),
    "frequency_penalty": checks.number(-2, 2),
    "logit_bias": checks.biases(-100, 100),
    "seed": checks.integer(0, 2**64 - 1),
    "n": checks.integer(1, MAX_N),
    "max_tokens": checks.integer(0, MAX_TOKENS),
    "min_tokens": checks.integer(0, MAX_TOKENS),
    "stop": checks.strings(MAX_STOPS, one_alone=True),
    "stop_token_ids": checks.token_ids(),
    "include_stop_str_in_output": checks.boolean,
    "ignore_eos": checks.boolean,
    "skip_special_tokens": checks.boolean,
    "logprobs": checks.integer(0, MAX_LOGPROBS),
    "prompt_logprobs": checks.integer(0, MAX_LOGPROBS),
    "logprobs_mode": checks.one_of(LOGPROBS_MODES),
    "bad_words": checks.strings(MAX_BAD_WORDS),
    "bad_words_ids": checks.id_sequences(MAX_BAD_WORDS, MAX_BAD_WORD_IDS),
    "allowed_token_ids": checks.token_ids(may_be_empty=False),
}

# What generation_config.json may set; the rest of that file is about other things.
MODEL_FIELDS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What one source (a request, the command line) asks for; None means: not set here.

    Every given value is checked at construction and stored in plain form (tuples, int keys).

    Attributes:
        temperature: 0 to 1e6; 0 is greedy: the highest logit, ties to the lower id, no truncation.
        top_k: keep the k most probable; 0 and -1 mean off, more than the vocabulary keeps all.
        top_p: 0 to 1; keep the shortest prefix by probability whose mass exceeds it.
        min_p: 0 to 1; keep what has at least this share of the highest probability.
        typical_p: above 0 to 1; keep the most typical candidates up to this mass; 1 means off.
        repetition_penalty: above 0 to 1e6; on every id of prompt and output, 1 means off.
        presence_penalty: -2 to 2, subtracted once from every id of the output.
        frequency_penalty: -2 to 2, subtracted once per occurrence in the output.
        logit_bias: token id to a value in -100 to 100 that is added to its logit.
        seed: 0 to 2**64 - 1; without one, 64 bits are taken from the system and reported.
        n: 1 to 128 independent samples.
        max_tokens: output limit; 0 only scores the prompt; unset fills the context.
        min_tokens: end tokens and `stop_token_ids` cannot be chosen before so many tokens.
        stop: up to 16 strings (or one) that end the output.
        stop_token_ids: ids that end the output.
        include_stop_str_in_output: whether the stop string stays in the text.
        ignore_eos: the model's end tokens are ordinary tokens.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: 0 to 20 alternatives per output token, besides the chosen token itself.
        prompt_logprobs: the same for the prompt's tokens.
        logprobs_mode: which scores `logprobs` reports (see `sampling.logprobs`).
        bad_words: strings whose tokens may not be completed, with or without a leading space.
        bad_words_ids: the same as id sequences.
        allowed_token_ids: nothing else can be chosen.

    Raises:
        ParameterError: a value of the wrong type or out of range; it names field and range.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode | None = None
    bad_words: Sequence[str] | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    allowed_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check(name, value))
        _check_lengths(self.min_tokens, self.max_tokens)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> SamplingParams:
        """Read a JSON object; null equals absent, and an unknown key is an error that names it."""
        if not isinstance(given, Mapping):
            why = f"expected an object, got {type(given).__name__}"
            raise ParameterError("sampling parameters", given, why)
        for key, value in given.items():
            if key not in _CHECKS:
                close = difflib.get_close_matches(str(key), _CHECKS, n=1)
                hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(_CHECKS)}"
                raise ParameterError(str(key), value, f"no such sampling parameter; {hint}")
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set, ready for JSON; `from_dict` reads them back."""
        return {name: _plain(v) for name in _CHECKS if (v := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveParams:
    """What a request runs with: every field decided, and `origin` says by whom.

    None remains where it has a meaning: `max_tokens` (fill the context), `logprobs` and
    `prompt_logprobs` (not asked for), `allowed_token_ids` (all).
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    n: int
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop_str_in_output: bool
    ignore_eos: bool
    skip_special_tokens: bool
    logprobs: int | None
    prompt_logprobs: int | None
    logprobs_mode: LogprobsMode
    bad_words: tuple[str, ...]
    bad_words_ids: tuple[tuple[int, ...], ...]
    allowed_token_ids: tuple[int, ...] | None
    origin: Mapping[str, Origin]

    @property
    def greedy(self) -> bool:
        """Whether the highest logit is taken and nothing is drawn."""
        return self.temperature == 0

    def to_dict(self) -> dict[str, Any]:
        """All fields and `origin`, ready for JSON. The seed may need 64 bits."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> EffectiveParams:
        """Read what `to_dict` gave; it may come from a stranger, so everything is checked.

        Raises:
            ParameterError: a field is missing, unknown, of the wrong type or out of range.
        """
        origin = given.get("origin")
        if set(given) != {*_CHECKS, "origin"} or not isinstance(origin, Mapping):
            raise ParameterError(
                "recorded parameters", dict(given), "fields are missing or unknown"
            )
        if set(origin) != set(_CHECKS) or not all(who in _ORIGINS for who in origin.values()):
            raise ParameterError("origin", origin, "who set each field is expected")
        values: dict[str, Any] = {}
        for name, check in _CHECKS.items():
            value = given[name]
            if value is None and name not in _MAY_BE_NONE:
                raise ParameterError(name, value, "a value is expected")
            values[name] = None if value is None else check(name, value)
        _check_lengths(values["min_tokens"], values["max_tokens"])
        return cls(**values, origin=dict(origin))

    def changed(self, asked: SamplingParams) -> EffectiveParams:
        """The same with other values where `asked` has some."""
        given = {name: v for name in _CHECKS if (v := getattr(asked, name)) is not None}
        origin: dict[str, Origin] = {**self.origin, **dict.fromkeys(given, _REQUEST)}
        found = replace(self, **given, origin=origin)
        _check_lengths(found.min_tokens, found.max_tokens)
        return found


# The last word, where nobody else set a field; the seed is drawn instead.
_ENGINE_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "n": 1,
    "max_tokens": None,
    "min_tokens": 0,
    "stop": (),
    "stop_token_ids": (),
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "logprobs": None,
    "prompt_logprobs": None,
    "logprobs_mode": "raw_logprobs",
    "bad_words": (),
    "bad_words_ids": (),
    "allowed_token_ids": None,
}


def resolve(
    request: SamplingParams,
    command_line: SamplingParams | None,
    model: Mapping[str, Any],
    seed_source: Callable[[], int],
) -> EffectiveParams:
    """Decide every field: request > command line > generation_config.json > engine default.

    Args:
        model: content of generation_config.json ({} if there is none); see `model_params`.
        seed_source: called once, and only if nobody gave a seed; `secrets.randbits(64)` in use.

    Raises:
        ParameterError: generation_config.json holds a value that cannot be used, or the sources
            contradict each other (min_tokens of one, max_tokens of another).
    """
    sources: tuple[tuple[Origin, SamplingParams], ...] = (
        ("request", request),
        ("command line", command_line or SamplingParams()),
        ("model", model_params(model)),
    )
    values: dict[str, Any] = {}
    origin: dict[str, Origin] = {}
    for name in _CHECKS:
        given = ((who, v) for who, p in sources if (v := getattr(p, name)) is not None)
        origin[name], values[name] = next(given, ("engine", _ENGINE_DEFAULTS.get(name)))
    if values["seed"] is None:
        values["seed"] = _CHECKS["seed"]("seed", seed_source())
    _check_lengths(values["min_tokens"], values["max_tokens"])
    return EffectiveParams(**values, origin=origin)


def model_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Take the sampling defaults that a model ships (`MODEL_FIELDS`; null equals absent).

    An explicit `do_sample: false` means temperature 0, whatever temperature stands beside it. Its
    absence means nothing here: transformers writes only what differs from its own defaults, so
    most chat models that are meant to be sampled could not be told from greedy ones by it.

    Raises:
        ParameterError: a value of the wrong type or out of range; the name starts with
            `generation_config`.
    """
    found: dict[str, Any] = {}
    for name in MODEL_FIELDS:
        value = generation_config.get(name)
        if value is not None:
            found[name] = _CHECKS[name](f"generation_config.{name}", value)
    do_sample = generation_config.get("do_sample")
    if do_sample is not None and not checks.boolean("generation_config.do_sample", do_sample):
        found["temperature"] = 0.0
    return SamplingParams(**found)


def check_vocab(params: SamplingParams | EffectiveParams, vocab_size: int) -> None:
    """Refuse ids that the logits row does not have; `vocab_size` is the row's width.

    Raises:
        ParameterError: names the field and the id.
    """
    ids: dict[str, list[int]] = {
        "logit_bias": list(params.logit_bias or ()),
        "allowed_token_ids": list(params.allowed_token_ids or ()),
        "stop_token_ids": list(params.stop_token_ids or ()),
        "bad_words_ids": [i for sequence in params.bad_words_ids or () for i in sequence],
    }
    for name, named in ids.items():
        for token in named:
            if not 0 <= token < vocab_size:
                why = f"this model's token ids are 0 to {vocab_size - 1}"
                raise ParameterError(name, token, why)


def _check_lengths(min_tokens: int | None, max_tokens: int | None) -> None:
    if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
        raise ParameterError("min_tokens", min_tokens, f"it is more than max_tokens={max_tokens}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
