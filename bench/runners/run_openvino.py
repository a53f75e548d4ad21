"""OpenVINO GenAI's side: its LLMPipeline on the GGUF file itself, and its own metrics."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from serve import Setup, main

_CACHE_GB = 2
_FIRST = 4  # tokens of those that decode before the long prompt comes


class OpenVino:
    """LLMPipeline on CPU. Prefix caching is off: it is off unless asked for."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._batching: Any = None  # the pipeline that can add requests while others run
        self._number = 0
        settings = {"INFERENCE_NUM_THREADS": setup.threads}
        self._pipe = genai.LLMPipeline(setup.model, "CPU", **settings)
        self.about = {
            "version": f"openvino-genai {genai.__version__}",
            "build": f"LLMPipeline defaults, INFERENCE_NUM_THREADS {setup.threads}",
        }

    def tg(self, prompt: list[int], n: int) -> float:
        """The pipeline's own time per output token, which leaves the first token out."""
        metrics = self._generate([prompt], n + 1)
        return float(metrics.get_tpot().mean) * n / 1e3

    def pp(self, prompt: list[int]) -> float:
        """The pipeline's own time to first token."""
        return float(self._generate([prompt], 1).get_ttft().mean) / 1e3

    def batch(self, prompts: list[list[int]], n: int) -> float:
        """Wall clock of one call."""
        started = perf_counter()
        self._generate(prompts, n)
        return perf_counter() - started

    def beside(self, prompts: list[list[int]], prompt: list[int]) -> tuple[float, list[float]]:
        """Its continuous batching pipeline, step by step, with its scheduler's defaults."""
        if self._batching is None:
            scheduler = genai.SchedulerConfig()
            scheduler.cache_size = _CACHE_GB
            self._batching = genai.ContinuousBatchingPipeline(
                self._setup.model,
                scheduler,
                "CPU",
                {"INFERENCE_NUM_THREADS": self._setup.threads},
            )
        pipe = self._batching
        streams = [self._add(pipe, ids, 1024) for ids in prompts]
        for _ in range(_FIRST):
            pipe.step()
        started = perf_counter()
        long = self._add(pipe, prompt, 1)
        for stream in streams:
            while stream.can_read():
                stream.read()
        last, gaps = [started] * len(streams), []
        while not long.can_read():
            pipe.step()
            now = perf_counter()
            for i, stream in enumerate(streams):
                while stream.can_read():
                    stream.read()
                    gaps.append(now - last[i])
                    last[i] = now
        for stream in streams:
            stream.cancel()
        while pipe.has_non_finished_requests():
            pipe.step()
        return now - started, gaps

    def _add(self, pipe: Any, ids: list[int], n: int) -> Any:
        self._number += 1
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = n, True, False
        return pipe.add_request(self._number, ov.Tensor(np.array([ids], dtype=np.int64)), config)

    def _generate(self, prompts: list[list[int]], n: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = n, True, False
        ids = ov.Tensor(np.array(prompts, dtype=np.int64))
        mask = ov.Tensor(np.ones((len(prompts), len(prompts[0])), dtype=np.int64))
        result = self._pipe.generate(genai.TokenizedInputs(ids, mask), config)
        for tokens in result.tokens:
            if len(tokens) != n:
                raise RuntimeError(f"{len(tokens)} tokens came, not {n}")
        return result.perf_metrics


if __name__ == "__main__":
    main(OpenVino)
