"""Drives a program over a paged cache made as unpleasant as it may be: shuffled, full of NaN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seethrough.kernels.batch import ForwardBatch
from seethrough.kv.pool import BlockTable, KVPool, KVShape
from seethrough.model.compiled import CompiledProgram
from seethrough.model.program import Program
from seethrough.model.run import OpTracer, run

Array = NDArray[Any]


class Paged:
    """Requests that share one pool. Blocks are dealt in random order; unused slots hold NaN."""

    def __init__(
        self,
        program: Program | CompiledProgram,
        n_requests: int = 1,
        capacity: int = 80,
        *,
        block_size: int = 16,
        dtype: str = "f4",
    ) -> None:
        spec = program.spec
        shape = KVShape(spec.n_layers, spec.n_kv_heads, spec.head_dim, np.dtype(dtype))
        blocks = -(-capacity // block_size)
        self.program = program
        self.pool = KVPool(shape, n_requests * blocks + 3, block_size)
        self.pool.k[:] = np.nan
        self.pool.v[:] = np.nan
        order = self.pool.allocate(self.pool.num_blocks)
        np.random.default_rng(3).shuffle(order)
        dealt = [order[i * blocks : (i + 1) * blocks] for i in range(n_requests)]
        self.tables = [BlockTable(self.pool, table) for table in dealt]
        self.computed = [0] * n_requests

    def step(
        self, work: Mapping[int, Sequence[int]], tracer: OpTracer | None = None
    ) -> list[Array]:
        """New ids of some requests in one ragged batch; logits of all their rows, per request."""
        starts = {r: self.computed[r] for r in work}
        ends = {r: starts[r] + len(ids) for r, ids in work.items()}
        query_start = np.cumsum([0, *(len(ids) for ids in work.values())])
        batch = ForwardBatch(
            token_ids=np.concatenate([np.asarray(ids, dtype=np.int64) for ids in work.values()]),
            positions=np.concatenate([np.arange(starts[r], ends[r]) for r in work]),
            slots=np.concatenate([self.tables[r].slots(starts[r], ends[r]) for r in work]),
            query_start=query_start,
            seq_lens=np.array([ends[r] for r in work]),
            block_tables=tuple(np.array(self.tables[r].blocks) for r in work),
            logit_rows=np.arange(query_start[-1]),
        )
        if isinstance(self.program, Program):
            logits = run(self.program, batch, self.pool, tracer)
        else:
            logits = self.program.run(batch, self.pool, tracer).copy()
        for r in work:
            self.computed[r] = ends[r]
        return np.split(logits, query_start[1:-1])

    def feed(self, ids: Sequence[int], chunk: int) -> Array:
        """One request alone, `chunk` ids at a time; logits of every position, [n, V]."""
        cuts = range(0, len(ids), chunk)
        return np.concatenate([self.step({0: ids[i : i + chunk]})[0] for i in cuts])


def prefill(program: Program | CompiledProgram, ids: Sequence[int], dtype: str = "f4") -> Array:
    """Logits of every position of one prompt, computed in one go, [n, V]."""
    return Paged(program, capacity=len(ids), dtype=dtype).step({0: ids})[0]


def greedy(program: Program | CompiledProgram, ids: Sequence[int], count: int) -> list[int]:
    """`count` ids that a greedy loop with the cache appends."""
    paged, new, out = Paged(program, capacity=len(ids) + count), list(ids), list[int]()
    for _ in range(count):
        new = [int(np.argmax(paged.step({0: new})[0][-1]))]
        out += new
    return out
