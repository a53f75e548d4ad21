"""Who computes which positions in the next step, who starts, and who has to give way.

Knows requests, blocks and numbers of tokens; no model, no text, no clock.

    waiting, in order of arrival ──start──> running ──> step: a row for each that decodes,
        ^                                      │        then pieces of prompts, up to the budget
        └──────── gives back its blocks <──────┘

Who came first goes first, in everything: the oldest running request is never the one that gives
way, so it finishes, and then the next one is the oldest. Nobody waits for ever.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import NamedTuple

from seethrough.config import EngineConfig
from seethrough.engine.batch import Scheduled
from seethrough.engine.metrics import EngineMetrics
from seethrough.engine.request import Request
from seethrough.kv.pool import KVPool
from seethrough.kv.prefix import KeyChain
from seethrough.sampling.params import MAX_N

# How often a request that waits for many blocks lets smaller ones that came later start first.
MOST_OVERTAKEN = 16
# Requests that do not fit and are looked behind in a step: a long queue costs no more than a short.
# Those that wait for a block that is being computed (the samples of one prompt) come on top.
_LOOKAHEAD = 32


class Reuse(NamedTuple):
    """Blocks of others that hold the beginning of a request, and how many tokens of it they save.

    Fewer than the blocks hold, where the last of them have to be computed anyway.
    """

    blocks: list[int]
    tokens: int


class Scheduler:
    """The queue, the running requests, and the rules between them."""

    def __init__(self, pool: KVPool, config: EngineConfig, metrics: EngineMetrics) -> None:
        self._pool = pool
        self._metrics = metrics
        self._budget = config.max_num_batched_tokens
        self._long_prefill = config.long_prefill_token_threshold
        # Every request that decodes gets a row in every step, and so does the oldest prompt.
        self._most_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._arrived = 0
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    @property
    def requests(self) -> Iterator[Request]:
        """All requests that are not finished."""
        yield from self.running
        yield from self.waiting

    def add(self, request: Request) -> None:
        """Queue a request; CapacityError at once if the whole pool could not hold it."""
        self._pool.require(request.positions_needed)
        self._arrived += 1
        request.order = self._arrived
        self.waiting.append(request)

    def drop_finished(self) -> None:
        """Forget who is done, after a step: only who runs can be."""
        self.running = [r for r in self.running if r.finish_reason is None]

    def remove(self, request: Request) -> None:
        """Forget one that was ended from outside, wherever it is; nothing if it is nowhere."""
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)

    def schedule(self) -> list[Scheduled]:
        """The positions of the next step; empty only if there is nothing to do."""
        if not self._grow():
            self._start_waiting()
        decoding = [r for r in self.running if r.remaining == 1]
        rest = [r for r in self.running if r.remaining > 1]
        scheduled = [Scheduled(r, r.num_computed, r.num_computed + 1) for r in decoding]
        for request, rows in self._share(rest, self._budget - len(decoding), bool(decoding)):
            scheduled.append(Scheduled(request, request.num_computed, request.num_computed + rows))
        return scheduled

    def computed(self, item: Scheduled) -> None:
        """K and V of these positions are in the cache: others may use the blocks that are full."""
        request, start, stop = item
        self._metrics.recomputed_tokens += max(0, min(stop, request.most_computed) - start)
        request.most_computed = max(request.most_computed, stop)
        size = self._pool.block_size
        if request.chain is None or start // size == stop // size:
            return
        _extend(request.chain, request, stop, size)
        for i in range(start // size, stop // size):
            self._pool.prefix.remember(request.chain.keys[i], request.table.blocks[i])

    # ------------------------------------------------------------------ the rows of a step

    def _share(
        self, requests: list[Request], rows: int, beside_decodes: bool
    ) -> Iterator[tuple[Request, int]]:
        """Rows for prompts: half for the oldest, the rest in order, what is left for the oldest.

        So a short prompt behind a long one need not wait for all of it. Beside decodes no prompt
        gets more than the threshold: they would wait for the whole step.
        """
        if not requests or rows <= 0:
            return
        most = self._long_prefill if beside_decodes else rows
        oldest, *others = requests
        first = min(oldest.remaining, most, -(-rows // 2) if others else rows)
        left = rows - first
        taken = []
        for request in others:
            take = min(request.remaining, most, left)
            if take > 0:
                taken.append((request, take))
                left -= take
        yield oldest, first + min(left, min(oldest.remaining, most) - first)
        yield from taken

    # ------------------------------------------------------------------ blocks

    def _grow(self) -> bool:
        """A block for every request whose next position needs one; whether somebody gave way."""
        preempted = False
        for request in list(self.running):  # in order of arrival
            lacking = self._pool.blocks_for(request.num_tokens) - len(request.table.blocks)
            if lacking <= 0:
                continue
            while request in self.running and lacking > self._pool.free_blocks:
                self._preempt(self.running[-1])
                preempted = True
            if request in self.running:
                request.table.reserve(request.num_tokens)
        return preempted

    def _preempt(self, request: Request) -> None:
        """Take the blocks away; what was computed is computed again, or found, when it restarts."""
        self.running.remove(request)
        request.table.release()
        request.num_computed = 0
        request.num_preemptions += 1
        request.overtaken = MOST_OVERTAKEN  # it had its turn: nobody passes it any more
        self._metrics.preemptions += 1
        insort(self.waiting, request, key=lambda r: r.order)

    # ------------------------------------------------------------------ starting

    def _start_waiting(self) -> None:
        """Start who fits, in order of arrival; small ones may pass a large one, a few times."""
        passed: list[Request] = []  # came earlier, but do not fit now
        looked, room = 0, self._room()
        while room > 0 and len(self.running) < self._most_running and looked < len(self.waiting):
            request = self.waiting[looked]
            reuse = self._reusable(request)
            if self._is_coming(request, len(reuse.blocks)):
                looked += 1
            elif self._start(request, reuse, room):
                del self.waiting[looked]
                room = self._room()
                for other in passed:
                    other.overtaken += 1
            else:
                passed.append(request)
                looked += 1
            too_many = len(passed) > _LOOKAHEAD or looked > _LOOKAHEAD + MAX_N
            if too_many or any(r.overtaken >= MOST_OVERTAKEN for r in passed):
                return

    def _room(self) -> int:
        """Blocks that can be given away, with one kept for each running request that may grow."""
        blocks_for = self._pool.blocks_for
        growing = sum(blocks_for(r.positions_needed) > len(r.table.blocks) for r in self.running)
        return self._pool.free_blocks - growing

    def _start(self, request: Request, reuse: Reuse, room: int) -> bool:
        """Give it the blocks of all its known tokens, shared ones first, if there are enough."""
        pool = self._pool
        idle = sum(pool.prefix.is_idle(block) for block in reuse.blocks)
        next_token = min(request.num_tokens + 1, request.positions_needed)
        if pool.blocks_for(next_token) - len(reuse.blocks) + idle > room:
            return False
        request.table.share(reuse.blocks)
        request.table.reserve(request.num_tokens)
        request.num_computed = reuse.tokens
        request.most_computed = max(request.most_computed, reuse.tokens)
        if request.num_preemptions == 0:
            request.num_cached_tokens = reuse.tokens
            self._metrics.prompt_tokens += request.num_tokens
            self._metrics.cached_tokens += reuse.tokens
        if request.chain is not None:
            _extend(request.chain, request, request.num_tokens, pool.block_size)
        insort(self.running, request, key=lambda r: r.order)
        return True

    def _reusable(self, request: Request) -> Reuse:
        """What others have computed of its beginning.

        At least one token is left to compute, whose logits are needed, and every row that still
        has to score the prompt. Its K and V may go into a shared block, where the same bits stand.
        """
        most = request.num_tokens - 1
        if request.unscored is not None:
            most = min(most, request.unscored)
        if request.chain is None or most == 0:
            return Reuse([], 0)
        size = self._pool.block_size
        _extend(request.chain, request, request.num_tokens, size)
        blocks = self._pool.prefix.find(request.chain.keys[: self._pool.blocks_for(most)])
        return Reuse(blocks, min(len(blocks) * size, most))

    def _is_coming(self, request: Request, found: int) -> bool:
        """Whether a running request is about to compute the very block that this one lacks.

        One that has computed it already brings nothing: its block is not remembered any more.
        """
        if request.chain is None or request.unscored is not None:
            return False
        lacked = request.chain.keys[found : found + 1]
        end = (found + 1) * self._pool.block_size
        return bool(lacked) and any(
            other.chain is not None
            and other.num_computed < end
            and other.chain.keys[found : found + 1] == lacked
            for other in self.running
        )


def _extend(chain: KeyChain, request: Request, stop: int, block_size: int) -> None:
    """Make the keys of all blocks that are full up to a position, where they are not made yet."""
    if stop - chain.tokens >= block_size:
        chain.extend(request.tokens(chain.tokens, stop))
