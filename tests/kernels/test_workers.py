"""The workers: what their owner leaves behind, and that all of them meet."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

from seethrough.kernels.cpu.compiled import Kernels
from seethrough.kernels.cpu.workers import Workers
from seethrough.weights.catalog import default_cache_dir


def workers(count: int) -> Workers:
    return Workers(count, Kernels(default_cache_dir().parent / "kernels"), 4)


def running() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("seethrough-worker")}


def assert_ended(threads: set[threading.Thread]) -> None:
    for thread in threads:
        thread.join(timeout=5)
        assert not thread.is_alive()


def test_barriers_are_met_by_all() -> None:
    for count in (1, 2, 5):
        team = workers(count)
        assert 0 < team.barrier_seconds(200) < 0.1
        team.close()


def test_a_forgotten_owner_leaves_no_thread() -> None:
    before = running()
    team = workers(3)
    team.barrier_seconds(100)
    mine = running() - before
    assert len(mine) == 2
    gone = weakref.ref(team)
    del team
    gc.collect()
    for _ in range(100):
        if gone() is None:
            break
        threading.Event().wait(0.01)
    assert gone() is None
    assert_ended(mine)


def test_closing_twice_is_closing_once() -> None:
    before = running()
    team = workers(2)
    mine = running() - before
    team.close()
    team.close()
    assert_ended(mine)


def test_code_outlives_its_owner_while_a_thread_is_in_it() -> None:
    """An engine that is dropped right after a step must not pull the code from under a worker."""
    program = """
from seethrough.kernels.cpu.compiled import Kernels
from seethrough.kernels.cpu.workers import Workers
from seethrough.weights.catalog import default_cache_dir
for _ in range(60):
    team = Workers(4, Kernels(default_cache_dir().parent / "kernels"), 4)
    team.barrier_seconds(3)
    del team
print("alive")
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "alive\n"), ran.stderr
