"""Measures an engine against the machine's limits: limits first, then figures, in the same run.

Everything goes through the engine's own loop, with sampling and detokenizing. What a limit means:
a decoded token must read every weight once, so it cannot be faster than bytes over bandwidth; a
prompt token must do its multiplications, so it cannot be faster than operations over peak: those
of the weights at the rate of their type, those of attention at the rate of float32.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from threadpoolctl import threadpool_limits

from seethrough.config import Backend
from seethrough.engine.load import LoadReport, kernel_dir
from seethrough.engine.outputs import RequestOutput
from seethrough.model.load import ModelWeights, weight_bytes
from seethrough.model.spec import TransformerSpec

_BATCH_PROMPT, _BATCH_OUTPUT = 128, 64
_GEMM = 1024  # a square product that is large enough to reach the peak


class Generator(Protocol):
    """What is measured: something that completes prompts (`LLM`)."""

    @property
    def report(self) -> LoadReport:
        """What loading chose."""
        ...

    def generate(self, prompts: Any, params: Any = None, **sampling: Any) -> list[RequestOutput]:
        """Complete prompts as one batch."""
        ...

    def forget_prefixes(self) -> None:
        """Empty the prefix cache: every prompt is computed whole."""
        ...

    def stage_times(self) -> AbstractContextManager[dict[str, float]]:
        """While it is open, seconds by stage are collected in the dict that it gives."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do at most, measured now.

    Attributes:
        read_gb_s: reading a buffer of the weights' size, all threads.
        gop_s: operations of the weights' own products, all threads, on data in the first cache
            (`reference`: of a large float32 product); weighted by what a prompt token needs.
        tg_tok_s: read_gb_s over what one decoded token must read: weights, and its context's cache.
        pp_tok_s: what a prompt of the asked length allows: gop_s over its products, and the rate
            of float32 products over attention's, which grow with the square of the length.
    """

    read_gb_s: float
    gop_s: float
    tg_tok_s: float
    pp_tok_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians of the repeats. Shares are of the limit.

    Attributes:
        tg_stages, pp_stages: each stage's share of the time, in percent; "loop" is what the engine
            does around the model: S1 to S3, S10 to S13.
    """

    pp_tok_s: float
    pp_share: float
    tg_tok_s: float
    tg_share: float
    batch_tok_s: float
    ttft_ms: float
    tg_stages: dict[str, float]
    pp_stages: dict[str, float]


class Setup(Protocol):
    """What the limits depend on besides the weights; a LoadReport says it."""

    @property
    def backend(self) -> Backend: ...

    @property
    def threads(self) -> int: ...

    @property
    def kv_bytes_per_token(self) -> int: ...


def limits(weights: ModelWeights, setup: Setup, depth: int, prompt: int) -> Limits:
    """Measure bandwidth and peak, and what they allow for this model.

    Args:
        depth: tokens of context while decoding.
        prompt: tokens of a prompt.
    """
    spec = weights.spec
    nbytes = weight_bytes(weights, setup.backend)
    read = read_bandwidth(nbytes, setup.threads)
    table = 0 if spec.tied_head else _tensor_bytes(weights, "embed.weight", setup.backend)
    # The embedding only picks a row.
    per_token = nbytes - table + depth * setup.kv_bytes_per_token
    operations = _operations(weights)
    seconds = sum(n / _rate(dtype, setup) for dtype, n in operations.items())
    total = sum(operations.values())
    attention = attention_operations(spec, prompt) / prompt / _rate("F32", setup)
    return Limits(read / 1e9, total / seconds / 1e9, read / per_token, 1 / (seconds + attention))


def attention_operations(spec: TransformerSpec, prompt: int) -> int:
    """Scores and mixes of a whole prompt: four operations per head value and key seen."""
    total = 0
    for layer in spec.layers:
        seen = min(layer.window or prompt, prompt)  # by all rows but the first ones
        keys = seen * (seen + 1) // 2 + (prompt - seen) * seen
        total += 4 * spec.n_heads * spec.head_dim * keys
    return total


def _operations(weights: ModelWeights) -> dict[str, int]:
    """Operations of one prompt token by weight type. The head runs for one position of a prompt."""
    aside = {"embed.weight", "head.weight", "positions.weight"}
    found: dict[str, int] = {}
    for name, tensor in weights.tensors.items():
        if len(tensor.shape) == 2 and name not in aside:
            dtype = tensor.dtype.name
            found[dtype] = found.get(dtype, 0) + 2 * int(np.prod(tensor.shape))
    return found


def _rate(dtype: str, setup: Setup) -> float:
    if setup.backend == "reference":
        return multiply_rate(setup.threads)
    from seethrough.kernels.cpu import ceiling
    from seethrough.kernels.cpu.compiled import Kernels

    return ceiling.multiply_rate(dtype, Kernels(kernel_dir()), setup.threads)


def _tensor_bytes(weights: ModelWeights, name: str, backend: Backend) -> int:
    return weight_bytes(replace(weights, tensors={name: weights.tensors[name]}), backend)


def read_bandwidth(nbytes: int, threads: int, repeats: int = 5) -> float:
    """Bytes a second that all threads together read of a buffer of this size; best of repeats."""
    buffer = np.ones(max(nbytes // 8, threads), dtype=np.float64)
    parts = np.array_split(buffer, threads)
    with ThreadPoolExecutor(threads) as pool:
        return buffer.nbytes / _best(lambda: list(pool.map(np.sum, parts)), repeats)


def multiply_rate(threads: int, repeats: int = 5) -> float:
    """Floating point operations a second of a float32 matrix product; best of repeats."""
    a = np.ones((_GEMM, _GEMM), dtype=np.float32)
    with threadpool_limits(threads, user_api="blas"):
        return 2 * _GEMM**3 / _best(lambda: a @ a, repeats)


def measure(
    llm: Generator, found: Limits, *, pp: int, tg: int, batch: int, depth: int, repeats: int
) -> Figures:
    """Prefill `pp` tokens, decode `tg` after `depth`, and complete `batch` requests at once."""
    prefill = [_prefill(llm, pp, i) for i in range(repeats)]
    decode = [_decode(llm, depth, tg, i) for i in range(repeats)]
    together = [_batch(llm, batch, i) for i in range(repeats)]
    pp_rate = pp / statistics.median(prefill)
    tg_rate = statistics.median(decode)
    return Figures(
        pp_tok_s=pp_rate,
        pp_share=pp_rate / found.pp_tok_s,
        tg_tok_s=tg_rate,
        tg_share=tg_rate / found.tg_tok_s,
        batch_tok_s=statistics.median(together),
        ttft_ms=statistics.median(prefill) * 1e3,
        tg_stages=_stages(llm, depth, tg),
        pp_stages=_stages(llm, pp, 0),
    )


def _stages(llm: Generator, prompt: int, count: int) -> dict[str, float]:
    """Percent of the time by stage: of decoding `count` tokens, or of the prefill where it is 0."""
    ask = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
    with llm.stage_times() as times:
        llm.forget_prefixes()
        (first,) = llm.generate(_prompt(prompt, 99), **ask)
        spent, whole = dict(times), (first.metrics.ttft_ms or 0.0) / 1e3
        if count:
            times.clear()
            llm.forget_prefixes()
            (output,) = llm.generate(_prompt(prompt, 99), **(ask | {"max_tokens": count + 1}))
            spent = {stage: seconds - spent.get(stage, 0.0) for stage, seconds in times.items()}
            whole = (output.metrics.tpot_ms or 0.0) * count / 1e3
    spent = {stage: max(0.0, seconds) for stage, seconds in spent.items()}
    spent["loop"] = max(0.0, whole - sum(spent.values()))
    total = sum(spent.values())
    return {stage: round(100 * seconds / total, 1) for stage, seconds in sorted(spent.items())}


def to_json(report: LoadReport, found: Limits, figures: Figures, **asked: int) -> dict[str, Any]:
    """The one object at the end."""
    return {
        "model": report.name,
        "backend": report.backend,
        "threads": report.threads,
        "kv_cache_dtype": report.kv_dtype,
        **asked,
        **asdict(figures),
        "limit": asdict(found),
    }


def _prefill(llm: Generator, length: int, seed: int) -> float:
    """Seconds from the prompt's arrival to its first token."""
    llm.forget_prefixes()
    (output,) = llm.generate(_prompt(length, seed), max_tokens=1, temperature=0, ignore_eos=True)
    return (output.metrics.ttft_ms or 0.0) / 1e3


def _decode(llm: Generator, depth: int, count: int, seed: int) -> float:
    """Tokens a second after the first, which belongs to the prompt."""
    llm.forget_prefixes()
    (output,) = llm.generate(
        _prompt(depth, seed), max_tokens=count + 1, temperature=0, ignore_eos=True
    )
    return 1e3 / (output.metrics.tpot_ms or float("inf"))


def _batch(llm: Generator, requests: int, seed: int) -> float:
    """Output tokens a second of many requests at once, their prompts included in the time."""
    prompts = [_prompt(_BATCH_PROMPT, seed * requests + i) for i in range(requests)]
    llm.forget_prefixes()
    started = perf_counter()
    outputs = llm.generate(prompts, max_tokens=_BATCH_OUTPUT, temperature=0, ignore_eos=True)
    return sum(o.metrics.completion_tokens for o in outputs) / (perf_counter() - started)


def _prompt(length: int, seed: int) -> dict[str, list[int]]:
    """Random ids: speed does not depend on them."""
    ids = np.random.default_rng(seed).integers(0, 256, length)
    return {"prompt_token_ids": [int(i) for i in ids]}


def _best(work: Callable[[], object], repeats: int) -> float:
    times: Sequence[float] = [_seconds(work) for _ in range(repeats)]
    return min(times)


def _seconds(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started
