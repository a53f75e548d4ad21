"""A request may be ended wherever it is: its blocks come back, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from houses import Houses
from proof import ALL, Bench, House, Params
from tiny_models import VOCAB

from seethrough.engine.jobs import Job
from seethrough.engine.request import Request

LONG: Params = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "logprobs": 1}
BLOCKS = 8
FULL: Params = {"temperature": 0, "max_tokens": 28, "ignore_eos": True}  # with 100 ids: all blocks


def ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(16, VOCAB - 8, 512)[:length].tolist()


@pytest.fixture
def house(houses: Houses) -> House:
    return houses("llama")


@pytest.fixture
def bench(house: House) -> Bench:
    return house.bench(BLOCKS, max_num_batched_tokens=20, max_num_seqs=4)


def only(job: Job) -> Request:
    (request,) = job.requests
    return request


def until(bench: Bench, reached: Callable[[], bool]) -> None:
    for _ in range(500):
        if reached():
            return
        bench.step()
    raise AssertionError("it was never so")


# Each brings a request into a state, beside others, and gives its job.
State = Callable[[Bench, list[Job]], Job]


def waiting_at_once(bench: Bench, mates: list[Job]) -> Job:
    return bench.submit(ids(30, 7), LONG)


def waiting_for_blocks(bench: Bench, mates: list[Job]) -> Job:
    job = bench.submit(ids(88, 7), LONG)
    bench.step()
    assert only(job) in bench.engine.scheduler.waiting
    return job


def waiting_for_a_seat(bench: Bench, mates: list[Job]) -> Job:
    mates += [bench.submit(ids(2, seed), LONG) for seed in (20, 21)]
    bench.step()
    job = bench.submit(ids(2, 7), LONG)
    bench.step()
    assert len(bench.engine.scheduler.running) == 4
    assert only(job) in bench.engine.scheduler.waiting
    return job


def waiting_for_a_block_of_another(bench: Bench, mates: list[Job]) -> Job:
    mates.append(bench.submit(ids(40, 8), {**LONG, "max_tokens": 2}))
    job = bench.submit(ids(40, 8), LONG)
    bench.step()
    assert only(mates[-1]) in bench.engine.scheduler.running
    assert only(job) in bench.engine.scheduler.waiting
    return job


def in_the_middle_of_its_prompt(bench: Bench, mates: list[Job]) -> Job:
    job = bench.submit(ids(40, 7), {**LONG, "max_tokens": 5})
    until(bench, lambda: only(job).num_computed > 0)
    assert only(job).num_computed < 40
    return job


def in_the_middle_of_scoring_it(bench: Bench, mates: list[Job]) -> Job:
    job = bench.submit(ids(40, 7), {**LONG, "max_tokens": 5, "prompt_logprobs": 0})
    until(bench, lambda: only(job).num_computed > 0)
    assert 0 < len(only(job).prompt_logprobs) < 40
    return job


def decoding(bench: Bench, mates: list[Job]) -> Job:
    job = bench.submit(ids(20, 7), LONG)
    until(bench, lambda: len(only(job).output_ids) == 3)
    return job


def on_shared_blocks(bench: Bench, mates: list[Job]) -> Job:
    mates.append(bench.submit(ids(20, 9), {**LONG, "max_tokens": 30}))
    until(bench, lambda: len(only(mates[-1]).output_ids) > 0)
    job = bench.submit([*ids(16, 9), 5], LONG)
    until(bench, lambda: len(only(job).output_ids) > 0)
    assert only(job).num_cached_tokens == 16
    return job


def preempted(bench: Bench, mates: list[Job]) -> Job:
    mates += [bench.submit(ids(14, seed), LONG) for seed in (30, 31)]
    job = bench.submit(ids(14, 7), LONG)
    until(bench, lambda: only(job).num_preemptions > 0)
    assert only(job) in bench.engine.scheduler.waiting
    return job


def running_again_after_that(bench: Bench, mates: list[Job]) -> Job:
    job = preempted(bench, mates)
    said = len(only(job).output_ids)
    until(bench, lambda: len(only(job).output_ids) > said)
    return job


def finished(bench: Bench, mates: list[Job]) -> Job:
    job = bench.submit(ids(5, 7), {**LONG, "max_tokens": 2})
    until(bench, lambda: not job.running)
    return job


STATES: list[State] = [
    waiting_at_once,
    waiting_for_blocks,
    waiting_for_a_seat,
    waiting_for_a_block_of_another,
    in_the_middle_of_its_prompt,
    in_the_middle_of_scoring_it,
    decoding,
    on_shared_blocks,
    preempted,
    running_again_after_that,
    finished,
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_in_every_state(house: House, bench: Bench, state: State) -> None:
    """vllm-ascend#16662, vllm-project/vllm#46283, PR#18485: all back, twice, and no exception."""
    mates = [bench.submit(ids(n, n), LONG) for n in (17, 3)]
    bench.step()
    job = state(bench, mates)
    before = only(job).finish_reason
    ended = dict(bench.engine.metrics.finished)
    for _ in range(3):
        bench.engine.abort(only(job))
        bench.engine.check()
        assert only(job) not in list(bench.engine.scheduler.requests)
        assert only(job).table.blocks == []
    assert only(job).finish_reason == (before or "abort")
    now = bench.engine.metrics.finished
    assert now["abort"] == ended["abort"] + (before is None)
    bench.run()
    for mate in mates:
        request = only(mate)
        way = {**LONG, "max_tokens": request.max_tokens}
        assert bench.close(mate) == house.lone(request.prompt_ids, way)
    bench.close(job)
    assert bench.idle()
    assert bench.ask(ids(100, 99), FULL) == house.lone(ids(100, 99), FULL)
    assert bench.idle()


def test_one_that_nobody_knows(house: House, bench: Bench) -> None:
    """Never queued, or of another engine: nothing happens to anybody."""
    mate = bench.submit(ids(17, 1), LONG)
    bench.step()
    effective = bench.intake.effective()
    stranger = bench.intake.job(None, ids(5), effective, 1.0)
    bench.engine.abort(only(stranger))
    bench.jobs.close(stranger)
    bench.engine.check()
    elsewhere = house.bench()
    foreign = elsewhere.submit(ids(20), LONG)
    elsewhere.step()
    bench.run()
    assert bench.close(mate) == house.lone(ids(17, 1), LONG)
    elsewhere.run()
    assert elsewhere.close(foreign) == house.lone(ids(20), LONG)
    assert bench.idle()
    assert elsewhere.idle()


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_in_the_middle_of_a_step(house: House, bench: Bench, at: int, victim: int) -> None:
    """Whoever takes a piece of a step may end others that are in the same step."""
    lengths = (15, 15, 31, 7)  # the next step or the one after fills a block
    jobs = [bench.submit(ids(n, seed), LONG) for seed, n in enumerate(lengths)]
    until(bench, lambda: all(only(job).output_ids for job in jobs))
    requests = [only(job) for job in jobs]
    for step in range(3):
        said = len(requests[victim].output_ids)
        for nth, delta in enumerate(bench.engine.step()):
            if nth == at and step == 1:
                bench.engine.abort(requests[victim])
                bench.engine.check()
                reached = victim <= at
                said += reached
            elif requests[victim].finish_reason is not None:
                assert delta.request_id != requests[victim].request_id
        bench.engine.check()
        if step >= 1:
            assert len(requests[victim].output_ids) == said
    assert bench.engine.metrics.finished["abort"] == 1
    while bench.engine.busy:
        list(bench.engine.step())
    for request, n, seed in zip(requests, lengths, range(4), strict=True):
        (whole,) = house.lone(ids(n, seed), LONG)
        if request is requests[victim]:
            assert tuple(request.output_ids) == whole.ids[: len(request.output_ids)]
        else:
            assert tuple(request.output_ids) == whole.ids
    for job in jobs:
        bench.jobs.close(job)
    assert bench.idle()


def test_a_storm_of_clients_that_give_up_and_come_back(house: House) -> None:
    """ml-explore/mlx-lm#1255: retries, cancels, heartbeats; there is always progress.

    Twelve clients, each of which gives up at random moments and asks the same again, and a
    heartbeat of one token every few steps.
    """
    rng = np.random.default_rng(8)
    bench = house.bench(10, max_num_batched_tokens=32, max_num_seqs=6)
    params = {**ALL, "max_tokens": 20}
    mine = [(ids(int(n), seed % 5), params) for seed, n in enumerate(rng.integers(1, 60, 12))]
    open_jobs = [bench.submit(*one) for one in mine]
    beats: list[tuple[int, Job]] = []
    done, cancelled, waits = [0] * 12, 0, []
    for step in range(1500):
        bench.step()
        for client, job in enumerate(open_jobs):
            if not job.running:
                assert bench.close(job) == house.lone(*mine[client])
                done[client] += 1
            elif rng.random() < 0.01:
                (part,) = bench.close(job)
                house.is_beginning(part, *mine[client], 0)
                cancelled += 1
            else:
                continue
            open_jobs[client] = bench.submit(*mine[client])
        if step % 5 == 0:
            beats.append(
                (step, bench.submit([20 + step % 50], {"temperature": 0, "max_tokens": 1}))
            )
        for came, beat in beats:
            if not beat.running:
                bench.close(beat)
                waits.append(step - came)
        beats = [(came, beat) for came, beat in beats if beat.running]
    assert min(done) >= 3
    assert sum(done) > 100
    assert cancelled > 50
    assert bench.engine.metrics.preemptions > 5
    assert max(waits) < 200
    for job in (*open_jobs, *(beat for _, beat in beats)):
        bench.close(job)
    assert bench.idle()
    assert bench.ask(ids(100, 99), FULL) == house.lone(ids(100, 99), FULL)
    assert bench.idle()
