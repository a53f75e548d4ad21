"""The scheduler alone: who computes what when, without a model.

A cache of slots stands in for K and V: a slot holds the ids of the text up to its position, so
whoever reads a slot that holds anything else has been given a wrong block, or one that was never
computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seethrough import SamplingParams
from seethrough.config import EngineConfig
from seethrough.engine.batch import Scheduled
from seethrough.engine.metrics import EngineMetrics
from seethrough.engine.request import Request, Times
from seethrough.engine.scheduler import MOST_OVERTAKEN, Scheduler
from seethrough.errors import CapacityError
from seethrough.kv.check import check_integrity
from seethrough.kv.pool import BlockTable, KVPool, KVShape
from seethrough.kv.prefix import KeyChain
from seethrough.sampling.params import resolve

SHAPE = KVShape(n_layers=1, n_kv_heads=1, head_dim=1, dtype=np.dtype("f4"))
SIZE = 16


class Silent:
    """A text of no characters."""

    def finish(self) -> str:
        return ""


@dataclass
class Story:
    """When a request came, first ran, and ended, in steps."""

    came: int
    started: int | None = None
    ended: int | None = None


@dataclass
class World:
    """Steps a scheduler as the engine does, and looks at everything on the way."""

    blocks: int = 8
    budget: int = 64
    most: int = 8
    threshold: int = 128
    caching: bool = True
    now: int = 0
    times: dict[Request, Story] = field(default_factory=dict)
    rows: dict[Request, int] = field(default_factory=lambda: defaultdict(int))
    held: dict[int, tuple[int, ...]] = field(default_factory=dict)  # slot -> ids up to it

    def __post_init__(self) -> None:
        self.pool = KVPool(SHAPE, self.blocks, SIZE)
        self.metrics = EngineMetrics()
        config = EngineConfig(
            max_num_batched_tokens=self.budget,
            max_num_seqs=self.most,
            long_prefill_token_threshold=self.threshold,
        )
        self.scheduler = Scheduler(self.pool, config, self.metrics)

    def add(
        self,
        prompt: Sequence[int],
        tokens: int = 1,
        *,
        salt: str | None = None,
        scored: bool = False,
    ) -> Request:
        params = SamplingParams(prompt_logprobs=0 if scored else None)
        request = Request(
            request_id=f"{len(self.times)}",
            prompt_ids=list(prompt),
            params=resolve(params, None, {}, lambda: 0),
            bans=cast(Any, None),
            end_ids=frozenset(),
            max_tokens=tokens,
            table=BlockTable(self.pool),
            text=cast(Any, Silent()),
            times=Times(0.0),
            chain=KeyChain(salt, SIZE) if self.caching else None,
        )
        self.scheduler.add(request)
        self.times[request] = Story(self.now)
        return request

    def abort(self, request: Request) -> None:
        if request.finish_reason is None:
            request.finish("abort")
            self.scheduler.remove(request)
            self.times[request].ended = self.now

    def step(self) -> list[Scheduled]:
        """What was scheduled; every rule that holds for any step is checked."""
        self.now += 1
        before = list(self.scheduler.running)
        oldest = min(self.scheduler.requests, key=lambda r: r.order, default=None)
        plan = self.scheduler.schedule()
        self.check(plan, before, oldest)
        rows = sum(stop - start for _, start, stop in plan)
        self.metrics.steps += 1
        self.metrics.computed_tokens += rows
        for request, start, stop in plan:
            self.write(request, start, stop)
        for item in plan:
            self.read(item)
            self.advance(item)
        self.scheduler.drop_finished()
        check_integrity(self.pool, (r.table for r in self.scheduler.requests))
        return plan

    def check(self, plan: list[Scheduled], before: list[Request], oldest: Request | None) -> None:
        running = self.scheduler.running
        assert [r.order for r in running] == sorted(r.order for r in running)
        assert [r.order for r in self.scheduler.waiting] == sorted(
            r.order for r in self.scheduler.waiting
        )
        assert len(running) <= min(self.most, self.budget)
        assert bool(plan) == bool(self.times and any(True for _ in self.scheduler.requests))
        assert len({id(item.request) for item in plan}) == len(plan)
        assert 0 <= sum(stop - start for _, start, stop in plan) <= self.budget
        planned = {item.request: item.stop - item.start for item in plan}
        decoding = [r for r in running if r.remaining == 1]
        for request in decoding:
            assert planned[request] == 1, "who decodes gets its row in every step"
        for request, start, stop in plan:
            assert request in running
            assert start == request.num_computed < stop <= request.num_tokens
            assert len(request.table.blocks) >= self.pool.blocks_for(stop)
            if decoding and request.remaining > 1:
                assert stop - start <= self.threshold, "a prompt beside decodes is cut"
        if oldest in before:
            assert oldest in running, "the oldest gave way"
        if before:
            assert before[0] in running, "the oldest that runs gave way"
        if running:  # one that came earlier, but was passed, may have started just now
            assert planned.get(running[0], 0) >= 1, "the oldest that runs stands still"

    def write(self, request: Request, start: int, stop: int) -> None:
        text = tuple(request.tokens(0, stop))
        for position, slot in zip(
            range(start, stop), request.table.slots(start, stop), strict=True
        ):
            self.held[int(slot)] = text[: position + 1]

    def read(self, item: Scheduled) -> None:
        """What attention would see: all positions up to the last of these rows."""
        request, _, stop = item
        text = tuple(request.tokens(0, stop))
        for position, slot in enumerate(request.table.slots(0, stop)):
            assert self.held.get(int(slot)) == text[: position + 1], f"position {position}"

    def advance(self, item: Scheduled) -> None:
        """As `Engine._advance` does."""
        request, start, stop = item
        times = self.times[request]
        times.started = times.started or self.now
        self.rows[request] += stop - start
        self.scheduler.computed(item)
        if request.unscored is not None:
            request.prompt_logprobs += [None] * (not request.prompt_logprobs)
            request.prompt_logprobs += [{} for _ in item.scored]
        if item.samples:
            if request.max_tokens:
                request.output_ids.append(sum(request.tokens(0, stop)) % 89)
                self.metrics.output_tokens += 1
            if len(request.output_ids) >= request.max_tokens:
                request.finish("length")
                times.ended = self.now
        request.num_computed = stop

    def run(self, most: int = 10_000) -> None:
        for _ in range(most):
            if not any(True for _ in self.scheduler.requests):
                break
            self.step()
        for request, times in self.times.items():
            assert times.ended is not None, f"request {request.request_id} never ended"
        assert self.pool.free_blocks == self.pool.num_blocks

    def waited(self, request: Request) -> int:
        times = self.times[request]
        assert times.started is not None
        return times.started - times.came


def text(length: int, seed: int = 0) -> list[int]:
    """Ids of a prompt; a longer one with the same seed begins with it."""
    return np.random.default_rng(seed).integers(100, 10_000, 4096)[:length].tolist()


def fresh() -> Iterator[int]:
    """Seeds that nobody else uses."""
    return iter(range(1000, 100_000))


# ------------------------------------------------------------------------------- who waits how long


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("every", [2, 3, 5])
def test_one_large_in_a_stream_of_small(caching: bool, every: int) -> None:
    """vllm-project/vllm PR#33499, #1026: neither size waits for ever for the other."""
    world, seeds = World(blocks=10, budget=64, most=8, caching=caching), fresh()
    world.add(text(20, next(seeds)), 6)
    world.step()
    large, small = [], []
    for step in range(600):
        if step % 200 == 0:
            large.append(world.add(text(140, next(seeds)), 8))  # all but one of the blocks
        if step % every == 0:
            small.append(world.add(text(20, next(seeds)), 6))
        world.step()
    world.run()
    for request in large:
        # Passed so often, then those that run (for 6 steps each) end, and it starts.
        assert 0 < request.overtaken < MOST_OVERTAKEN + world.most
        assert world.waited(request) <= (MOST_OVERTAKEN + world.most) * every + 2 * 6
        assert request.num_preemptions == 0
    # A small one waits at most while a large one runs, and for those that queued meanwhile.
    assert max(world.waited(request) for request in small) <= 60
    ended = [world.times[request].ended or 0 for request in small[-10:]]
    assert max(ended) <= 700  # the queue does not grow


def test_small_ones_pass_a_large_one_only_so_often() -> None:
    world, seeds = World(blocks=8, budget=64, most=8), fresh()
    hog = world.add(text(40, next(seeds)), 80)  # holds some blocks for long
    world.step()
    large = world.add(text(100, next(seeds)), 10)
    small = [world.add(text(5, next(seeds)), 2) for _ in range(60)]
    passed = 0
    while world.times[large].started is None:
        world.step()
        passed = sum(world.times[r].started is not None for r in small)
        assert passed <= MOST_OVERTAKEN + world.most
    assert passed >= MOST_OVERTAKEN  # the room that it could not use was used
    world.run()
    assert hog.num_preemptions == 0


def test_who_gave_way_comes_back_before_anyone_who_came_later() -> None:
    """vllm-project/vllm#41951: preempted requests keep their place."""
    world, seeds = World(blocks=6, budget=64, most=8), fresh()
    first = [world.add(text(14, next(seeds)), 50) for _ in range(4)]
    seen = set()
    for _ in range(400):
        if world.now % 3 == 0 and world.now < 200:
            world.add(text(4, next(seeds)), 3)
        waiting_before = {r for r in world.scheduler.waiting if r.num_preemptions}
        running_before = set(world.scheduler.running)
        world.step()
        seen |= {r for r in world.times if r.num_preemptions}
        came_in = set(world.scheduler.running) - running_before
        still = waiting_before & set(world.scheduler.waiting)
        for request in still:
            assert all(other.order < request.order for other in came_in)
    world.run()
    assert len(seen) >= 2
    assert max(r.num_preemptions for r in first) >= 1


def test_decodes_go_on_beside_a_long_prompt() -> None:
    """vllm-project/vllm#1026: a row for each that decodes, in every step; the prompt is cut."""
    world, seeds = World(blocks=64, budget=64, most=8, threshold=24), fresh()
    talking = [world.add(text(5, next(seeds)), 60) for _ in range(5)]
    world.step()
    long = world.add(text(600, next(seeds)), 2)
    while world.times[long].ended is None and world.times[talking[0]].ended is None:
        said, left = [len(r.output_ids) for r in talking], long.remaining
        plan = world.step()
        assert [len(r.output_ids) for r in talking] == [n + 1 for n in said]
        mine = [item.stop - item.start for item in plan if item.request is long]
        assert mine == [min(24, left)]
    world.run()


def test_alone_a_long_prompt_takes_whole_steps() -> None:
    world = World(blocks=64, budget=64, threshold=8)
    world.add(text(640), 1)
    for _ in range(10):
        (item,) = world.step()
        assert item.stop - item.start == 64
    world.run(0)


def test_a_short_prompt_behind_a_long_one_waits_for_a_part_of_it() -> None:
    world, seeds = World(blocks=200, budget=64, threshold=1 << 20), fresh()
    long = world.add(text(2000, next(seeds)), 2)
    world.step()
    short = world.add(text(30, next(seeds)), 1)
    world.step()
    assert world.times[short].ended is not None
    assert long.num_computed == 64 + 34  # what the short one left
    # A crowd of short ones takes half of it at most.
    for _ in range(30):
        world.add(text(30, next(seeds)), 1)
    while world.scheduler.waiting or len(world.scheduler.running) > 1:
        done = long.num_computed
        world.step()
        assert long.num_computed - done >= 32
    world.run()


def test_who_can_never_fit_is_refused_and_the_rest_goes_on() -> None:
    """vllm-project/vllm#39734, #35541: at the door, not by waiting for ever."""
    world = World(blocks=8)
    first = world.add(text(20), 3)
    for length, tokens in ((129, 0), (129, 1), (120, 10), (1, 129), (128, 2)):
        with pytest.raises(CapacityError):
            world.add(text(length), tokens)
    fits = [world.add(text(128), 1), world.add(text(119), 10), world.add(text(1), 128)]
    last = world.add(text(5), 1)
    assert list(world.scheduler.requests) == [first, *fits, last]
    world.run()


# ------------------------------------------------------------------------------- shared beginnings


def test_identical_prompts_that_arrive_together_are_computed_once() -> None:
    world = World(blocks=40, budget=32)
    same = [world.add(text(100), 4) for _ in range(6)]
    world.run()
    # Full blocks once; behind them each its own 4 tokens of the prompt and 3 of the answer.
    assert world.metrics.computed_tokens == 96 + 6 * (4 + 3)
    assert [r.num_cached_tokens for r in same] == [0] + [96] * 5
    assert world.metrics.cached_tokens == 5 * 96


def test_who_shares_a_beginning_only_waits_for_that() -> None:
    world = World(blocks=60, budget=16, most=8)
    long = world.add(text(400), 1)
    other = world.add([*text(16), *text(20, seed=9)], 1)
    for _ in range(6):
        world.step()
    assert other.num_cached_tokens == 16
    assert world.times[other].ended is not None
    assert long.finish_reason is None
    world.run()


def test_nobody_waits_for_a_block_that_is_not_coming() -> None:
    """Who runs has computed the block, but nothing leads to it any more: it is computed anew."""
    world = World(blocks=30, budget=64)
    talking = world.add(text(40), 200)
    world.step()
    world.pool.forget()
    second = world.add(text(40), 2)
    for _ in range(3):
        world.step()
    assert world.times[second].ended is not None
    assert talking.finish_reason is None
    world.run()


def test_nobody_waits_for_a_block_whose_twin_was_evicted() -> None:
    """Two computed the same text, the one that was remembered ended, its blocks were given away."""
    world, seeds = World(blocks=12, budget=128, most=4), fresh()
    twin = world.add(text(40), 1)
    talking = world.add(text(40), 100, scored=True)  # computes all of it, whatever is there
    world.step()
    assert twin.table.blocks == []
    world.add(text(128, next(seeds)), 1)  # takes all that is free, and an idle one
    world.step()
    assert world.pool.prefix.idle_count < 2
    second = world.add(text(40), 2)
    while world.times[second].ended is None:
        world.step()
        assert world.now < 40
    assert talking.finish_reason is None
    world.run()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
def test_one_token_is_left_to_compute(length: int) -> None:
    """Wenyueh/MinivLLM PR#87: a full last block gives logits, too."""
    world = World()
    world.add(text(length), 2)
    world.run()
    again = world.add(text(length), 2)
    world.step()
    assert again.num_cached_tokens == min(length // SIZE * SIZE, length - 1)
    assert len(again.output_ids) == 1
    world.run()


def test_salts_share_nothing() -> None:
    """vllm-project/vllm PR#17045: another's prefix cannot be felt."""
    world = World(blocks=40)
    for salt in ("a", "b", None, "a b", "plain"):
        first, second = (world.add(text(64), 1, salt=salt) for _ in range(2))
        world.run()
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 63)


# ------------------------------------------------------------------------------- any load

PROMPTS = st.builds(
    lambda length, seed, own: text(length, seed) + text(own, seed + 50),
    st.integers(1, 70),
    st.integers(0, 2),
    st.sampled_from([0, 0, 1, 16, 20]),
)
LOADS = st.lists(
    st.tuples(
        st.integers(0, 5),  # steps since the one before
        PROMPTS,
        st.integers(0, 30),
        st.none() | st.integers(0, 30),  # steps after which it is aborted
        st.sampled_from([False, False, True]),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    load=LOADS,
    blocks=st.integers(8, 14),  # 90 + 29 positions take 8
    budget=st.sampled_from([1, 2, 7, 16, 33, 128]),
    most=st.integers(1, 8),
    threshold=st.sampled_from([1, 5, 64]),
    caching=st.booleans(),
)
def test_everything_ends_whatever_the_load(
    load: list[tuple[int, list[int], int, int | None, bool]],
    blocks: int,
    budget: int,
    most: int,
    threshold: int,
    caching: bool,
) -> None:
    """No livelock: the oldest never stands still, so it ends, and then the next is the oldest.

    What every step must obey is in `World.check`; what is read is what was written, `World.read`.
    """
    world = World(blocks, budget, most, threshold, caching)
    aborts: list[tuple[int, Request]] = []
    for wait, prompt, tokens, until, scored in load:
        for _ in range(wait):
            world.step()
            abort_due(world, aborts)
        request = world.add(prompt, tokens, scored=scored)
        if until is not None:
            aborts.append((world.now + until, request))
    while any(True for _ in world.scheduler.requests):
        world.step()
        abort_due(world, aborts)
        assert world.now < 5000, "it does not come to an end"
    world.run()
    counted(world, caching)


def abort_due(world: World, aborts: list[tuple[int, Request]]) -> None:
    for when, request in aborts:
        if when <= world.now:
            world.abort(request)
            check_integrity(world.pool, (r.table for r in world.scheduler.requests))


def counted(world: World, caching: bool) -> None:
    """The counters against what was seen."""
    metrics, requests = world.metrics, list(world.times)
    assert metrics.computed_tokens == sum(world.rows.values())
    assert metrics.output_tokens == sum(len(r.output_ids) for r in requests)
    assert metrics.preemptions == sum(r.num_preemptions for r in requests)
    assert metrics.cached_tokens == sum(r.num_cached_tokens for r in requests)
    for request in requests:
        assert request.num_cached_tokens < len(request.prompt_ids)
    if all(r.finish_reason == "length" for r in requests):
        assert metrics.prompt_tokens == sum(len(r.prompt_ids) for r in requests)
        # The last token of an answer is never computed.
        needed = sum(len(r.prompt_ids) + max(0, len(r.output_ids) - 1) for r in requests)
        first_time = metrics.computed_tokens - metrics.recomputed_tokens
        if metrics.preemptions == 0:
            assert metrics.recomputed_tokens == 0
            assert first_time == needed - metrics.cached_tokens
        elif not caching:
            assert first_time == needed
        else:  # one that restarts may find what others have computed meanwhile
            assert first_time <= needed - metrics.cached_tokens


def test_what_was_found_and_lost_before_it_was_of_use_is_computed_again() -> None:
    """Started on cached blocks, and gave way before its first row: the sums still come out."""
    world, seeds = World(blocks=15, budget=4, most=4), fresh()
    world.add(text(32), 1)
    world.run()
    growing = world.add(text(16, next(seeds)), 40)
    while not growing.output_ids:
        world.step()
    # These two take every row that is left, for long.
    world.add(text(80, next(seeds)), 1)
    world.add(text(48, next(seeds)), 1)
    found = world.add([*text(32), *text(20, next(seeds))], 3)
    world.step()
    assert (found.num_cached_tokens, found.num_computed) == (32, 32)
    while not found.num_preemptions:
        world.step()
    assert world.rows[found] == 0
    world.pool.forget()
    world.run()
    assert world.rows[found] == 52 + 2
    assert world.metrics.recomputed_tokens == 32
    counted(world, caching=True)


def test_what_is_computed_again_is_counted() -> None:
    world = World(blocks=6, budget=64, caching=False)
    requests = [world.add(text(14, seed), 50) for seed in range(4)]
    world.run()
    assert world.metrics.preemptions > 0
    # Of what was lost, all that had been computed was computed again.
    assert world.metrics.recomputed_tokens == sum(world.rows.values()) - 4 * (14 + 49)
    assert [world.rows[r] >= 63 for r in requests] == [True] * 4
