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
    lengths = [s.stop - s.start for s in scheduled]
    query_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    logit_rows = [
        int(first) + position - s.start
        for first, s in zip(query_start, scheduled, strict=False)
        for position in s.logit_positions
    ]
    return ForwardBatch(
        token_ids=np.concatenate([s.request.tokens(s.start, s.stop) for s in scheduled]),
        positions=np.concatenate([np.arange(s.start, s.stop) for s in scheduled]),
        slots=np.concatenate([s.request.table.slots(s.start, s.stop) for s in scheduled]),
        query_start=query_start,
        seq_lens=np.asarray([s.stop for s in scheduled], dtype=np.int64),
        block_tables=tuple(np.asarray(s.request.table.blocks) for s in scheduled),
        logit_rows=np.asarray(logit_rows, dtype=np.int64),
    )
