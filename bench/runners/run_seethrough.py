"""seethrough's side of the comparison: its public API, its own metrics."""

from __future__ import annotations

from importlib.metadata import version
from itertools import pairwise
from time import perf_counter
from typing import Any

from serve import Setup, main

from seethrough import LLM

_BLOCK = 16
_BESIDE = 16 * 1024
_FIRST = 4  # tokens of those that decode before the long prompt comes


class Seethrough:
    """`LLM.generate`, with tokenizing left out (the prompt is ids) and everything else in."""

    def __init__(self, setup: Setup) -> None:
        # Cache for the longest request or for the whole batch, as the other engines get it, and for
        # those that decode beside a long prompt.
        tokens = max(setup.context, setup.requests * (setup.request_tokens + _BLOCK)) + _BESIDE
        self.llm = LLM(
            setup.model,
            threads=setup.threads,
            max_model_len=setup.context,
            block_size=_BLOCK,
            num_kv_blocks=-(-tokens // _BLOCK),
            enable_prefix_caching=False,  # as the other engines
        )
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

    def beside(self, prompts: list[list[int]], prompt: list[int]) -> tuple[float, list[float]]:
        """Streams that run as one batch; each piece has come when its step is over."""
        ask = {"temperature": 0, "ignore_eos": True}
        streams = [self.llm.stream({"prompt_token_ids": ids}, **ask) for ids in prompts]
        try:
            for _ in range(_FIRST):
                for stream in streams:
                    next(stream)
            started = perf_counter()
            long = self.llm.stream({"prompt_token_ids": prompt}, **(ask | {"max_tokens": 1}))
            first = long.output().metrics
            times = [started]
            while first.ttft_ms is None:
                for stream in streams:
                    next(stream)
                times.append(perf_counter())
                first = long.output().metrics
            gaps = [b - a for a, b in pairwise(times) for _ in streams]
            return first.ttft_ms / 1e3, gaps
        finally:
            for stream in streams:
                stream.close()

    def _generate(self, prompts: list[list[int]], n: int) -> list[Any]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(asked, temperature=0, ignore_eos=True, max_tokens=n)
        for output in outputs:
            if output.metrics.completion_tokens != n:
                raise RuntimeError(f"{output.metrics.completion_tokens} tokens came, not {n}")
        return outputs


if __name__ == "__main__":
    main(Seethrough)
