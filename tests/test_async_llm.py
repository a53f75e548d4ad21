"""Many asyncio callers on one engine: each gets its own answer, whoever leaves leaves nothing."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from seethrough import LLM, AsyncLLM, AsyncStream
from seethrough.engine.engine import Engine
from seethrough.errors import (
    CapacityError,
    ContextLengthError,
    EngineStoppedError,
    ParameterError,
)
from seethrough.model.compiled import CompiledProgram

sys.path.insert(0, str(Path(__file__).parent / "engine"))

from engine_forge import prompt, tiny_llama

TEXTS = ["the quick brown fox", "dog", "q", "the lazy dog sleeps on the floor", "over the other"]
DRAWN: dict[str, Any] = {"temperature": 1.1, "seed": 5, "max_tokens": 12, "logprobs": 2}
SMALL = {"max_model_len": 96, "num_kv_blocks": 9, "max_num_batched_tokens": 16, "threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, max_model_len=96, threads=1)


@pytest.fixture
def served(folder: Path) -> Iterator[AsyncLLM]:
    opened = AsyncLLM(folder, **SMALL)
    yield opened
    asyncio.run(opened.close())
    engine = opened._llm._engine
    engine.check()
    assert not engine.busy
    assert len(opened._llm.jobs) == 0
    assert engine.pool.free_blocks == engine.pool.num_blocks
    assert not opened._bells._events


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take a while, so that a request is still there when its caller leaves."""
    original = CompiledProgram.run

    def run_slowly(*given: Any) -> Any:
        time.sleep(0.01)
        return original(*given)

    monkeypatch.setattr(CompiledProgram, "run", run_slowly)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Nothing here takes long: what hangs fails."""
    return asyncio.run(asyncio.wait_for(work, 60))


async def until_idle(served: AsyncLLM) -> None:
    while (state := await served.state()).running or state.waiting:
        await asyncio.sleep(0.001)
    assert state.blocks_held == 0


def test_many_callers_each_get_what_they_would_get_alone(served: AsyncLLM, llm: LLM) -> None:
    wanted = [llm.generate(text, **DRAWN)[0].outputs for text in TEXTS]

    async def callers() -> None:
        order = [i for i in range(len(TEXTS)) for _ in range(8)]
        random.Random(1).shuffle(order)
        outputs = await asyncio.gather(*(served.generate(TEXTS[i], **DRAWN) for i in order))
        for i, output in zip(order, outputs, strict=True):
            assert output.outputs == wanted[i]
            assert output.prompt == TEXTS[i]
        assert (await served.state()).counted.steps < sum(len(w[0].token_ids) for w in wanted) * 8

    run(callers())


def test_a_stream_is_the_answer_piece_by_piece(served: AsyncLLM, llm: LLM) -> None:
    wanted = llm.generate(TEXTS[0], **DRAWN)[0].outputs[0]

    async def read() -> None:
        stream = served.stream(TEXTS[0], **DRAWN)
        with pytest.raises(RuntimeError, match="not been started"):
            stream.output()
        pieces = [piece async for piece in stream]
        assert "".join(piece.text for piece in pieces) == wanted.text
        assert [i for piece in pieces for i in piece.token_ids] == wanted.token_ids
        assert stream.output().outputs == [wanted]
        assert [piece async for piece in stream] == []

    run(read())


def test_samples_and_chats(served: AsyncLLM, llm: LLM) -> None:
    talk = [{"role": "user", "content": "the dog"}]

    async def ask() -> None:
        both = await asyncio.gather(
            served.generate(TEXTS[1], n=3, **DRAWN), served.chat(talk, **DRAWN)
        )
        assert both[0].outputs == llm.generate(TEXTS[1], n=3, **DRAWN)[0].outputs
        assert both[1].outputs == llm.chat(talk, **DRAWN)[0].outputs
        pieces = [piece async for piece in served.stream_chat(talk, **DRAWN)]
        assert "".join(piece.text for piece in pieces) == both[1].outputs[0].text

    run(ask())


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_cancelled_caller_frees_its_memory(served: AsyncLLM, llm: LLM, after: int) -> None:
    wanted = llm.generate(TEXTS[0], **DRAWN)[0].outputs

    async def read(taken: asyncio.Event) -> None:
        count = 0
        async for _ in served.stream(TEXTS[3], max_tokens=60, ignore_eos=True):
            count += 1
            if count == after:
                taken.set()

    async def cancel() -> None:
        taken = asyncio.Event()
        mate = asyncio.create_task(served.generate(TEXTS[0], **DRAWN))
        task = asyncio.create_task(read(taken))
        if after:
            await taken.wait()
        else:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await mate).outputs == wanted
        await until_idle(served)
        assert (await served.state()).counted.finished["abort"] <= 1

    run(cancel())


@pytest.mark.usefixtures("slow")
def test_an_abort_between_the_chunks_of_a_prompt(served: AsyncLLM) -> None:
    """The prompt takes five steps; the caller is gone after the first."""

    async def leave() -> None:
        stream = served.stream(prompt(*range(80)), max_tokens=4)
        task = asyncio.create_task(anext(stream))
        while not (state := await served.state()).counted.steps:
            await asyncio.sleep(0)
        assert state.counted.output_tokens == 0
        await stream.close()
        with pytest.raises(StopAsyncIteration):
            await task
        state = await served.state()
        assert (state.running, state.blocks_held) == (0, 0)
        assert stream.output().outputs[0].finish_reason == "abort"
        assert state.counted.computed_tokens < 80

    run(leave())


@pytest.mark.usefixtures("slow")
def test_a_stream_that_nobody_holds_ends_by_itself(served: AsyncLLM) -> None:
    async def drop() -> None:
        async for _ in served.stream(TEXTS[0], max_tokens=70, ignore_eos=True):
            break
        gc.collect()
        await until_idle(served)

    run(drop())


@pytest.mark.usefixtures("slow")
def test_a_block_left_early_ends_the_request(served: AsyncLLM) -> None:
    async def leave() -> None:
        async with served.stream(TEXTS[0], max_tokens=70, ignore_eos=True) as stream:
            await anext(stream)
        assert (await served.state()).blocks_held == 0
        await stream.close()
        async with served.stream(TEXTS[0]) as unused:
            pass
        assert [piece async for piece in unused] == []

    run(leave())


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        ({"prompt": "dog", "temperature": -1}, ParameterError),
        ({"prompt": "dog", "cache_salt": ""}, ParameterError),
        ({"prompt": prompt(10**6)}, ParameterError),
        ({"prompt": "dog", "max_tokens": 1000}, ContextLengthError),
    ],
)
def test_a_bad_request_is_refused_and_disturbs_nobody(
    served: AsyncLLM, llm: LLM, ask: dict[str, Any], error: type[Exception]
) -> None:
    async def both() -> None:
        mate = asyncio.create_task(served.generate(TEXTS[0], **DRAWN))
        with pytest.raises(error):
            await served.generate(**ask)
        assert (await mate).outputs == llm.generate(TEXTS[0], **DRAWN)[0].outputs

    run(both())


def test_what_the_pool_can_never_hold_is_refused_at_once(folder: Path) -> None:
    """vllm-project/vllm#39734: it waited for ever, and all behind it."""

    async def ask() -> None:
        async with AsyncLLM(folder, **(SMALL | {"num_kv_blocks": 3})) as small:
            with pytest.raises(CapacityError, match="needs 4 KV cache blocks"):
                await small.generate(prompt(*range(40)), max_tokens=20)
            assert (await small.generate("dog", max_tokens=2)).finished

    run(ask())


@pytest.mark.usefixtures("slow")
def test_closing_ends_what_runs_and_refuses_what_comes(folder: Path) -> None:
    async def close() -> None:
        opened = AsyncLLM(folder, **SMALL)
        stream = opened.stream(TEXTS[0], max_tokens=70, ignore_eos=True)
        await anext(stream)
        waiting = asyncio.create_task(opened.generate(TEXTS[3], max_tokens=70, ignore_eos=True))
        await asyncio.sleep(0)
        await opened.close()
        await opened.close()
        rest = [piece async for piece in stream]
        assert len(rest) < 70
        assert stream.output().outputs[0].finish_reason == "abort"
        with pytest.raises(EngineStoppedError, match="it was closed"):
            await opened.generate("dog")
        try:
            output = await waiting
        except EngineStoppedError:
            return  # it was not queued yet
        assert output.outputs[0].finish_reason == "abort"

    run(close())


@pytest.mark.usefixtures("slow")
def test_a_bug_in_a_step_reaches_every_caller(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = AsyncLLM(folder, **SMALL)

    async def ask() -> None:
        def broken(*_: Any) -> Any:
            raise ZeroDivisionError("a bug")

        async def drain(stream: AsyncStream) -> None:
            async for _ in stream:
                pass

        first = opened.stream(TEXTS[0], max_tokens=70, ignore_eos=True)
        await anext(first)
        monkeypatch.setattr(Engine, "step", broken)
        for caller in (drain(first), opened.generate("dog")):
            with pytest.raises(EngineStoppedError, match="ZeroDivisionError: a bug") as caught:
                await caller
            assert isinstance(caught.value.__cause__, ZeroDivisionError)

    run(ask())
    asyncio.run(opened.close())


def test_callers_on_two_event_loops(served: AsyncLLM, llm: LLM) -> None:
    wanted = [llm.generate(text, **DRAWN)[0].outputs for text in TEXTS]
    found: dict[int, Any] = {}

    async def ask() -> list[Any]:
        return await asyncio.gather(*(served.generate(text, **DRAWN) for text in TEXTS))

    def loop(which: int) -> None:
        found[which] = [output.outputs for output in run(ask())]

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {0: wanted, 1: wanted}


@pytest.mark.usefixtures("slow")
def test_an_event_loop_that_is_gone_disturbs_nobody(served: AsyncLLM) -> None:
    """A loop is closed with a stream in the middle; its bell cannot be rung any more."""
    kept: list[Any] = []

    async def begin() -> None:
        kept.append(served.stream(TEXTS[0], max_tokens=40, ignore_eos=True))
        await anext(kept[0])

    run(begin())

    async def ask() -> None:
        assert (await served.generate("dog", max_tokens=30, ignore_eos=True)).finished

    run(ask())
    kept.clear()
    gc.collect()


def test_a_storm_of_callers_that_come_and_leave(served: AsyncLLM, llm: LLM) -> None:
    """ml-explore/mlx-lm#1255: cancels and retries under load wedged the server until a restart."""
    wanted = {text: llm.generate(text, **DRAWN)[0].outputs for text in TEXTS}
    dice = random.Random(3)

    async def caller(seed: int) -> None:
        own = random.Random(seed)
        for _ in range(8):
            text = own.choice(TEXTS)
            task = asyncio.create_task(served.generate(text, **DRAWN))
            if own.random() < 0.5:
                await asyncio.sleep(own.random() * 0.01)
                task.cancel()
            try:
                assert (await task).outputs == wanted[text]
            except asyncio.CancelledError:
                assert task.cancelled()

    async def storm() -> None:
        await asyncio.gather(*(caller(dice.randrange(10**6)) for _ in range(12)))
        await until_idle(served)
        assert (await served.generate(TEXTS[0], **DRAWN)).outputs == wanted[TEXTS[0]]

    run(storm())


def test_an_engine_that_nobody_closes_ends_with_its_owner(folder: Path) -> None:
    opened = AsyncLLM(folder, **SMALL)
    thread = opened._loop._thread
    assert run(opened.generate("dog", max_tokens=1)).finished
    del opened
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_program_that_forgets_to_close_still_ends(folder: Path) -> None:
    import subprocess

    program = (
        "import asyncio, sys\nfrom seethrough import AsyncLLM\n"
        f"llm = AsyncLLM({str(folder)!r}, threads=1, max_model_len=96)\n"
        "async def main():\n"
        "    stream = llm.stream('dog', max_tokens=90, ignore_eos=True)\n"
        "    await anext(stream)\n"
        "    print('begun', flush=True)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "begun\n"), done.stderr
    assert "Traceback" not in done.stderr
