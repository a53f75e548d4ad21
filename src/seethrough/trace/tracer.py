"""Collects the values of the stages while a request runs. It looks; it never changes a value.

Off, tracing costs one `is None` per operation. On, arrays are kept as they were made: nothing is
computed here, and what a viewer derives from them (A, probs) is made on access, in `trace.py`.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from seethrough.engine.outputs import RequestOutput, token_text
from seethrough.kernels.batch import ForwardBatch
from seethrough.kv.pool import KVPool
from seethrough.model.program import Op
from seethrough.model.spec import TransformerSpec
from seethrough.sampling.record import SamplingRecord
from seethrough.sampling.sampler import Sampled
from seethrough.sampling.softmax import Row
from seethrough.text.tokenizer import Tokenizer
from seethrough.trace.filter import DEFAULT_BYTE_BUDGET, TraceFilter
from seethrough.trace.trace import Omitted, Piece, StepTrace, Trace
from seethrough.trace.values import DERIVED, HEAD_AXIS, KV_VALUES, Key, row_axis

__all__ = ["DEFAULT_BYTE_BUDGET", "TraceFilter", "Tracer"]

Array = NDArray[Any]


class ArrayRecord(SamplingRecord):
    """A sampling record that also keeps the whole rows, and how long each stage took.

    The time of a step is what passed since the step before it was noted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.adjusted: Row | None = None
        self.chosen_from: Row | None = None
        self.seconds = {"S10": 0.0, "S11": 0.0, "S12": 0.0}
        self._since = perf_counter()

    def add_step(
        self,
        name: str,
        stage: Literal["S10", "S11"],
        params: dict[str, Any],
        before: Row,
        after: Row,
    ) -> None:
        """Note one step, and its row if it is the last of S10 so far."""
        self.seconds[stage] += perf_counter() - self._since
        super().add_step(name, stage, params, before, after)
        if stage == "S10":
            self.adjusted = after
        elif self.adjusted is None:
            self.adjusted = before
        self._since = perf_counter()

    def finish(self, row: Row, u: float | None, token_id: int) -> None:
        """Note the row that was chosen from, and the choice."""
        self.seconds["S12"] += perf_counter() - self._since
        super().finish(row, u, token_id)
        self.chosen_from = row
        if self.adjusted is None:
            self.adjusted = row


class Tracer:
    """Follows one request, alone in its engine. See `engine.StepTracer` for what it is shown."""

    def __init__(self, spec: TransformerSpec, chosen: TraceFilter) -> None:
        self._spec = spec
        self._filter = chosen
        self._left = chosen.byte_budget
        self._omitted: dict[Omitted, None] = {}
        self._steps: list[StepTrace] = [StepTrace(0)]
        self._prompt: tuple[str | None, list[int], list[str]] = (None, [], [])
        self._tokenize_seconds = 0.0
        self._batch: ForwardBatch | None = None
        self._pool: KVPool | None = None

    def prompt(self, text: str | None, ids: list[int], pieces: list[str], seconds: float) -> None:
        """S1 and S2; the tokenizer library does both in one go."""
        self._prompt = (text, ids, pieces)
        self._tokenize_seconds = seconds

    def begin_step(self, batch: ForwardBatch, pool: KVPool) -> None:
        """A step starts: S3's row starts and S5's positions are in the batch."""
        self._batch, self._pool = batch, pool
        step = self._steps[-1]
        step.positions += batch.positions.tolist()
        ids = batch.token_ids[None]  # [B, n] with B = 1: nothing is padded
        self._keep(("S3", "padded_token_ids", None), ids)
        self._keep(("S3", "attention_mask", None), np.ones_like(ids, dtype=np.int8))
        self._keep(("S5", "positions", None), batch.positions)

    def wants_scores(self, layer: int) -> bool:
        """S6.5's weights are derived from S6.4's scores, so either stage asks for them."""
        return any(self._filter.wants(stage, layer) for stage in ("S6.4", "S6.5"))

    def op_done(
        self, op: Op, outputs: tuple[Array, ...], scores: list[Array], seconds: float
    ) -> None:
        """Keep what an operation made, under the stage table's names."""
        self._steps[-1].add_seconds(op.stage, op.layer, seconds)
        if scores:  # first: what attention gives is made of them
            self._keep(("S6.4", "S_masked", op.layer), scores[0])
        for name, value in zip(op.outputs, outputs, strict=True):
            if self._filter.wants(op.stage, op.layer):
                self._keep((op.stage, name, op.layer), value)
        if op.kernel == "write_kv" and op.layer is not None:
            self._keep_written(op.layer)
        last = op.layer == self._spec.n_layers - 1
        if last and op.outputs == ("X_updated",) and self._filter.wants("S6", None):
            self._keep(("S6", "XL", None), outputs[0])

    def new_record(self) -> SamplingRecord:
        """Where the sampler notes S10 to S12."""
        return ArrayRecord()

    def token_done(
        self, sampled: Sampled, record: SamplingRecord | None, text: str, seconds: float
    ) -> None:
        """A token was chosen: its step is complete, and the next one starts."""
        step = self._steps[-1]
        step.token_id, step.text, step.record = sampled.token_id, text, record
        if isinstance(record, ArrayRecord):
            for stage, spent in record.seconds.items():
                step.add_seconds(stage, None, spent)
            if record.adjusted is not None and record.chosen_from is not None:
                self._keep(("S10", "adjusted_logits", None), record.adjusted[None])
                self._keep(("S11", "candidate_logits", None), record.chosen_from[None])
        step.add_seconds("S12", None, seconds)
        self._steps.append(StepTrace(len(self._steps)))

    def finish(self, output: RequestOutput, tokenizer: Tokenizer, model: str) -> Trace:
        """The trace, with the request's output."""
        text, ids, pieces = self._prompt
        steps = [step for step in self._steps if step.positions]
        if steps:
            steps[0].add_seconds("S1", None, self._tokenize_seconds)
        return Trace(
            model=model,
            spec=self._spec,
            chosen=self._filter,
            prompt=text,
            prompt_token_ids=ids,
            prompt_tokens=pieces,
            output_tokens=tokenizer.pieces(output.outputs[0].token_ids),
            texts={i: token_text(tokenizer, i) for i in _candidate_ids(steps)},
            steps=steps,
            omitted=list(self._omitted),
            output=output,
        )

    def _keep_written(self, layer: int) -> None:
        """What the cache holds at the rows just written, rounded as attention will read it."""
        if not self._filter.wants("S6.8", layer) or self._batch is None or self._pool is None:
            return
        block, offset = np.divmod(self._batch.slots, self._pool.block_size)
        pair = [self._pool.k[layer, block, offset], self._pool.v[layer, block, offset]]
        self._keep(("S6.8", "kv_cache", layer), np.stack(pair))  # [2, n, Hkv, dh]

    def _keep(self, key: Key, value: Array) -> None:
        """Cut a value down to the chosen rows and heads, and keep it if the budget allows."""
        stage, name, layer = key
        if not self._asked_for(stage, name, layer):
            return
        positions = self._positions_of(stage)
        if self._filter.tokens is not None:
            rows = np.flatnonzero([int(p) in self._filter.tokens for p in positions])
            positions = positions[rows]
            value = np.take(value, rows, axis=row_axis(name))
        if self._filter.heads is not None and name in HEAD_AXIS:
            value = np.take(value, self._heads_of(name), axis=HEAD_AXIS[name])
        if len(positions) == 0:
            return
        self._left += self._steps[-1].drop_renewed(key, positions)
        if value.nbytes > self._left:
            self._omitted[Omitted(len(self._steps) - 1, *key, value.nbytes)] = None
            return
        self._left -= value.nbytes
        self._steps[-1].add(key, Piece(positions, value))

    def _asked_for(self, stage: str, name: str, layer: int | None) -> bool:
        """A value is kept for its own stage, and for the stage of what is derived from it."""
        stages = [stage, *(to for to, *source in DERIVED.values() if source == [stage, name])]
        return any(self._filter.wants(s, layer) for s in stages)

    def _positions_of(self, stage: str) -> NDArray[np.int64]:
        """Which positions the rows of a stage's value belong to."""
        if self._batch is None:
            return np.zeros(0, dtype=np.int64)
        positions = self._batch.positions
        if stage in ("S7", "S8", "S9"):
            return positions[self._batch.logit_rows]
        return positions[-1:] if stage in ("S10", "S11") else positions

    def _heads_of(self, name: str) -> list[int]:
        """The chosen heads; for keys and values, the shared heads that they use, once each."""
        heads = self._filter.heads or ()
        if name not in KV_VALUES:
            return list(heads)
        group = self._spec.n_heads // self._spec.n_kv_heads
        return sorted({head // group for head in heads})


def _candidate_ids(steps: list[StepTrace]) -> list[int]:
    """The ids that any sampling record shows, in order."""
    shown = set()
    for record in (step.record for step in steps if step.record is not None):
        rows = [record.candidates, *(r for s in record.steps for r in (s.before, s.after))]
        shown |= {candidate.token_id for row in rows for candidate in row}
    return sorted(shown)
