"""The workloads, and the arithmetic of a comparison: medians, and ratios of paired runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Kind = Literal["tg", "pp", "batch", "beside", "start"]
KINDS: tuple[Kind, ...] = ("tg", "pp", "batch", "beside", "start")
START_PROMPT = 8
# A request that decodes beside a long prompt: its own prompt, and output enough for any chunks.
DECODING_PROMPT = 32
DECODING_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of work at one size.

    Attributes:
        prompt: tokens of a prompt (for `tg`: the depth that decoding starts at; for `beside`: the
            long prompt that arrives).
        n: output tokens of a request.
        requests: how many at once (for `beside`: how many decode when the prompt arrives).
    """

    kind: Kind
    prompt: int
    n: int = 1
    requests: int = 1

    @property
    def name(self) -> str:
        """As it stands in the table."""
        return {
            "tg": f"tg{self.n} at depth {self.prompt}",
            "pp": f"pp{self.prompt}",
            "batch": f"batch {self.requests} ({self.prompt} in, {self.n} out)",
            "beside": f"{self.requests} decode beside a prompt of {self.prompt}",
            "start": f"start to first token of {self.prompt}",
        }[self.kind]

    @property
    def tokens(self) -> int | None:
        """What a rate counts; None where seconds are the figure."""
        counted = {"tg": self.n, "pp": self.prompt, "batch": self.requests * self.n}
        return counted.get(self.kind)

    @property
    def length(self) -> int:
        """The context that one request needs."""
        longest = self.prompt + self.n + 1
        return max(longest, self.decoding_length) if self.kind == "beside" else longest

    @property
    def decoding_length(self) -> int:
        """The context that a request needs which decodes beside a long prompt."""
        return DECODING_PROMPT + self._decoding_tokens + 1

    @property
    def _decoding_tokens(self) -> int:
        """A step computes at least a token of the prompt, so this many are enough for a short one.

        A few come before and after it.
        """
        return min(DECODING_TOKENS, self.prompt + 16)

    def ask(self, seed: int, vocab: int) -> dict[str, Any]:
        """What a runner is sent. Ids are random: no prompt is known from an earlier round."""
        rng = np.random.default_rng((seed, self.prompt))
        if self.kind == "beside":
            return {
                "work": "beside",
                "prompts": rng.integers(0, vocab, (self.requests, DECODING_PROMPT)).tolist(),
                "n": self._decoding_tokens,
                "prompt": rng.integers(0, vocab, self.prompt).tolist(),
            }
        prompts: list[list[int]] = rng.integers(0, vocab, (self.requests, self.prompt)).tolist()
        if self.kind == "batch":
            return {"work": "batch", "prompts": prompts, "n": self.n}
        if self.kind == "tg":
            return {"work": "tg", "prompt": prompts[0], "n": self.n}
        return {"work": "pp", "prompt": prompts[0]}

    def figure(self, seconds: float) -> str:
        """Seconds as a rate or as they are."""
        return f"{seconds:.3f} s" if self.tokens is None else f"{self.tokens / seconds:.1f} tok/s"


@dataclass(frozen=True, slots=True)
class Pair:
    """Ours against one peer: how many times faster ours is. Above 1, ours is the faster one.

    Attributes:
        ratio: of the two medians.
        low, high: least and greatest ratio of two runs of the same round.
    """

    ratio: float
    low: float
    high: float


def pair(ours: Sequence[float], peer: Sequence[float]) -> Pair:
    """Compare seconds; the runs of one round stand at the same index."""
    each = [theirs / our for our, theirs in zip(ours, peer, strict=True)]
    return Pair(statistics.median(peer) / statistics.median(ours), min(each), max(each))


def choose(
    kinds: Sequence[Kind],
    *,
    context: int,
    tg: int,
    depths: Sequence[int],
    pp: Sequence[int],
    batch: tuple[Sequence[int], int, int],
    beside: tuple[int, int] = (8, 4000),
) -> list[Workload]:
    """The workloads that were asked for; what exceeds the model's context becomes what just fits.

    `batch` is (numbers of requests, tokens in, tokens out): each number is a workload. `beside`
    is (requests that decode, tokens of the prompt that arrives).
    """
    found: list[Workload] = []
    for kind in kinds:
        if kind == "tg":
            found += [Workload("tg", min(depth, context - tg - 1), tg) for depth in depths]
        elif kind == "pp":
            found += [Workload("pp", min(length, context - 2)) for length in pp]
        elif kind == "batch":
            numbers, prompt, n = batch
            found += [Workload("batch", prompt, n, requests) for requests in numbers]
        elif kind == "beside":
            decoding, prompt = beside
            found.append(Workload("beside", min(prompt, context - 2), 1, decoding))
        else:
            found.append(Workload("start", START_PROMPT))
    for work in found:
        if work.prompt < 1 or work.length > context:
            raise ValueError(f"{work.name} does not fit the model's context of {context}")
    return list(dict.fromkeys(found))
