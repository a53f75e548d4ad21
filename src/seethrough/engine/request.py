"""One request on its way through the engine (S0): what it asked for, and how far it is.

Prefill, chunk, decode and recompute are not states: a request knows how many of its tokens are
computed (`num_computed`), and the next step computes what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from seethrough.engine.text_output import TextOutput
from seethrough.errors import SeethroughError
from seethrough.kv.pool import BlockTable
from seethrough.kv.prefix import KeyChain
from seethrough.sampling.bans import Bans, History
from seethrough.sampling.logprobs import Logprob
from seethrough.sampling.params import EffectiveParams

FinishReason = Literal["stop", "length", "abort", "error"]
LogprobDict = dict[int, Logprob]


@dataclass(slots=True)
class Times:
    """When things happened to a request, on the monotonic clock, in seconds; 0.0 is not yet.

    `tokens` has the time of every output token.
    """

    arrival: float
    first_scheduled: float = 0.0
    tokens: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Request:
    """One sample of one prompt; a prompt with n > 1 is n of these.

    Attributes:
        chain: keys of its full blocks; None where no beginning may be shared.
        forced: ids by output index that are taken whatever the sampler would choose.
        order: its place among all that arrived; who came first goes first.
        overtaken: how often others that came later were started before it.
        num_cached_tokens: prompt tokens that were found in the prefix cache when it first started.
        num_preemptions: how often it had to give back its blocks.
        most_computed: the most tokens that were ever computed or found; below it is done again.
    """

    request_id: str
    prompt_ids: list[int]
    params: EffectiveParams
    bans: Bans
    end_ids: frozenset[int]
    max_tokens: int
    table: BlockTable
    text: TextOutput
    times: Times
    sample_index: int = 0
    chain: KeyChain | None = None
    forced: Mapping[int, int] = field(default_factory=dict)
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    logprobs: list[LogprobDict] = field(default_factory=list)
    prompt_logprobs: list[LogprobDict | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: SeethroughError | None = None
    order: int = 0
    overtaken: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    most_computed: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def remaining(self) -> int:
        """Tokens that are known but not computed; 1 while decoding."""
        return self.num_tokens - self.num_computed

    @property
    def positions_needed(self) -> int:
        """Cached positions that the whole request can take: its last token is never computed."""
        return max(len(self.prompt_ids) + self.max_tokens - 1, len(self.prompt_ids))

    @property
    def unscored(self) -> int | None:
        """The first position whose row still has to score a prompt token; None where none has."""
        wanted = self.params.prompt_logprobs is not None and self.sample_index == 0
        if not wanted or len(self.prompt_logprobs) == len(self.prompt_ids):
            return None
        return max(0, len(self.prompt_logprobs) - 1)

    @property
    def history(self) -> History:
        """The ids that penalties and bad words look at."""
        return History(self.prompt_ids, self.output_ids)

    def token(self, position: int) -> int:
        """The id at one position."""
        n = len(self.prompt_ids)
        return self.prompt_ids[position] if position < n else self.output_ids[position - n]

    def tokens(self, start: int, stop: int) -> list[int]:
        """Ids of positions start .. stop − 1."""
        n = len(self.prompt_ids)
        return self.prompt_ids[start:stop] + self.output_ids[max(0, start - n) : max(0, stop - n)]

    def rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """`tokens` as an array."""
        return np.asarray(self.tokens(start, stop), dtype=np.int64)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> str:
        """End the request and give back its blocks; returns the text that was still held."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.table.release()
        return self.text.finish()
