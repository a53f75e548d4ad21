"""seethrough's side of the comparison: its public API, its own metrics."""

from __future__ import annotations

from importlib.metadata import version
from time import perf_counter
from typing import Any

from serve import Setup, Step, main

from seethrough import LLM
from seethrough.llm import Stream

_BLOCK = 16


class Seethrough:
    """`LLM.generate`, with tokenizing left out (the prompt is ids) and everything else in.

    Requests that join while others run are streams: whoever asks for its next token has the step
    run that brings everybody theirs.
    """

    def __init__(self, setup: Setup) -> None:
        # Cache for the longest request beside those that decode, or for the whole batch, as the
        # other engines get it.
        tokens = max(
            setup.context + setup.beside * (setup.beside_tokens + _BLOCK),
            setup.requests * (setup.request_tokens + _BLOCK),
        )
        self.llm = LLM(
            setup.model,
            threads=setup.threads,
            max_model_len=setup.context,
            block_size=_BLOCK,
            num_kv_blocks=-(-tokens // _BLOCK),
            enable_prefix_caching=False,  # as the other engines
        )
        self._streams: dict[int, Stream] = {}
        self._taken: dict[int, int] = {}
        report = self.llm.report
        self.about = {
            "version": version("seethrough"),
            "build": f"backend {report.backend}, KV {report.kv_dtype}, {report.threads} threads",
        }

    def tg(self, prompt: list[int], n: int) -> float:
        """The engine's own time per output token, which leaves the first token out."""
        (output,) = self._generate([prompt], n + 1)
        assert output.metrics.tpot_ms is not None
        return output.metrics.tpot_ms * n / 1e3

    def pp(self, prompt: list[int]) -> float:
        """The engine's own time to the first token's text."""
        (output,) = self._generate([prompt], 1)
        assert output.metrics.ttft_ms is not None
        return output.metrics.ttft_ms / 1e3

    def batch(self, prompts: list[list[int]], n: int) -> float:
        """Wall clock of one call."""
        started = perf_counter()
        self._generate(prompts, n)
        return perf_counter() - started

    def add(self, name: int, prompt: list[int], n: int) -> None:
        """Open a stream."""
        asked = {"prompt_token_ids": prompt}
        self._streams[name] = self.llm.stream(asked, temperature=0, ignore_eos=True, max_tokens=n)
        self._taken[name] = 0

    def step(self) -> Step:
        """Take the next token of the first stream, and what the same step gave to the others.

        Raises RuntimeError where that was more than one step: times would not be those of steps.
        """
        before = self.llm.state.counted.steps
        came = [self._take(0)]
        for name, stream in self._streams.items():
            while self._taken[name] < stream.output().metrics.completion_tokens:
                came.append(self._take(name))
        counted = self.llm.state.counted
        if counted.steps != before + 1:
            raise RuntimeError(f"{counted.steps - before} steps ran for one token")
        return Step(came, counted.step_tokens)

    def drop(self) -> None:
        """Close all streams."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def _take(self, name: int) -> int:
        self._taken[name] += len(next(self._streams[name]).token_ids)
        return name

    def _generate(self, prompts: list[list[int]], n: int) -> list[Any]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(asked, temperature=0, ignore_eos=True, max_tokens=n)
        for output in outputs:
            if output.metrics.completion_tokens != n:
                raise RuntimeError(f"{output.metrics.completion_tokens} tokens came, not {n}")
        return outputs


if __name__ == "__main__":
    main(Seethrough)
