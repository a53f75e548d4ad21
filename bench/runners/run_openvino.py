"""OpenVINO GenAI's side: its LLMPipeline on the GGUF file itself, and its own metrics."""

from __future__ import annotations

from itertools import count
from time import perf_counter
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from serve import Setup, Step, main


class OpenVino:
    """LLMPipeline on CPU. Prefix caching is off: it is off unless asked for.

    Requests that join while others run go to a ContinuousBatchingPipeline over the same file, with
    OpenVINO's own SchedulerConfig. It is loaded when it is first asked for.
    """

    def __init__(self, setup: Setup) -> None:
        self._model, self._settings = setup.model, {"INFERENCE_NUM_THREADS": setup.threads}
        self._pipe = genai.LLMPipeline(setup.model, "CPU", **self._settings)
        self._batching: Any = None
        self._ids = count()
        self._handles: dict[int, Any] = {}
        self.about = {
            "version": f"openvino-genai {genai.__version__}",
            "build": f"LLMPipeline defaults, INFERENCE_NUM_THREADS {setup.threads}, where requests "
            f"join {genai.SchedulerConfig().max_num_batched_tokens} tokens a step",
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

    def add(self, name: int, prompt: list[int], n: int) -> None:
        """Queue a request."""
        if self._batching is None:
            self._batching = genai.ContinuousBatchingPipeline(
                self._model, genai.SchedulerConfig(), "CPU", self._settings
            )
        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        self._handles[name] = self._batching.add_request(next(self._ids), ids, _config(n))

    def step(self) -> Step:
        """A step of the pipeline, and the tokens that each request then has to read."""
        self._batching.step()
        came: list[int] = []
        for name, handle in self._handles.items():
            while handle.can_read():
                for output in handle.read().values():
                    came += [name] * len(output.generated_ids)
        return Step(came)

    def drop(self) -> None:
        """Cancel all requests."""
        for handle in self._handles.values():
            handle.cancel()
        while self._batching is not None and self._batching.has_non_finished_requests():
            self._batching.step()
        self._handles.clear()

    def _generate(self, prompts: list[list[int]], n: int) -> Any:
        config = _config(n)
        ids = ov.Tensor(np.array(prompts, dtype=np.int64))
        mask = ov.Tensor(np.ones((len(prompts), len(prompts[0])), dtype=np.int64))
        result = self._pipe.generate(genai.TokenizedInputs(ids, mask), config)
        for tokens in result.tokens:
            if len(tokens) != n:
                raise RuntimeError(f"{len(tokens)} tokens came, not {n}")
        return result.perf_metrics


def _config(n: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = n, True, False
    return config


if __name__ == "__main__":
    main(OpenVino)
