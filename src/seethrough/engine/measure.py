"""Measures an engine against the machine's limits: limits first, then figures, in the same run.

Everything goes through the engine's own loop, with sampling and detokenizing. What a limit means:
a decoded token must read every weight once, so it cannot be faster than bytes over bandwidth; a
prompt token must do its multiplications, so it cannot be faster than operations over peak.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from threadpoolctl import threadpool_limits

from seethrough.config import Backend
from seethrough.engine.load import LoadReport
from seethrough.engine.outputs import RequestOutput
from seethrough.model.load import ModelWeights, weight_bytes

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


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do at most, measured now.

    Attributes:
        read_gb_s: reading a buffer of the weights' size, all threads.
        gflop_s: multiplying float32 matrices, all threads.
        tg_tok_s: read_gb_s over the bytes that one decoded token must read.
        pp_tok_s: gflop_s over the operations of one prompt token.
    """

    read_gb_s: float
    gflop_s: float
    tg_tok_s: float
    pp_tok_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians of the repeats. Shares are of the limit."""

    pp_tok_s: float
    pp_share: float
    tg_tok_s: float
    tg_share: float
    batch_tok_s: float
    ttft_ms: float


def limits(weights: ModelWeights, threads: int, backend: Backend) -> Limits:
    """Measure bandwidth and peak, and what they allow for this model."""
    nbytes = weight_bytes(weights, backend)
    read = read_bandwidth(nbytes, threads)
    peak = multiply_rate(threads)
    spec = weights.spec
    matrices = sum(int(np.prod(t.shape)) for t in weights.tensors.values() if len(t.shape) == 2)
    table = spec.vocab_size * spec.d_model
    # The head runs for one position of a prompt; the embedding only picks a row.
    per_token = 2 * (matrices - table * (1 if spec.tied_head else 2))
    read_per_token = nbytes - (0 if spec.tied_head else 4 * table)
    return Limits(read / 1e9, peak / 1e9, read / read_per_token, peak / per_token)


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
    )


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
    (output,) = llm.generate(_prompt(length, seed), max_tokens=1, temperature=0, ignore_eos=True)
    return (output.metrics.ttft_ms or 0.0) / 1e3


def _decode(llm: Generator, depth: int, count: int, seed: int) -> float:
    """Tokens a second after the first, which belongs to the prompt."""
    (output,) = llm.generate(
        _prompt(depth, seed), max_tokens=count + 1, temperature=0, ignore_eos=True
    )
    return 1e3 / (output.metrics.tpot_ms or float("inf"))


def _batch(llm: Generator, requests: int, seed: int) -> float:
    """Output tokens a second of many requests at once, their prompts included in the time."""
    prompts = [_prompt(_BATCH_PROMPT, seed * requests + i) for i in range(requests)]
    started = perf_counter()
    outputs = llm.generate(prompts, max_tokens=_BATCH_OUTPUT, temperature=0, ignore_eos=True)
    return sum(o.metrics.completion_tokens for o in outputs) / (perf_counter() - started)


def _prompt(length: int, seed: int) -> dict[str, list[int]]:
    """Random ids: speed does not depend on them, and no cache knows them."""
    ids = np.random.default_rng(seed).integers(0, 256, length)
    return {"prompt_token_ids": [int(i) for i in ids]}


def _best(work: Callable[[], object], repeats: int) -> float:
    times: Sequence[float] = [_seconds(work) for _ in range(repeats)]
    return min(times)


def _seconds(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started
