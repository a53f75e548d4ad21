"""From a name to an engine that is ready: what is needed, what is there, what was chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from seethrough.config import Backend, EngineConfig
from seethrough.engine.engine import Engine
from seethrough.engine.machine import available_memory, usable_threads
from seethrough.errors import CheckpointError, InsufficientMemoryError
from seethrough.kv.pool import KVPool, KVShape
from seethrough.model.load import (
    ModelWeights,
    Placement,
    build_model,
    understand,
    weight_bytes,
)
from seethrough.model.run import Model
from seethrough.sampling.compiled import CompiledOps
from seethrough.sampling.ops import NUMPY, SamplingOps
from seethrough.text.tokenizer import Tokenizer
from seethrough.weights.catalog import default_cache_dir
from seethrough.weights.checkpoint import Checkpoint, open_checkpoint
from seethrough.weights.files import ModelFiles, resolve_model

if TYPE_CHECKING:
    from seethrough.kernels.cpu.compiled import Kernels

T = TypeVar("T")
Progress = Callable[[str, int, int], None]
_CONTEXTS = 8  # a pool that chose its own size holds so many full contexts, memory permitting


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading found and chose. Sizes in bytes, times in milliseconds.

    Attributes:
        stored: the weights in the file.
        expanded: the weights in memory; `reference` holds them as float32, `cpu` as stored.
        available: free memory before anything was loaded.
        cpu_path: the instructions that `cpu` uses; None on `reference`.
        compiled_kernels: kernels that had to be compiled; they are kept for the next start.
        phases: name of each loading phase and what it took.
    """

    name: str
    family: str
    stored: int
    expanded: int
    kv_bytes: int
    kv_dtype: str
    num_kv_blocks: int
    block_size: int
    kv_bytes_per_token: int
    max_model_len: int
    model_max_len: int
    available: int
    threads: int
    backend: Backend
    cpu_path: str | None
    compiled_kernels: int
    left_aside: tuple[str, ...]
    notes: tuple[str, ...]
    phases: Mapping[str, float]

    @property
    def load_ms(self) -> float:
        """All phases together."""
        return sum(self.phases.values())


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine with what requests need to know of its model."""

    engine: Engine
    weights: ModelWeights
    tokenizer: Tokenizer
    end_ids: frozenset[int]
    generation_config: Mapping[str, Any]
    config: EngineConfig
    files: ModelFiles
    report: LoadReport


def load_tokenizer(files: ModelFiles, checkpoint: Checkpoint | None = None) -> Tokenizer:
    """The model's tokenizer alone; no weight is read."""
    if files.format == "safetensors":
        return Tokenizer.from_dir(files.root)
    checkpoint = checkpoint or open_checkpoint(files)
    return Tokenizer.from_gguf(checkpoint.metadata)


def load(
    model: str,
    config: EngineConfig,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Load a model and build its engine.

    Raises:
        SeethroughError: the model is not there, not supported, damaged or too large; before its
            weights are expanded.
    """
    clock = _Phases()
    available = available_memory()
    checkpoint, files = clock.time("open", lambda: _open(model, cache_dir))
    weights = clock.time("names", lambda: understand(checkpoint))
    tokenizer = clock.time("tokenizer", lambda: load_tokenizer(files, checkpoint))
    sizes = choose_sizes(weights, config, available)
    tick = None if progress is None else lambda done, of: progress("weights", done, of)
    compiling = None if progress is None else lambda name: progress(f"kernel {name}", 0, 0)
    threads = config.threads or usable_threads()
    placement = Placement(
        backend=config.backend,
        threads=threads,
        max_model_len=sizes.max_model_len,
        max_rows=config.max_num_batched_tokens,
        kv_bytes=sizes.kv.dtype.itemsize,
        cpu_path=config.cpu_path,
        kernel_dir=kernel_dir(),
    )
    ready, sampling = clock.time("weights", lambda: _build(weights, placement, tick, compiling))
    kernels = ready.kernels
    clock.split("kernels", "weights", kernels.seconds if kernels is not None else 0.0)
    pool = clock.time("pool", lambda: KVPool(sizes.kv, sizes.num_kv_blocks, config.block_size))
    report = LoadReport(
        name=files.name,
        family=weights.family,
        stored=weights.nbytes,
        expanded=weight_bytes(weights, config.backend),
        kv_bytes=pool.nbytes,
        kv_dtype={4: "f32", 2: "f16"}[sizes.kv.dtype.itemsize],
        num_kv_blocks=pool.num_blocks,
        block_size=pool.block_size,
        kv_bytes_per_token=sizes.kv.bytes_per_token,
        max_model_len=sizes.max_model_len,
        model_max_len=weights.spec.max_positions,
        available=available,
        threads=threads,
        backend=config.backend,
        cpu_path=ready.cpu_path,
        compiled_kernels=len(kernels.compiled) if kernels is not None else 0,
        left_aside=weights.left_aside,
        notes=(*weights.notes, *_unkept(kernels)),
        phases=clock.phases,
    )
    return Loaded(
        engine=Engine(ready, pool, tokenizer, config, sampling),
        weights=weights,
        tokenizer=tokenizer,
        end_ids=end_token_ids(checkpoint, tokenizer),
        generation_config=checkpoint.generation_config,
        config=config,
        files=files,
        report=report,
    )


def _unkept(kernels: Kernels | None) -> tuple[str, ...]:
    if kernels is None or kernels.unkept is None:
        return ()
    return (f"compiled kernels could not be kept for the next start: {kernels.unkept}",)


def _build(
    weights: ModelWeights,
    placement: Placement,
    progress: Callable[[int, int], None] | None,
    compiling: Callable[[str], None] | None,
) -> tuple[Model, SamplingOps[Any]]:
    """The model and what samples from its logits, both with every kernel that they will need."""
    model = build_model(weights, placement, progress, compiling)
    kernels = model.kernels
    if kernels is None:
        return model, NUMPY
    return model, CompiledOps(weights.spec.vocab_size, kernels)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Context and KV pool, as chosen."""

    max_model_len: int
    num_kv_blocks: int
    kv: KVShape


def choose_sizes(weights: ModelWeights, config: EngineConfig, available: int) -> Sizes:
    """Fit the context and the KV pool into what is free beside the weights.

    Raises:
        CheckpointError: the asked context is longer than the model can place.
        InsufficientMemoryError: not even the weights and one block fit, or the asked sizes do not.
    """
    spec = weights.spec
    kv = KVShape(spec.n_layers, spec.n_kv_heads, spec.head_dim, _kv_dtype(weights, config))
    block_bytes = kv.bytes_per_token * config.block_size
    asked = config.max_model_len
    if asked is not None and asked > spec.max_positions:
        raise CheckpointError(
            f"max_model_len={asked} is more than the {spec.max_positions} positions that the model "
            "has"
        )
    needed = weight_bytes(weights, config.backend)
    free = available - needed
    length = asked or spec.max_positions
    blocks = config.num_kv_blocks
    if blocks is None:
        one_context = -(-length // config.block_size)
        affordable = max(0, free) // 4 // block_bytes
        floor = one_context if asked is not None else 1
        blocks = max(floor, min(_CONTEXTS * one_context, affordable))
    if free < blocks * block_bytes:
        raise InsufficientMemoryError(
            f"the weights need {_mb(needed)} MB on backend {config.backend} and the KV pool "
            f"{_mb(blocks * block_bytes)} MB, but {_mb(available)} MB are free. Use a smaller "
            "model, or lower --max-model-len or --num-kv-blocks."
        )
    if asked is None:
        length = min(length, blocks * config.block_size)
    return Sizes(length, blocks, kv)


def end_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    """What ends a text: the union of config, generation_config, tokenizer and GGUF."""
    ids = set(tokenizer.eos_token_ids)
    for source in (checkpoint.config, checkpoint.generation_config):
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise CheckpointError(f"{checkpoint.name}: eos_token_id {token_id!r} is not an id")
            ids.add(token_id)
    return frozenset(ids)


def _open(model: str, cache_dir: Path | None) -> tuple[Checkpoint, ModelFiles]:
    files = resolve_model(model, cache_dir)
    return open_checkpoint(files), files


def _kv_dtype(weights: ModelWeights, config: EngineConfig) -> np.dtype[Any]:
    chosen = config.kv_cache_dtype
    if chosen == "auto":
        chosen = "f32" if weights.is_f32 else "f16"
    return np.dtype({"f32": np.float32, "f16": np.float16}[chosen])


def _mb(size: int) -> int:
    return size // 1_000_000


def kernel_dir() -> Path:
    """Where compiled kernels are kept, beside the models."""
    return default_cache_dir().parent / "kernels"


class _Phases:
    """Times the phases of loading, in order."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}

    def time(self, name: str, work: Callable[[], T]) -> T:
        started = perf_counter()
        result = work()
        self.phases[name] = (perf_counter() - started) * 1e3
        return result

    def split(self, name: str, out_of: str, seconds: float) -> None:
        """Give a part of a phase a name of its own."""
        self.phases[name] = seconds * 1e3
        self.phases[out_of] -= seconds * 1e3
