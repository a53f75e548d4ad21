"""vLLM's side: its offline LLM class in one process, prefix caching off, no detokenizing."""

from __future__ import annotations

import os
from time import perf_counter
from typing import Any

# Both must be set before vllm is imported. In one process no engine waits in a busy loop.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")

import vllm
from serve import Setup, main

_FIRST = 4  # tokens of those that decode before the long prompt comes


class Vllm:
    """bf16, as vLLM runs on a CPU; times come from its own request statistics."""

    def __init__(self, setup: Setup) -> None:
        os.environ["OMP_NUM_THREADS"] = str(setup.threads)
        self._number = 0  # of the last workload that named its requests
        self._llm = vllm.LLM(
            setup.model,
            dtype={"bf16": "bfloat16", "f32": "float32"}[setup.dtype],
            max_model_len=setup.context,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=False,
        )
        self.about = {
            "version": f"vllm {vllm.__version__}",
            "build": f"{setup.dtype}, prefix caching off, OMP_NUM_THREADS {setup.threads}",
        }

    def tg(self, prompt: list[int], n: int) -> float:
        """First to last output token."""
        (output,) = self._generate([prompt], n + 1)
        return float(output.metrics.last_token_ts - output.metrics.first_token_ts)

    def pp(self, prompt: list[int]) -> float:
        """Wall clock of one call for one token."""
        started = perf_counter()
        self._generate([prompt], 1)
        return perf_counter() - started

    def batch(self, prompts: list[list[int]], n: int) -> float:
        """Wall clock of one call."""
        started = perf_counter()
        self._generate(prompts, n)
        return perf_counter() - started

    def beside(self, prompts: list[list[int]], prompt: list[int]) -> tuple[float, list[float]]:
        """Its engine, step by step; how it cuts the long prompt is its own default."""
        engine = self._llm.llm_engine
        self._number += 1
        names = [f"{self._number}-{i}" for i in range(len(prompts))]
        for name, ids in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": ids}, self._params(1024))
        counts = dict.fromkeys(names, 0)
        while min(counts.values()) < _FIRST:
            counts |= {o.request_id: len(o.outputs[0].token_ids) for o in engine.step()}
        started = perf_counter()
        long = f"{self._number}-long"
        engine.add_request(long, {"prompt_token_ids": prompt}, self._params(1))
        last, gaps, done = dict.fromkeys(names, started), [], False
        while not done:
            outputs = engine.step()
            now = perf_counter()
            done = any(output.request_id == long for output in outputs)
            for name in (o.request_id for o in outputs if o.request_id in last):
                gaps.append(now - last[name])
                last[name] = now
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
        return now - started, gaps

    def _params(self, n: int) -> Any:
        return vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)

    def _generate(self, prompts: list[list[int]], n: int) -> Any:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(asked, self._params(n), use_tqdm=False)
        for output in outputs:
            if len(output.outputs[0].token_ids) != n:
                raise RuntimeError(f"{len(output.outputs[0].token_ids)} tokens came, not {n}")
        return outputs


if __name__ == "__main__":
    main(Vllm)
