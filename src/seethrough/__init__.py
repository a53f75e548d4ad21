"""seethrough (透视): an LLM inference engine that you can see through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from seethrough.async_llm import AsyncLLM, AsyncStream
    from seethrough.engine.outputs import CompletionOutput, Delta, RequestOutput
    from seethrough.engine.prompts import ChatOptions
    from seethrough.errors import SeethroughError
    from seethrough.llm import LLM, Stream
    from seethrough.sampling.params import SamplingParams
    from seethrough.trace.trace import Trace

# Imported on first use: `import seethrough` alone costs nothing.
_HOMES = {
    "AsyncLLM": "seethrough.async_llm",
    "AsyncStream": "seethrough.async_llm",
    "LLM": "seethrough.llm",
    "ChatOptions": "seethrough.engine.prompts",
    "Stream": "seethrough.llm",
    "SamplingParams": "seethrough.sampling.params",
    "RequestOutput": "seethrough.engine.outputs",
    "CompletionOutput": "seethrough.engine.outputs",
    "Delta": "seethrough.engine.outputs",
    "SeethroughError": "seethrough.errors",
    "Trace": "seethrough.trace.trace",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncStream",
    "ChatOptions",
    "CompletionOutput",
    "Delta",
    "RequestOutput",
    "SamplingParams",
    "SeethroughError",
    "Stream",
    "Trace",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'seethrough' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
