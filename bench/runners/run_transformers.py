"""transformers' side: the model's forward with its own cache, in a plain greedy loop.

`generate` is not used: it adds Python to every token that a user can avoid. The prompt's logits are
asked for the last position only.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
import transformers
from serve import Setup, main

_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


class Transformers:
    """AutoModelForCausalLM on the CPU, attention as transformers chooses it."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        dtype = _DTYPES[setup.dtype]
        self._model = transformers.AutoModelForCausalLM.from_pretrained(setup.model, dtype=dtype)
        self._model.eval()
        self.about = {
            "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "build": f"{setup.dtype}, {self._model.config._attn_implementation} attention, "
            f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        }

    def tg(self, prompt: list[int], n: int) -> float:
        """Seconds of n decode steps after the prompt's own token."""
        with torch.inference_mode():
            token, cache = self._prefill([prompt])
            started = perf_counter()
            self._decode(token, cache, n)
            return perf_counter() - started

    def pp(self, prompt: list[int]) -> float:
        """Seconds from the prompt to its first token."""
        with torch.inference_mode():
            started = perf_counter()
            self._prefill([prompt])
            return perf_counter() - started

    def batch(self, prompts: list[list[int]], n: int) -> float:
        """Seconds for all prompts, which have one length, and n output tokens of each."""
        with torch.inference_mode():
            started = perf_counter()
            token, cache = self._prefill(prompts)
            self._decode(token, cache, n - 1)
            return perf_counter() - started

    def _prefill(self, prompts: list[list[int]]) -> tuple[torch.Tensor, Any]:
        ids = torch.tensor(prompts)
        output = self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1:].argmax(-1), output.past_key_values

    def _decode(self, token: torch.Tensor, cache: Any, steps: int) -> None:
        for _ in range(steps):
            output = self._model(input_ids=token, past_key_values=cache, use_cache=True)
            token = output.logits[:, -1:].argmax(-1)
        token.tolist()


if __name__ == "__main__":
    main(Transformers)
