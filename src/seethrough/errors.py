"""Every error raised on purpose; each says what was found, what was expected, what to do."""

from __future__ import annotations


class SeethroughError(Exception):
    """Base of all typed errors. `exit_code` is what the command line ends with."""

    exit_code = 1


class ParameterError(SeethroughError, ValueError):
    """A request or engine parameter is out of range, unknown or contradicts another one."""

    exit_code = 2

    def __init__(self, name: str, value: object, why: str) -> None:
        shown = repr(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{name}={shown}: {why}")
        self.name = name
        self.value = value
        self.why = why


class ContextLengthError(SeethroughError, ValueError):
    """A prompt, or a prompt plus `max_tokens`, is longer than the context."""

    exit_code = 2

    def __init__(self, prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}: together "
            f"{prompt_tokens + max_tokens}, but the context holds {max_model_len}. Shorten the "
            "prompt, lower max_tokens, or raise --max-model-len if the model allows it."
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len


class CapacityError(SeethroughError):
    """A request needs more KV cache blocks than the whole pool has, so it could never run."""

    def __init__(self, needed: int, total: int, block_size: int) -> None:
        super().__init__(
            f"the request needs {needed} KV cache blocks of {block_size} tokens, but the pool has "
            f"{total} in all. Lower max_tokens or raise --num-kv-blocks."
        )
        self.needed = needed
        self.total = total
        self.block_size = block_size


class EngineStoppedError(SeethroughError):
    """An engine that others use was closed, or a bug ended it; `__cause__` then has the bug."""

    def __init__(self, cause: BaseException | None = None) -> None:
        why = "it was closed" if cause is None else f"{type(cause).__name__}: {cause}"
        super().__init__(f"the engine does not run any more: {why}")
        self.__cause__ = cause


class InsufficientMemoryError(SeethroughError):
    """The model and the smallest useful KV pool do not fit into the memory that is there."""

    exit_code = 3


class NoCandidatesError(SeethroughError):
    """Bans (allowed ids, bad words, min_tokens) left no token to choose from."""


class NonFiniteLogitsError(SeethroughError):
    """The model produced NaN or infinite logits; continuing would repeat one token for ever."""


class ModelNotFoundError(SeethroughError):
    """No model under that name or path; the message says where it was looked for."""

    exit_code = 3


class DownloadError(SeethroughError):
    """A model could not be fetched, or what was fetched is not what was expected."""

    exit_code = 3


class WeightFormatError(SeethroughError):
    """A weight file is damaged, truncated, hostile or of a kind that is not read here."""

    exit_code = 3

    def __init__(self, path: object, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = str(path)
        self.why = why


class CheckpointError(SeethroughError):
    """Tensors are missing, unexpected or misshapen for the architecture; the message names them."""

    exit_code = 3


class UnsupportedModelError(SeethroughError):
    """The config asks for an architecture, rope type, activation … that is not implemented."""

    exit_code = 3


class TokenizerError(SeethroughError):
    """The tokenizer's data is missing or broken, or a text or id cannot be handled."""

    exit_code = 3


class TextError(TokenizerError):
    """A text that no tokenizer can take: not a string, or not valid Unicode."""

    exit_code = 2


class TemplateError(SeethroughError):
    """A chat template is missing, does not compile, raised, or went over its limits."""

    exit_code = 2


class KVIntegrityError(SeethroughError):
    """The block books of the KV cache do not add up: a bug in the engine, never a user's fault."""


class TraceError(SeethroughError):
    """A trace was asked for something that it does not hold; the message says what it holds."""

    exit_code = 2


class RecordError(SeethroughError):
    """Recorded requests cannot be kept or read, or there is none of that name."""

    exit_code = 2


class DiffError(SeethroughError):
    """Two runs cannot be laid side by side; the message says why."""

    exit_code = 2
