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
    def logit_positions(self) -> range:
        """Positions whose logits are wanted: the last, or all where the prompt is scored."""
        if self.scores_prompt:
            return range(self.start, self.stop)
        return range(self.stop - 1, self.stop) if self.samples else range(0)

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt tokens get log-probabilities in this step."""
        request = self.request
        wanted = request.params.prompt_logprobs is not None and request.sample_index == 0
        return wanted and self.start < len(request.prompt_ids)


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
            token_ids[rows], positions[rows] = request.tokens(start, stop), np.arange(start, stop)
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
