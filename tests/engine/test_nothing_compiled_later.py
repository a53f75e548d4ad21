"""Once an engine is ready, no request makes it compile anything: a soak of everything it can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seethrough import LLM
from seethrough.kernels.cpu.compiled import Kernels

PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
    {"seed": 1, "top_k": 5, "top_p": 0.8, "min_p": 0.01, "typical_p": 0.9, "temperature": 0.7},
    {"seed": 2, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    {"seed": 3, "n": 3, "logit_bias": {5: 2.0}, "logprobs": 1},
    {"seed": 4, "allowed_token_ids": [3, 4, 5, 6], "min_tokens": 2, "ignore_eos": True},
)


def test_a_soak_compiles_nothing(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(llama_dir), backend="cpu", max_model_len=128, max_num_batched_tokens=32)
    kernels = llm._engine.model.kernels
    assert kernels is not None
    before, known = list(kernels.compiled), dict(kernels._addresses)

    def refuse(self: Kernels, name: str, *args: object) -> None:
        raise AssertionError(f"kernel {name} is asked for after the engine was ready")

    monkeypatch.setattr(Kernels, "_compile", refuse)
    monkeypatch.setattr(Kernels, "_from_disk", refuse)
    rng = np.random.default_rng(0)
    for round_ in range(12):
        lengths = rng.integers(1, 100, rng.integers(1, 6))
        prompts = [{"prompt_token_ids": rng.integers(3, 200, n).tolist()} for n in lengths]
        knobs = PARAMS[round_ % len(PARAMS)]
        outputs = llm.generate(prompts, max_tokens=6, **knobs)
        assert all(len(output.outputs) == knobs.get("n", 1) for output in outputs)
    llm.trace(prompts[0], max_tokens=2, temperature=0)
    assert "".join(d.text for d in llm.stream(prompts[0], max_tokens=3, seed=1)) is not None
    assert (list(kernels.compiled), kernels._addresses) == (before, known)
