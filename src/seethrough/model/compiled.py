"""A program on the `cpu` backend: packed weights, records, workers; one compiled loop per step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from seethrough.kernels.batch import ForwardBatch
from seethrough.kernels.cpu.compiled import Kernels
from seethrough.kernels.cpu.forms import packed_bytes
from seethrough.kernels.cpu.memory import aligned
from seethrough.kernels.cpu.path import use
from seethrough.kernels.cpu.record import PIECE, STEP_WORDS, TILE, S, mix_bytes, scratch_bytes
from seethrough.kernels.cpu.weights import Packed, Packer
from seethrough.kernels.cpu.workers import Workers
from seethrough.kernels.ops import KVCache
from seethrough.model.lower import Lowering
from seethrough.model.program import Op, build_ops
from seethrough.model.run import OpTracer
from seethrough.model.spec import TransformerSpec
from seethrough.weights.tensor import Tensor

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
Progress = Callable[[int, int], None]


def pack_weights(
    tensors: Mapping[str, Tensor], kernels: Kernels, threads: int, progress: Progress | None = None
) -> dict[str, Packed | F32]:
    """Matrices in the kernels' layout, vectors (and position tables) as float32."""
    matrices = {name for name, t in tensors.items() if _is_matrix(name, t)}
    sizes = [packed_bytes(tensors[name].dtype.name, tensors[name].shape) for name in matrices]
    packer = Packer(kernels, threads, sum(-(-size // 64) * 64 for size in sizes))
    weights: dict[str, Packed | F32] = {}
    for done, (name, tensor) in enumerate(tensors.items()):
        if name in matrices:
            weights[name] = packer.pack(tensor.dtype.name, tensor.shape, tensor.data)
        else:
            weights[name] = tensor.to_f32()
        if progress is not None:
            progress(done + 1, len(tensors))
    packer.close()
    return weights


def _is_matrix(name: str, tensor: Tensor) -> bool:
    return len(tensor.shape) == 2 and name != "positions.weight"


class CompiledProgram:
    """Runs batches of up to `max_rows` rows. Logits are valid until the next run."""

    def __init__(
        self,
        spec: TransformerSpec,
        weights: Mapping[str, Packed | F32],
        kernels: Kernels,
        *,
        max_rows: int,
        kv_bytes: int,
        threads: int,
    ) -> None:
        self.spec = spec
        self.ops = build_ops(spec)
        self.kernels = kernels
        self.max_rows = max_rows
        lowering = Lowering(spec, weights, kernels, max_rows, kv_bytes)
        self._lowered = lowering.lower(self.ops)
        self._records = self._lowered.records
        self.workers = Workers(threads, kernels, len(self._records))
        self._step = aligned(8 * STEP_WORDS).view(np.int64)
        scratch = scratch_bytes(spec.head_dim, spec.n_heads // spec.n_kv_heads)
        self._scratch = aligned(scratch * threads)
        self._partials = aligned(0)
        self._step[S.SCRATCH] = self._scratch.ctypes.data
        self._step[S.SCRATCH_BYTES] = scratch
        self._step[S.COUNTERS] = self.workers.counters
        self._step[S.BARRIER] = self.workers.barrier
        self._step[S.SHARES] = 8 * threads
        self._step[S.THREADS] = threads
        # Token ids, positions, slots, logit rows; of tiles: first row, rows, table.
        self._inputs = aligned(8 * 7 * max_rows).view(np.int64).reshape(7, max_rows)
        words = (S.TOKEN_IDS, S.POSITIONS, S.SLOTS, S.LOGIT_INDEX)
        for word, line in zip(
            (*words, S.TILE_ROW, S.TILE_ROWS, S.TILE_TABLE), self._inputs, strict=True
        ):
            self._step[word] = line.ctypes.data
        self._kv: KVCache | None = None  # whose addresses the step holds
        self.stage_seconds: dict[str, float] | None = None  # filled per step where it is a dict
        self._clock = aligned(8 * (len(self._records) + 1)).view(np.int64)

    def run(self, batch: ForwardBatch, kv: KVCache, tracer: OpTracer | None = None) -> F32:
        """See `run.Model.run`."""
        if len(batch.token_ids) > self.max_rows:
            raise ValueError(f"{len(batch.token_ids)} rows, but this program has {self.max_rows}")
        held = self._fill_step(batch, kv)
        records, step = int(self._records.ctypes.data), int(self._step.ctypes.data)
        if tracer is None and self.stage_seconds is None:
            self.workers.run(records, 0, len(self._records), step)
        elif tracer is None and self.stage_seconds is not None:
            self._timed(records, step, self.stage_seconds)
        elif tracer is not None:
            self._traced(batch, tracer, records, step)
            return self._value("logits", len(batch.logit_rows)).copy()  # a trace keeps them
        del held  # alive until here: the step holds bare addresses
        return self._value("logits", len(batch.logit_rows))

    @property
    def cpu_path(self) -> str | None:
        """The processor path that the kernels are compiled for."""
        return use()

    def close(self) -> None:
        """End the worker threads."""
        self.workers.close()

    def _value(self, name: str, rows: int) -> F32:
        buffer = self._lowered.buffers[name]
        return buffer.floats[:rows, : buffer.width]

    def _fill_step(self, batch: ForwardBatch, kv: KVCache) -> I64:
        """Write the step's words; returns the block tables, which they point to."""
        if kv is not self._kv:
            self._set_cache(kv)
        step, inputs = self._step, self._inputs
        rows, logit_rows = len(batch.token_ids), len(batch.logit_rows)
        inputs[0, :rows], inputs[1, :rows] = batch.token_ids, batch.positions
        inputs[2, :rows], inputs[3, :logit_rows] = batch.slots, batch.logit_rows
        tables = np.concatenate(batch.block_tables)
        tiles = _tiles(batch, int(tables.ctypes.data))
        inputs[4:7, : len(tiles)] = np.array(tiles, dtype=np.int64).T
        step[S.ROWS], step[S.LOGIT_ROWS], step[S.TILES] = rows, logit_rows, len(tiles)
        step[S.SCORES] = step[S.CLOCK] = 0  # an interrupt may have left them
        self._share_pieces(batch, len(tiles))
        return tables

    def _set_cache(self, kv: KVCache) -> None:
        """Write the words of a cache, which stay."""
        step = self._step
        step[S.K], step[S.V] = kv.k.ctypes.data, kv.v.ctypes.data
        step[S.BLOCKS], step[S.BLOCK_SIZE] = kv.k.shape[1], kv.block_size
        self._kv = kv

    def _share_pieces(self, batch: ForwardBatch, tiles: int) -> None:
        """Few tiles over long contexts: let threads share the pieces of a context."""
        pieces = -(-int(batch.seq_lens.max()) // PIECE)
        few = tiles * self.spec.n_kv_heads < 4 * self.workers.count
        split = pieces > 1 and few and self.workers.count > 1
        self._step[S.SPLIT], self._step[S.PIECES] = split, pieces
        if split:
            lines = len(batch.token_ids) * self.spec.n_heads * pieces
            needed = lines * mix_bytes(self.spec.head_dim)
            if needed > self._partials.size:
                self._partials = aligned(2 * needed)
            self._step[S.PARTIALS] = self._partials.ctypes.data

    def _traced(self, batch: ForwardBatch, tracer: OpTracer, records: int, step: int) -> None:
        """Record by record, showing what every operation made.

        Where several operations are one record, each gets an equal share of its time.
        """
        scores: list[F32] = []
        for i, done in enumerate(self._lowered.ops):
            layer = self._lowered.attends.get(i)
            if layer is not None:
                scores = self._room_for_scores(batch) if tracer.wants_scores(layer) else []
            started = perf_counter()
            self.workers.run(records, i, i + 1, step)
            seconds = perf_counter() - started
            self._step[S.SCORES] = 0
            ops = [self.ops[number] for number in done]
            computing = [op for op in ops if op.kernel not in ("split_heads", "merge_heads")]
            for op in ops:
                share = seconds / len(computing) if op in computing else 0.0
                shown = scores if op.kernel == "attend" else []
                tracer.op_done(op, self._outputs(op, batch), shown, share)

    def _timed(self, records: int, step: int, stages: dict[str, float]) -> None:
        """The whole loop, with the first thread noting the cycle at which each record starts."""
        self._step[S.CLOCK] = self._clock.ctypes.data
        started = perf_counter()
        self.workers.run(records, 0, len(self._records), step)
        seconds = perf_counter() - started
        self._step[S.CLOCK] = 0
        spent = np.diff(self._clock).astype(np.float64)
        spent *= seconds / spent.sum()
        for i, stage in enumerate(self._stages):
            stages[stage] = stages.get(stage, 0.0) + float(spent[i])

    @cached_property
    def _stages(self) -> list[str]:
        """The stage of each record: that of its first operation, or of the next that has one."""
        stages, following = [], "S9"
        for done in reversed(self._lowered.ops):
            following = self.ops[done[0]].stage if done else following
            stages.append(following)
        return stages[::-1]

    def _room_for_scores(self, batch: ForwardBatch) -> list[F32]:
        """Per request [H, n, t] of -inf, where attention leaves the scores of what a row sees."""
        rows, keys = len(batch.token_ids), int(batch.seq_lens.max())
        room = np.full((self.spec.n_heads, rows, keys), -np.inf, dtype=np.float32)
        self._step[S.SCORES], self._step[S.SCORE_KEYS] = room.ctypes.data, keys
        return [
            room[:, batch.rows_of(b), : int(batch.seq_lens[b])] for b in range(batch.n_requests)
        ]

    def _outputs(self, op: Op, batch: ForwardBatch) -> tuple[F32, ...]:
        if not op.outputs:
            return ()
        name = op.outputs[0]
        rows = len(batch.logit_rows if op.stage in ("S7", "S8", "S9") else batch.token_ids)
        value = self._value(name, rows).copy()
        if name.endswith(("_heads", "_pos")):
            value = value.reshape(rows, -1, self.spec.head_dim)
        return (value,)


def _tiles(batch: ForwardBatch, tables: int) -> list[tuple[int, int, int]]:
    """Rows of one request that follow one another, at most TILE each: first row, rows, table.

    `tables` is the address of all block tables, laid end to end.
    """
    tiles, start = [], 0
    for stop, table in zip(batch.query_start[1:].tolist(), batch.block_tables, strict=True):
        for row in range(start, stop, TILE):
            tiles.append((row, min(TILE, stop - row), tables))
        start, tables = stop, tables + 8 * len(table)
    return tiles
