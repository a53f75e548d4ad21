"""Runs requests in every way that an engine can run them, and keeps every answer to the bit.

Run as a program it does so in a process of its own: a task comes in, answers go out, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seethrough import SamplingParams
from seethrough.config import EngineConfig
from seethrough.engine.engine import Engine
from seethrough.engine.intake import Intake
from seethrough.engine.jobs import Job, Jobs
from seethrough.engine.load import Loaded, load
from seethrough.engine.outputs import completion_output
from seethrough.engine.request import LogprobDict, Request
from seethrough.kv.pool import KVPool

Params = Mapping[str, Any]
Ids = Sequence[int]

# Every way to choose, with every processor on; `seen` ones look at the prompt as well.
ALL: Params = {
    "temperature": 1.2,
    "top_k": 50,
    "top_p": 0.97,
    "min_p": 0.002,
    "typical_p": 0.97,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {5: 1.5, 9: -2.0, 40: 1.0},
    "bad_words": ["the", "a"],
    "bad_words_ids": [[3], [7, 8]],
    "min_tokens": 4,
    "stop": ["~~", "zq"],
    "stop_token_ids": [11],
    "seed": 2**63 + 11,
    "logprobs": 5,
}
WAYS: dict[str, Params] = {
    "greedy": {"temperature": 0, "ignore_eos": True, "logprobs": 3},
    "all": ALL,
    "greedy, prompt scored": {"temperature": 0, "logprobs": 2, "prompt_logprobs": 3},
    "all, prompt scored": {**ALL, "prompt_logprobs": 1, "logprobs_mode": "processed_logits"},
}


class Answer(NamedTuple):
    """All that one sample gave; floats as their exact spelling."""

    ids: tuple[int, ...]
    text: str
    reason: str | None
    stop: int | str | None
    scores: tuple[Any, ...] | None
    prompt_scores: tuple[Any, ...] | None


def answer(request: Request) -> Answer:
    out = completion_output(request)
    scored = request.params.prompt_logprobs is not None and request.sample_index == 0
    return Answer(
        tuple(out.token_ids),
        out.text,
        out.finish_reason,
        out.stop_reason,
        None if out.logprobs is None else exact(out.logprobs),
        exact(request.prompt_logprobs) if scored else None,
    )


def exact(entries: Iterable[LogprobDict | None]) -> tuple[Any, ...]:
    """Every entry with its order, its rank, its text, and all 64 bits of its score."""
    return tuple(
        entry
        and tuple((i, float(p.logprob).hex(), p.rank, p.decoded_token) for i, p in entry.items())
        for entry in entries
    )


class Bench:
    """An engine of its own around a loaded model: any pool, any limits, books checked each step.

    Its cache is full of NaN at first, so that what was never written cannot go unseen.
    """

    def __init__(self, loaded: Loaded, num_kv_blocks: int | None = None, **config: Any) -> None:
        chosen = EngineConfig(**config)
        blocks = num_kv_blocks or 64
        self.pool = KVPool(loaded.engine.pool.shape, blocks, chosen.block_size)
        self.pool.k[:] = np.nan
        self.pool.v[:] = np.nan
        whole = loaded.engine
        self.engine = Engine(whole.model, self.pool, whole.tokenizer, chosen, whole._sampling)
        self.intake = Intake(replace(loaded, engine=self.engine, config=chosen), None)
        self.jobs = Jobs(self.engine)

    def submit(
        self,
        ids: Ids,
        params: Params,
        *,
        salt: str | None = None,
        samples: Iterable[int] | None = None,
    ) -> Job:
        effective = self.intake.effective(SamplingParams(**params))
        job = self.intake.job(None, list(ids), effective, 1.0, cache_salt=salt, samples=samples)
        self.jobs.submit(job)
        return job

    def step(self) -> None:
        self.jobs.step()
        self.engine.check()

    def run(self, *jobs: Job) -> None:
        """Until these are done; all, if none is named."""
        while any(job.running for job in jobs) if jobs else self.engine.busy:
            self.step()

    def ask(self, ids: Ids, params: Params, **more: Any) -> list[Answer]:
        """One prompt, with whatever else runs; its answers."""
        job = self.submit(ids, params, **more)
        self.run(job)
        return self.close(job)

    def close(self, job: Job) -> list[Answer]:
        """End a job; its answers, which the pieces of its stream must make when joined."""
        pieces = list(job.fresh)
        self.jobs.close(job)
        self.engine.check()
        for request in job.requests:
            own = [p for p in pieces if p.index == request.sample_index]
            out = completion_output(request)
            assert [i for p in own for i in p.token_ids] == out.token_ids
            if out.logprobs is not None:
                assert [entry for p in own for entry in p.logprobs or ()] == out.logprobs
            text = "".join(p.text for p in own)
            reasons = [p.finish_reason for p in own if p.finish_reason]
            if out.finish_reason == "abort":  # what was held comes with the output only
                assert out.text.startswith(text)
                assert reasons == []
            else:
                assert (text, reasons) == (out.text, [out.finish_reason])
        return [answer(request) for request in job.requests]

    def idle(self) -> bool:
        """Nothing runs, nothing is kept but what the prefix cache may keep."""
        self.engine.check()
        return (
            not self.engine.busy
            and not self.jobs
            and self.pool.free_blocks == self.pool.num_blocks
            and len(self.pool.prefix) <= self.pool.num_blocks
        )


class House:
    """A model, opened once, and what it answers when it is asked alone."""

    def __init__(self, model: Path | str, threads: int = 1) -> None:
        self.model = str(model)
        self.loaded = load(self.model, EngineConfig(threads=threads, max_model_len=None))
        self._lone: dict[tuple[Ids, str], list[Answer]] = {}

    def bench(self, num_kv_blocks: int | None = None, **config: Any) -> Bench:
        return Bench(self.loaded, num_kv_blocks, **config)

    def lone(self, ids: Ids, params: Params) -> list[Answer]:
        """Each sample with an engine for itself: one prefill, no cache, no mates."""
        key = (tuple(ids), json.dumps(params, sort_keys=True))
        if key not in self._lone:
            answers: list[Answer] = []
            for index in range(params.get("n", 1)):
                bench = self.bench(enable_prefix_caching=False)
                answers += bench.ask(ids, params, samples=[index])
            self._lone[key] = answers
        return self._lone[key]

    def is_beginning(self, part: Answer, ids: Ids, params: Params, index: int) -> None:
        """An answer that was cut short is the beginning of the whole one."""
        whole, n = self.lone(ids, params)[index], len(part.ids)
        assert part.ids == whole.ids[:n]
        assert part.reason in ("abort", whole.reason)
        if part.scores is not None:
            assert whole.scores is not None
            assert part.scores == whole.scores[:n]
        if part.prompt_scores is not None:
            assert whole.prompt_scores is not None
            assert part.prompt_scores == whole.prompt_scores[: len(part.prompt_scores)]
        if part.reason == "abort" and n > params.get("min_tokens", 0):
            # Its text is that of a request that asked for so many tokens only.
            assert part.text == self.lone(ids, {**params, "max_tokens": n})[index].text
        elif n == 0:
            assert part.text == ""


def elsewhere(model: str, requests: Sequence[tuple[Ids, Params]], **config: Any) -> list[Any]:
    """The task of a process: requests run together with these settings."""
    house = House(model, threads=config.pop("threads", 1))
    bench = house.bench(**config)
    jobs = [bench.submit(ids, params) for ids, params in requests]
    bench.run()
    return [bench.close(job) for job in jobs]


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    for task in asked:
        for _, way in task["requests"]:
            if "logit_bias" in way:
                way["logit_bias"] = {int(i): bias for i, bias in way["logit_bias"].items()}
    json.dump([elsewhere(**task) for task in asked], sys.stdout)
