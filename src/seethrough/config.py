"""What an engine is built with: chosen once, checked, never changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from seethrough.errors import ParameterError

KVCacheDType = Literal["auto", "f32", "f16"]
Backend = Literal["cpu", "reference"]
CPUPath = Literal["avx512", "avx2", "portable"]

BACKENDS: tuple[Backend, ...] = ("cpu", "reference")
CPU_PATHS: tuple[CPUPath, ...] = ("avx512", "avx2", "portable")
KV_CACHE_DTYPES: tuple[KVCacheDType, ...] = ("auto", "f32", "f16")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Engine settings. None means: chosen at load from the model and the machine.

    Attributes:
        threads: how many threads the arithmetic uses; None takes what the process may use.
        max_model_len: longest context in tokens; None takes the model's own, if the pool can hold
            it.
        kv_cache_dtype: type of cached K and V; auto is f32 for f32 weights, else f16.
        backend: which kernels run the program: `cpu` is compiled, `reference` is plain NumPy.
        cpu_path: which instructions `cpu` may use; None takes the best that the processor has. One
            process holds to its first choice.
        block_size: positions per KV block.
        num_kv_blocks: size of the KV pool; None takes what a quarter of the free memory holds, at
            most eight full contexts.
        max_num_batched_tokens: rows of one step; longer prompts are computed in chunks.
        max_num_seqs: requests that run at the same time.
        long_prefill_token_threshold: while others decode, one prompt gets at most so many rows of
            a step, so that they need not wait for long.
        enable_prefix_caching: whether equal beginnings of prompts are computed once.
    """

    threads: int | None = None
    max_model_len: int | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    backend: Backend = "cpu"
    cpu_path: CPUPath | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    long_prefill_token_threshold: int = 128
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.enable_prefix_caching, bool):
            value = self.enable_prefix_caching
            raise ParameterError("enable_prefix_caching", value, "true or false is expected")
        for name, most in _LIMITS.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ParameterError(name, value, "an integer is expected")
            if not 1 <= value <= most:
                raise ParameterError(name, value, f"1 to {most} is allowed")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            known = ", ".join(KV_CACHE_DTYPES)
            raise ParameterError("kv_cache_dtype", self.kv_cache_dtype, f"known: {known}")
        if self.backend not in BACKENDS:
            known = ", ".join(BACKENDS)
            raise ParameterError("backend", self.backend, f"known: {known}")
        if self.cpu_path is not None and self.cpu_path not in CPU_PATHS:
            known = ", ".join(CPU_PATHS)
            raise ParameterError("cpu_path", self.cpu_path, f"known: {known}")
        if self.backend == "cpu" and self.block_size % 16:
            why = "the cpu backend reads sixteen positions at once: a multiple of 16 is expected"
            raise ParameterError("block_size", self.block_size, why)


_OPTIONAL = ("threads", "max_model_len", "num_kv_blocks")
_LIMITS = {
    "threads": 1024,
    "max_model_len": 1 << 24,
    "block_size": 1024,
    "num_kv_blocks": 1 << 24,
    "max_num_batched_tokens": 1 << 20,
    "max_num_seqs": 4096,
    "long_prefill_token_threshold": 1 << 20,
}
