"""While a step runs in compiled code, the rest of the program goes on."""

from __future__ import annotations

import threading
import time

import numpy as np

from seethrough import LLM


def test_another_thread_runs_during_a_prefill(default_model: str) -> None:
    llm = LLM(default_model, backend="cpu", max_model_len=2048, max_num_batched_tokens=2048)
    ids = np.random.default_rng(0).integers(100, 40_000, 2000).tolist()
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.005):
            ticks.append(time.perf_counter())

    other = threading.Thread(target=tick)
    other.start()
    try:
        time.sleep(0.05)
        started = time.perf_counter()
        llm.generate({"prompt_token_ids": ids}, max_tokens=1)  # one step
        seconds = time.perf_counter() - started
    finally:
        stop.set()
        other.join()
    during = [t for t in ticks if started < t < started + seconds]
    # With the lock held it would tick before and after, and perhaps once between.
    assert len(during) > 0.1 * seconds / 0.005
    gaps = np.diff([started, *during, started + seconds])
    assert gaps.max() < 0.6 * seconds
