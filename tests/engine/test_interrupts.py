"""A step lets other Python threads run, and Ctrl-C ends a request at the end of its step."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, sleep
from typing import Any

import pytest
from engine_forge import Models, prompt

from seethrough import LLM

PROMPT = prompt(*(1000 + 37 * i % 9000 for i in range(1024)))


@contextmanager
def ticking() -> Iterator[list[float]]:
    """A thread that notes the time every 5 ms, for as long as it gets to run."""
    ticks: list[float] = []
    end = threading.Event()

    def tick() -> None:
        while not end.is_set():
            ticks.append(perf_counter())
            sleep(0.005)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield ticks
    finally:
        end.set()
        thread.join()


def ticks_a_second(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> float:
    """How often the other thread ran while a prompt was computed in one step."""
    model = llm._engine.model
    run, steps = model.run, list[tuple[float, float]]()
    llm.forget_prefixes()  # the whole prompt is computed, whoever asked for it before

    def timed(*args: Any) -> Any:
        started = perf_counter()
        result = run(*args)
        steps.append((started, perf_counter()))
        return result

    with monkeypatch.context() as patch, ticking() as ticks:
        patch.setattr(model, "run", timed)
        llm.generate(PROMPT, max_tokens=1, temperature=0)
    ((started, ended),) = steps
    return sum(started < tick < ended for tick in ticks) / (ended - started)


@pytest.fixture
def one_step(models: Models, default_model: str) -> LLM:
    return models(default_model, max_model_len=1040, max_num_batched_tokens=1024)


def test_other_threads_run_during_a_prefill(one_step: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # 200 if nothing else ran on this machine.
    assert ticks_a_second(one_step, monkeypatch) > 20


def test_they_would_not_if_the_step_held_the_interpreter(
    one_step: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = one_step._engine.model
    holding = model.kernels.callable("run_records", 6, hold_gil=True)
    monkeypatch.setattr(model.workers, "_run", holding)
    assert ticks_a_second(one_step, monkeypatch) < 10


# A minute and more of work, if nothing ends it; what came of it after the interrupt.
LONG = """
import sys
from seethrough import LLM

llm = LLM(sys.argv[1], max_model_len=8000, num_kv_blocks=500)
try:
    print("asked", flush=True)
    llm.generate({"prompt_token_ids": [1000] * int(sys.argv[2])}, ignore_eos=True)
except KeyboardInterrupt:
    llm._engine.check()
    assert not llm._engine.busy
    assert len(llm.generate("A", max_tokens=3, ignore_eos=True)[0].outputs[0].token_ids) == 3
    print("usable", flush=True)
    raise
"""


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_ctrl_c_ends_a_generate_within_a_step(phase: str, default_model: str) -> None:
    tokens = {"prefill": 7000, "decode": 20}[phase]
    with subprocess.Popen(
        [sys.executable, "-c", LONG, default_model, str(tokens)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "asked\n"
        sleep(1)
        assert running.poll() is None
        started = perf_counter()
        running.send_signal(signal.SIGINT)
        try:
            out, err = running.communicate(timeout=10)
        finally:
            running.kill()
    assert perf_counter() - started < 10
    assert out == "usable\n", err
    assert running.returncode == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
