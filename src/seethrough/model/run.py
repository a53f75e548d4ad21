"""Runs a program over one ragged batch, operation by operation: token ids in, logits out.

With a tracer, the same operations run with the same values; it is only shown what they made.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from seethrough.kernels.batch import ForwardBatch
from seethrough.kernels.ops import KVCache
from seethrough.model.program import Op, Program

if TYPE_CHECKING:
    from seethrough.kernels.cpu.compiled import Kernels

F32 = NDArray[np.float32]
_ROWS_WORTH_THREADS = 64


class OpTracer(Protocol):
    """What `run` needs of a tracer."""

    def wants_scores(self, layer: int) -> bool:
        """Whether S_masked of this layer is to be kept."""
        ...

    def op_done(self, op: Op, outputs: tuple[F32, ...], scores: list[F32], seconds: float) -> None:
        """Called after every operation; `scores` is filled only by attention."""
        ...


class Model(Protocol):
    """What the engine steps: a program on one of the backends.

    Attributes:
        stage_seconds: where it is a dict, every untraced run adds to it what each stage took.
        cpu_path: the processor path of compiled kernels, None where there are none.
        kernels: where those come from; they know what had to be compiled to get ready.
    """

    stage_seconds: dict[str, float] | None

    @property
    def cpu_path(self) -> str | None:
        """See the class."""
        ...

    @property
    def kernels(self) -> Kernels | None:
        """See the class."""
        ...

    def run(self, batch: ForwardBatch, kv: KVCache, tracer: OpTracer | None = None) -> F32:
        """Logits of the batch's `logit_rows`, [R, V] float32, until the next run.

        Writes the rows' K and V into `kv`. With a tracer the same values are made, and shown.
        """
        ...

    def close(self) -> None:
        """Let go of threads."""
        ...


class Interpreted:
    """A program on the `reference` backend, operation by operation in Python."""

    cpu_path = None
    kernels = None

    def __init__(self, program: Program, threads: int) -> None:
        self.program = program
        self._threads = threads
        self._controller = ThreadpoolController()
        self.stage_seconds: dict[str, float] | None = None

    def run(self, batch: ForwardBatch, kv: KVCache, tracer: OpTracer | None = None) -> F32:
        """See `Model.run`."""
        # Few rows are many small products: a second BLAS thread gains little there, and costs ten
        # times when a neighbour takes its core (docs/log.md).
        threads = self._threads if len(batch.token_ids) >= _ROWS_WORTH_THREADS else 1
        if tracer is None and self.stage_seconds is not None:
            tracer = _StageClock(self.stage_seconds)
        with self._controller.limit(limits=threads, user_api="blas"):
            return run(self.program, batch, kv, tracer)

    def close(self) -> None:
        """Nothing to let go of."""


class _StageClock:
    """A tracer that adds up what each stage took."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    def wants_scores(self, layer: int) -> bool:
        return False

    def op_done(self, op: Op, outputs: tuple[F32, ...], scores: list[F32], seconds: float) -> None:
        self._seconds[op.stage] = self._seconds.get(op.stage, 0.0) + seconds


def run(program: Program, batch: ForwardBatch, kv: KVCache, tracer: OpTracer | None = None) -> F32:
    """Logits of the batch's `logit_rows`, [R, V] float32; writes the rows' K and V into `kv`."""
    values: dict[str, Any] = {
        "token_ids": batch.token_ids,
        "positions": batch.positions,
        "slots": batch.slots,
        "logit_rows": batch.logit_rows,
        "batch": batch,
        "kv": kv,
    }
    for op in program.ops:
        kernel = getattr(program.kernels, op.kernel)
        arguments = [values[name] for name in op.inputs]
        arguments += [program.weights[name] for name in op.weights]
        if tracer is None:
            result = kernel(*arguments, **op.attrs)
        else:
            result = _traced(op, kernel, arguments, tracer)
        if op.outputs:
            values[op.outputs[0]] = result
    logits: F32 = values["logits"]
    return logits


def _traced(op: Op, kernel: Any, arguments: list[Any], tracer: OpTracer) -> Any:
    attrs, scores = dict(op.attrs), list[F32]()
    if op.kernel == "attend" and op.layer is not None and tracer.wants_scores(op.layer):
        attrs["scores"] = scores
    started = perf_counter()
    result = kernel(*arguments, **attrs)
    seconds = perf_counter() - started
    tracer.op_done(op, (result,) if op.outputs else (), scores, seconds)
    return result
