"""One step's work for many requests, laid end to end without padding. Plain data, no behaviour.

Rows of request b:  query_start[b] .. query_start[b+1]      (its new tokens in this step)
It attends to:      positions 0 .. seq_lens[b] - 1          (through block_tables[b])

        request 0      request 1    request 2
      ┌──────────────┬────────────┬───┐
rows  │ p0 p1 p2 p3  │ p0 p1 p2   │p57│     a prefill, a chunk and a decode are the same thing
      └──────────────┴────────────┴───┘
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The ragged batch of one step: N rows of B requests, of which R rows want logits."""

    token_ids: I64  # [N]
    positions: I64  # [N] place of each row's token in its own sequence
    slots: I64  # [N] where the row's K and V are written: block * block_size + offset
    query_start: I64  # [B + 1]
    seq_lens: I64  # [B] tokens in the cache once this step has written its own
    block_tables: tuple[I64, ...]  # B tables; position p lies in block table[p // block_size]
    logit_rows: I64  # [R] rows whose logits are computed

    @property
    def n_requests(self) -> int:
        """Requests in this step, B."""
        return len(self.seq_lens)

    def rows_of(self, request: int) -> slice:
        """The rows of request number `request`."""
        return slice(int(self.query_start[request]), int(self.query_start[request + 1]))
