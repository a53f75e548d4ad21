"""Requests to the ragged batch of one step (S3): row starts and lengths in place of padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seethrough.engine.request import Request
from seethrough.kernels.batch import ForwardBatch


class Scheduled(NamedTuple):
    """A request and the positions start .. stop − 1 that this step computes for it."""

    request: Request
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the request's newest token, so that the next one is chosen."""
        return self.stop == self.request.num_tokens

    @property
    def scored(self) -> range:
        """Positions whose rows give log-probabilities to the prompt token behind them."""
        unscored = self.request.unscored
        if unscored is None:
            return range(0)
        return range(max(self.start, unscored), min(self.stop, len(self.request.prompt_ids) - 1))

    @property
    def logit_positions(self) -> Sequence[int]:
        """Positions whose logits are wanted: those that score, and the last if it is sampled."""
        last = (self.stop - 1,) if self.samples else ()
        scored = self.scored
        return (*scored, *last) if scored else last


def build_batch(scheduled: Sequence[Scheduled]) -> ForwardBatch:
    """Lay the scheduled tokens end to end."""
    starts = [0]
    for item in scheduled:
        starts.append(starts[-1] + item.stop - item.start)
    token_ids, positions, slots = np.empty((3, starts[-1]), dtype=np.int64)
    logit_rows: list[int] = []
    for row, item in zip(starts, scheduled, strict=False):
        request, start, stop = item
        if stop - start == 1:  # decoding: by far the most frequent, and arrays are dear
            token_ids[row], positions[row] = request.token(start), start
            slots[row] = request.table.slot(start)
        else:
            rows = slice(row, row + stop - start)
            token_ids[rows], positions[rows] = request.rows(start, stop), np.arange(start, stop)
            slots[rows] = request.table.slots(start, stop)
        logit_rows += [row + position - start for position in item.logit_positions]
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        query_start=np.array(starts, dtype=np.int64),
        seq_lens=np.array([item.stop for item in scheduled], dtype=np.int64),
        block_tables=tuple([item.request.table.array for item in scheduled]),
        logit_rows=np.array(logit_rows, dtype=np.int64),
    )
