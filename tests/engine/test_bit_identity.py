"""The promise, through the whole engine: the same request gives the same bits, however it is run.

Alone = with mates = in chunks = after a prefix hit = after preemption = streamed = on two threads =
in another process. Ids, text and every score, to the bit, on the `cpu` backend. What is compared
with is always the lone run: an engine for itself, one prefill, nothing cached.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from houses import HOUSES, Houses
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proof import ALL, WAYS, Answer, Bench, House, Params
from tiny_models import VOCAB

from seethrough import LLM
from seethrough.engine.jobs import Job
from seethrough.engine.request import Request
from seethrough.engine.scheduler import Reuse, Scheduler

EVERY_WAY = pytest.mark.parametrize("way", WAYS)
NAMES = pytest.mark.parametrize("name", HOUSES)


def ids(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """A prompt; a longer one with the same seed begins with it."""
    return np.random.default_rng(seed).integers(16, vocab - 8, 512)[:length].tolist()


def limited(way: str, tokens: int) -> Params:
    return {**WAYS[way], "max_tokens": tokens}


def unscored(way: str, tokens: int) -> Params:
    """Without scores of the prompt, for which all of it would have to be computed."""
    params = limited(way, tokens)
    return {name: value for name, value in params.items() if name != "prompt_logprobs"}


# ------------------------------------------------------------------------------- every family


@NAMES
@EVERY_WAY
def test_with_mates(houses: Houses, name: str, way: str) -> None:
    """jundot/omlx#3476, vllm-project/vllm#2008: who else is in the batch changes no bit."""
    house = houses(name)
    asked = [(ids(n, seed), limited(way, 12)) for seed, n in enumerate([1, 37, 16, 5, 50, 33])]
    for budget in (512, 24):
        bench = house.bench(max_num_batched_tokens=budget)
        jobs = []
        for prompt, params in asked:  # they arrive one after the other
            jobs.append(bench.submit(prompt, params))
            bench.step()
        bench.run()
        for job, (prompt, params) in zip(jobs, asked, strict=True):
            assert bench.close(job) == house.lone(prompt, params)


@NAMES
@pytest.mark.parametrize("way", ["greedy, prompt scored", "all, prompt scored"])
def test_in_chunks_of_every_size(houses: Houses, name: str, way: str) -> None:
    """vllm-project/vllm#14239, PR#4139: the scores of a prompt do not know where it was cut."""
    house, prompt, params = houses(name), ids(37), limited(way, 5)
    (wanted,) = house.lone(prompt, params)
    assert wanted.prompt_scores is not None
    assert [i for i, entry in enumerate(wanted.prompt_scores) if entry is None] == [0]
    for chunk in range(1, 38):
        bench = house.bench(max_num_batched_tokens=chunk)
        assert bench.ask(prompt, params) == [wanted], chunk
        assert bench.engine.metrics.steps == -(-37 // chunk) + len(wanted.ids) - 1


@NAMES
@EVERY_WAY
def test_after_a_prefix_hit(houses: Houses, name: str, way: str) -> None:
    """Part of a prompt, all of it, up to a block's end and to the middle of one."""
    house = houses(name)
    base = ids(48)
    for first, then, hit in [
        (base[:40], base[:40], 32),
        (base[:32], base[:32], 31),
        (base[:17], base[:17], 16),
        (base[:16], base[:16], 15),
        (base[:15], base[:15], 0),
        (base[:40], [*base[:30], 99, *base[31:]], 16),
        (base[:32], base[:48], 32),
        (base[:48], base[:33], 32),
        (base[:48], base[:20], 16),
    ]:
        for params in (unscored(way, 6), limited(way, 6)):
            bench = house.bench()
            bench.ask(first, unscored("greedy", 3))
            job = bench.submit(then, params)
            bench.run()
            found = 0 if "prompt_logprobs" in params else hit
            assert job.output().num_cached_tokens == found
            assert bench.close(job) == house.lone(then, params)


@NAMES
def test_after_a_hit_on_what_was_generated(houses: Houses, name: str) -> None:
    """A conversation goes on: the next prompt begins with the prompt and the answer before."""
    house, bench = houses(name), houses(name).bench()
    prompt = ids(10)
    for turn in range(3):
        params = limited("greedy", 20)
        job = bench.submit(prompt, params)
        bench.run()
        # The last token of an answer was never computed.
        assert job.output().num_cached_tokens == (len(prompt) - 4) // 16 * 16 * (turn > 0)
        (got,) = bench.close(job)
        assert [got] == house.lone(prompt, params)
        prompt = [*prompt, *got.ids, *ids(3, seed=turn + 9)]


@NAMES
@EVERY_WAY
@pytest.mark.parametrize("caching", [True, False])
def test_after_preemption(houses: Houses, name: str, way: str, caching: bool) -> None:
    """vllm-project/vllm#16832: nothing is missing, doubled or wrong after several recomputes."""
    house = houses(name)
    # No end and no stop before 40 tokens: a border between prompt and output that moved in a
    # recompute would end it early, and so would penalties on other ids.
    params = {**limited(way, 40), "min_tokens": 40, "ignore_eos": False, "stop": ["~", "a"]}
    asked = [(ids(n, seed), params) for seed, n in enumerate([12, 15, 33, 9, 20, 14])]
    bench = house.bench(6, enable_prefix_caching=caching, max_num_batched_tokens=20)
    jobs = [bench.submit(prompt, way) for prompt, way in asked]
    bench.run()
    times = [job.requests[0].num_preemptions for job in jobs]
    assert times[0] == 0  # the oldest never gives way
    assert max(times) >= 2
    assert sum(times) == bench.engine.metrics.preemptions >= 4
    for job, (prompt, params) in zip(jobs, asked, strict=True):
        output = job.output()
        # What is counted is as it would be without: vllm-project/vllm PR#5349, sglang PR#11898.
        assert output.metrics.prompt_tokens == len(prompt)
        assert output.metrics.completion_tokens == 40
        assert output.num_cached_tokens < len(prompt)
        assert bench.close(job) == house.lone(prompt, params)


@NAMES
def test_samples_of_one_prompt(houses: Houses, name: str) -> None:
    """Each of n samples is what it is alone; they share the prompt's blocks."""
    house, params = houses(name), {**limited("all, prompt scored", 10), "n": 4}
    for settings_ in ({}, {"num_kv_blocks": 5}, {"max_num_batched_tokens": 7}):
        assert house.bench(**settings_).ask(ids(35), params) == house.lone(ids(35), params)


@NAMES
def test_on_two_threads(houses: Houses, name: str) -> None:
    one, two = houses(name), houses(name, threads=2)
    for way in WAYS:
        asked = [(ids(n, seed), limited(way, 10)) for seed, n in enumerate([40, 3, 17])]
        bench = two.bench(max_num_batched_tokens=21)
        jobs = [bench.submit(prompt, params) for prompt, params in asked]
        bench.run()
        for job, (prompt, params) in zip(jobs, asked, strict=True):
            assert bench.close(job) == one.lone(prompt, params)


def test_in_another_process(houses: Houses) -> None:
    """One process with two threads, small chunks and a small pool, for all families."""
    lengths = zip((30, 9, 17, 2), WAYS, strict=True)
    asked = [(ids(n, seed), limited(way, 24)) for seed, (n, way) in enumerate(lengths)]
    tasks = [
        {
            "model": str(houses.path(name)),
            "requests": asked,
            "threads": 2,
            "num_kv_blocks": 5,
            "max_num_batched_tokens": 11,
        }
        for name in HOUSES
    ]
    for name, got in zip(HOUSES, other_process(tasks), strict=True):
        assert got == plain([houses(name).lone(*one) for one in asked]), name


def other_process(tasks: list[dict[str, Any]]) -> Any:
    script = Path(__file__).parent / "proof.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(tasks),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def plain(answers: list[list[Answer]]) -> Any:
    """As JSON spells it: lists in place of tuples."""
    return json.loads(json.dumps(answers))


# ------------------------------------------------------------------------------- the default model


@pytest.fixture(scope="module")
def big(houses: Houses, default_model: str) -> House:
    return houses(default_model)


PROMPT = ids(300, vocab=40_000)  # past a piece of attention, which is 256 positions
BIG_WAYS = pytest.mark.parametrize("way", ["greedy, prompt scored", "all, prompt scored"])


@BIG_WAYS
@pytest.mark.parametrize("chunk", [1, 7, 16, 255, 256, 257])
def test_the_default_model_in_chunks(big: House, way: str, chunk: int) -> None:
    params = limited(way, 8)
    bench = big.bench(max_num_batched_tokens=chunk)
    assert bench.ask(PROMPT, params) == big.lone(PROMPT, params)


@BIG_WAYS
@pytest.mark.parametrize("threads", [1, 2])
def test_the_default_model_with_mates(
    houses: Houses, default_model: str, big: House, way: str, threads: int
) -> None:
    bench = houses(default_model, threads).bench(max_num_batched_tokens=64)
    asked = [(PROMPT[i : i + n], limited(way, 9)) for i, n in enumerate([300, 1, 40, 257, 17])]
    jobs = [bench.submit(prompt, params) for prompt, params in asked[:3]]
    for _ in range(3):
        bench.step()
    jobs += [bench.submit(prompt, params) for prompt, params in asked[3:]]
    bench.run()
    for job, (prompt, params) in zip(jobs, asked, strict=True):
        assert bench.close(job) == big.lone(prompt, params)


@BIG_WAYS
@pytest.mark.parametrize(
    ("length", "hit"), [(300, 288), (288, 287), (289, 288), (256, 255), (272, 271), (40, 32)]
)
def test_the_default_model_after_a_prefix_hit(big: House, way: str, length: int, hit: int) -> None:
    bench, params = big.bench(), unscored(way, 6)
    bench.ask(PROMPT, unscored("greedy", 1))
    job = bench.submit(PROMPT[:length], params)
    bench.run()
    assert job.output().num_cached_tokens == hit
    assert bench.close(job) == big.lone(PROMPT[:length], params)


@BIG_WAYS
def test_the_default_model_after_preemption(big: House, way: str) -> None:
    bench = big.bench(6, max_num_batched_tokens=32)
    params = {**limited(way, 40), "ignore_eos": True, "stop": [], "stop_token_ids": []}
    asked = [(PROMPT[i : i + n], params) for i, n in enumerate([12, 15, 33, 9, 20, 14])]
    jobs = [bench.submit(prompt, params) for prompt, params in asked]
    bench.run()
    assert max(job.requests[0].num_preemptions for job in jobs) >= 2
    for job, (prompt, params) in zip(jobs, asked, strict=True):
        assert bench.close(job) == big.lone(prompt, params)


def test_the_default_model_in_another_process(big: House, default_model: str) -> None:
    asked = [(PROMPT[:270], limited(way, 8)) for way in WAYS]
    task = {"model": default_model, "requests": asked, "threads": 2, "num_kv_blocks": 40}
    (got,) = other_process([task])
    assert got == plain([big.lone(*one) for one in asked])


def test_through_the_front_door(big: House, default_model: str) -> None:
    """`generate` and `stream` of an engine as users open it."""
    llm = LLM(default_model, max_model_len=512)
    for way in WAYS:
        params = limited(way, 12)
        (alone,) = big.lone(PROMPT[:60], params)
        prompt = {"prompt_token_ids": PROMPT[:60]}
        (output,) = llm.generate(prompt, **params)
        stream = llm.stream(prompt, **params)
        pieces = list(stream)
        assert "".join(piece.text for piece in pieces) == output.outputs[0].text == alone.text
        for out in (output, stream.output()):
            assert tuple(out.outputs[0].token_ids) == alone.ids
            assert [
                [(i, p.logprob.hex()) for i, p in e.items()] for e in out.outputs[0].logprobs or ()
            ] == [[entry[:2] for entry in position] for position in alone.scores or ()]


# ------------------------------------------------------------------------------- any schedule

# Few, so that many runs share what was answered alone; prompts share beginnings.
CHOICES: list[Params] = [
    {"temperature": 0, "max_tokens": 9, "logprobs": 1},
    {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "prompt_logprobs": 1},
    {"temperature": 1, "seed": 4, "max_tokens": 25, "n": 3, "logprobs": 0},
    {**ALL, "max_tokens": 14, "n": 2},
    {**ALL, "max_tokens": 30, "prompt_logprobs": 0},
    {"temperature": 0, "max_tokens": 0, "prompt_logprobs": 2},
    {"temperature": 0.8, "seed": 1, "max_tokens": 1},
]
MOST_POSITIONS = 64 + 30


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """The beginning of one of two texts, that may go on as no other does."""
    length = draw(st.sampled_from([1, 15, 16, 17, 31, 32, 33, 40, 48]))
    begin = ids(length, seed=draw(st.integers(0, 1)))
    return begin + ids(draw(st.sampled_from([0, 0, 1, 9, 16])), seed=draw(st.integers(2, 3)))


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 6),  # steps since the one before
        prompts(),
        st.integers(0, len(CHOICES) - 1),
        st.none() | st.integers(0, 30),  # steps after which it is aborted
        st.sampled_from([None, None, "salt"]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(["llama", "mistral", "gemma3", "bloom", "gemma3 q8_0"]),
    arrivals=ARRIVALS,
    blocks=st.integers(-(-MOST_POSITIONS // 16), 9),
    budget=st.sampled_from([1, 2, 5, 16, 17, 40, 512]),
    most=st.integers(1, 6),
    threshold=st.sampled_from([1, 3, 16, 128]),
    caching=st.booleans(),
)
def test_any_schedule_changes_no_bit(
    houses: Houses,
    name: str,
    arrivals: list[tuple[int, list[int], int, int | None, str | None]],
    blocks: int,
    budget: int,
    most: int,
    threshold: int,
    caching: bool,
) -> None:
    """Whoever comes and goes, whenever: what ends is the lone run, what is cut its beginning."""
    house = houses(name)
    bench = house.bench(
        blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=most,
        long_prefill_token_threshold=threshold,
        enable_prefix_caching=caching,
    )
    jobs: list[Job] = []
    aborts: dict[int, list[Job]] = {}
    now = 0
    for wait, prompt, choice, until, salt in arrivals:
        for _ in range(wait):
            now = one_step(bench, aborts, now)
        jobs.append(bench.submit(prompt, CHOICES[choice], salt=salt))
        if until is not None:
            aborts.setdefault(now + until, []).append(jobs[-1])
    while bench.engine.busy:
        now = one_step(bench, aborts, now)
        assert now < 5000, "it does not come to an end"
    for job, (_, prompt, choice, _, _) in zip(jobs, arrivals, strict=True):
        for index, got in enumerate(bench.close(job)):
            if got.reason == "abort":
                house.is_beginning(got, prompt, CHOICES[choice], index)
            else:
                assert got == house.lone(prompt, CHOICES[choice])[index]
    assert bench.idle()


def one_step(bench: Bench, aborts: dict[int, list[Job]], now: int) -> int:
    for job in aborts.get(now, ()):
        for request in job.requests:
            bench.engine.abort(request)
            bench.engine.check()
    bench.step()
    return now + 1


# ------------------------------------------------------------------------------- could it fail?


def test_a_token_too_many_from_the_cache_would_be_seen(
    houses: Houses, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, then = houses("llama").bench(), [*ids(30), 99, *ids(8, seed=5)]
    bench.ask(ids(40), limited("greedy", 1))
    right = Scheduler._reusable

    def one_more(self: Scheduler, request: Request) -> Reuse:
        return right(self, request)._replace(tokens=right(self, request).tokens + 1)

    monkeypatch.setattr(Scheduler, "_reusable", one_more)
    assert bench.ask(then, limited("greedy", 5)) != houses("llama").lone(then, limited("greedy", 5))


def test_a_block_of_another_text_would_be_seen(
    houses: Houses, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, params = houses("llama").bench(), limited("greedy", 5)
    bench.ask(ids(40), params)
    find = bench.pool.prefix.find
    monkeypatch.setattr(bench.pool.prefix, "find", lambda keys: find(keys)[::-1])
    assert bench.ask(ids(40), params) != houses("llama").lone(ids(40), params)


def test_what_was_lost_in_a_preemption_would_be_seen(
    houses: Houses, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, params = houses("llama"), {**limited("greedy", 40), "max_tokens": 40}
    right = Scheduler._start

    def forgetful(self: Scheduler, request: Request, reuse: Reuse, room: int) -> bool:
        known = request.most_computed
        if request.num_preemptions == 0 or not right(self, request, reuse, room):
            return request.num_preemptions == 0 and right(self, request, reuse, room)
        request.num_computed = known  # although its blocks are new ones
        return True

    monkeypatch.setattr(Scheduler, "_start", forgetful)
    bench = house.bench(6, enable_prefix_caching=False)
    jobs = [bench.submit(ids(12, seed), params) for seed in range(4)]
    bench.run()
    assert bench.engine.metrics.preemptions > 0
    got = [bench.close(job) for job in jobs]
    assert got != [house.lone(ids(12, seed), params) for seed in range(4)]
