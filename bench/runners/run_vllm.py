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


class Vllm:
    """bf16, as vLLM runs on a CPU; times come from its own request statistics."""

    def __init__(self, setup: Setup) -> None:
        os.environ["OMP_NUM_THREADS"] = str(setup.threads)
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

    def _generate(self, prompts: list[list[int]], n: int) -> Any:
        params = vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        for output in outputs:
            if len(output.outputs[0].token_ids) != n:
                raise RuntimeError(f"{len(output.outputs[0].token_ids)} tokens came, not {n}")
        return outputs


if __name__ == "__main__":
    main(Vllm)
