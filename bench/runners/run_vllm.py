"""vLLM's side: its offline LLM class in one process, prefix caching off, no detokenizing."""

from __future__ import annotations

import os
from time import perf_counter
from typing import Any

# Both must be set before vllm is imported. In one process no engine waits in a busy loop.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")

import vllm
from serve import Setup, Step, main
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext


class Vllm:
    """bf16, as vLLM runs on a CPU; times come from its own request statistics.

    Requests that join while others run go to the engine below `LLM`, in the same process. A step
    then computes no more tokens than vLLM's server has by default: `LLM` alone has twice as many,
    and a long prompt would be one step.
    """

    def __init__(self, setup: Setup) -> None:
        os.environ["OMP_NUM_THREADS"] = str(setup.threads)
        tokens = None
        if setup.beside:
            tokens = EngineArgs.get_batch_defaults(1)[0][UsageContext.OPENAI_API_SERVER]
        self._llm = vllm.LLM(
            setup.model,
            dtype={"bf16": "bfloat16", "f32": "float32"}[setup.dtype],
            max_model_len=setup.context,
            max_num_batched_tokens=tokens,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=False,
        )
        self._series = 0
        self._open: list[str] = []
        scheduler = self._llm.llm_engine.vllm_config.scheduler_config
        self.about = {
            "version": f"vllm {vllm.__version__}",
            "build": f"{setup.dtype}, prefix caching off, OMP_NUM_THREADS {setup.threads}, "
            f"max_num_batched_tokens {scheduler.max_num_batched_tokens}, "
            f"async_scheduling {scheduler.async_scheduling}",
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

    def add(self, name: int, prompt: list[int], n: int) -> None:
        """Queue a request; its outputs bring the new tokens only."""
        params = self._params(n, RequestOutputKind.DELTA)
        self._open.append(f"{self._series}-{name}")  # an id that was aborted is not used again
        self._llm.llm_engine.add_request(self._open[-1], {"prompt_token_ids": prompt}, params)

    def step(self) -> Step:
        """A step of the engine."""
        came: list[int] = []
        for output in self._llm.llm_engine.step():
            name = int(output.request_id.partition("-")[2])
            came += [name] * len(output.outputs[0].token_ids)
        return Step(came)

    def drop(self) -> None:
        """Abort all requests."""
        engine = self._llm.llm_engine
        engine.abort_request(self._open)
        while engine.has_unfinished_requests():
            engine.step()
        self._open.clear()
        self._series += 1

    def _params(self, n: int, kind: RequestOutputKind) -> vllm.SamplingParams:
        return vllm.SamplingParams(
            temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, output_kind=kind
        )

    def _generate(self, prompts: list[list[int]], n: int) -> Any:
        params = self._params(n, RequestOutputKind.FINAL_ONLY)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        for output in outputs:
            if len(output.outputs[0].token_ids) != n:
                raise RuntimeError(f"{len(output.outputs[0].token_ids)} tokens came, not {n}")
        return outputs


if __name__ == "__main__":
    main(Vllm)
