"""Two thousand requests through one small engine: nothing is lost, leaked or different."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
from houses import Houses
from proof import ALL, Ids, Params
from tiny_models import VOCAB

from seethrough.engine.jobs import Job

REQUESTS = 2_000
BLOCKS = 8  # the largest request takes all of them
PROMPTS = 40
WAYS: list[Params] = [
    {"temperature": 0, "max_tokens": 25, "logprobs": 0},
    {"temperature": 0, "max_tokens": 3, "prompt_logprobs": 0},
    {"temperature": 1, "seed": 5, "max_tokens": 30, "n": 3},
    {**ALL, "max_tokens": 40, "stop": ["a", "X", "~"]},
    {**ALL, "max_tokens": 12, "n": 2, "logprobs": 1},
    {"temperature": 1.5, "seed": 6, "max_tokens": 35, "stop_token_ids": [20, 30, 40]},
    {"temperature": 0.7, "seed": 7, "max_tokens": 1},
    {"temperature": 0, "max_tokens": 0},
]


def prompts() -> list[Ids]:
    """Of all lengths; half of them share a beginning with others."""
    rng = np.random.default_rng(1)
    shared = [rng.integers(16, VOCAB - 8, 60).tolist() for _ in range(4)]
    made: list[Ids] = []
    for i in range(PROMPTS):
        own = rng.integers(16, VOCAB - 8, int(rng.integers(1, 25))).tolist()
        made.append(shared[i % 4][: int(rng.integers(1, 60))] + own if i % 2 else own)
    return made


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_soak(houses: Houses) -> None:
    rng = np.random.default_rng(2)
    house, made = houses("llama"), prompts()
    bench = house.bench(BLOCKS, max_num_batched_tokens=48, max_num_seqs=8)
    running: list[tuple[Job, Ids, Params, int]] = []
    ended = dict.fromkeys(("stop", "length", "abort"), 0)
    samples = asked = step = 0
    memory: list[int] = []
    while asked < REQUESTS or running:
        while asked < REQUESTS and len(running) < 12 and rng.random() < 0.7:
            ids, way = made[rng.integers(PROMPTS)], WAYS[rng.integers(len(WAYS))]
            cut = step + int(rng.integers(0, 60)) if rng.random() < 0.15 else 1 << 30
            job = bench.submit(ids, way)
            running.append((job, ids, way, cut))
            asked += 1
            samples += len(job.requests)
            if asked % 250 == 0:
                gc.collect()
                memory.append(resident())
        bench.step()
        step += 1
        for entry in list(running):
            job, ids, way, cut = entry
            if job.running and step < cut:
                continue
            running.remove(entry)
            whole = house.lone(ids, way)
            for index, got in enumerate(bench.close(job)):
                assert got.reason is not None
                ended[got.reason] += 1
                if got.reason == "abort":
                    house.is_beginning(got, ids, way, index)
                else:
                    assert got == whole[index]
    assert sum(ended.values()) == samples
    assert {**ended, "error": 0} == bench.engine.metrics.finished
    assert min(ended.values()) > 100
    assert bench.engine.metrics.preemptions > 200
    assert bench.engine.metrics.cached_tokens > 10_000
    assert bench.idle()
    # Answers kept for comparison are nearly all made in the first half.
    assert max(memory[4:]) - memory[3] < 3_000_000, [m // 1000 for m in memory]


def test_the_pool_is_whole_after_it(houses: Houses) -> None:
    """The largest request that the pool can hold runs in it after many small ones."""
    house = houses("mistral")
    bench = house.bench(8)
    rng = np.random.default_rng(3)
    for _ in range(60):
        jobs = [
            bench.submit(rng.integers(16, 120, int(n)).tolist(), {"max_tokens": 6, "seed": 1})
            for n in rng.integers(1, 60, 4)
        ]
        for _ in range(int(rng.integers(0, 12))):
            bench.step()
        for job in jobs:
            bench.close(job)
        assert bench.idle()
    ids, way = list(range(20, 120)), {"temperature": 0, "max_tokens": 28, "ignore_eos": True}
    assert bench.ask(ids, way) == house.lone(ids, way)
    assert bench.idle()
