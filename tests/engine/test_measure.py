"""What `bench` calls a limit, against hand-counted bytes and operations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_forge import Models

from seethrough.config import BACKENDS
from seethrough.engine import measure
from seethrough.engine.load import kernel_dir
from seethrough.engine.measure import Limits
from seethrough.kernels.cpu import ceiling
from seethrough.kernels.cpu.compiled import Kernels


@pytest.fixture
def fixed_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 GB/s of reading, 1 GOP/s of multiplying."""
    monkeypatch.setattr(measure, "read_bandwidth", lambda nbytes, threads: 1e9)
    monkeypatch.setattr(measure, "_rate", lambda dtype, setup: 1e9)


@pytest.mark.parametrize("depth", [0, 100])
def test_limits_count_what_a_token_needs(
    fixed_machine: None, models: Models, llama_dir: Path, depth: int
) -> None:
    llm = models(llama_dir, backend="reference")
    spec = llm.spec
    d, v = spec.d_model, spec.vocab_size
    layer = d * spec.q_size * 2 + d * spec.kv_size * 2 + 3 * d * spec.d_ff
    norms = (2 * spec.n_layers + 1) * d
    cache = depth * 2 * spec.n_layers * spec.kv_size * 4
    found = measure.limits(llm.weights, llm.report, depth, prompt=9)
    attention = 4 * spec.q_size * spec.n_layers * sum(range(1, 10))
    assert found == Limits(
        read_gb_s=1.0,
        gop_s=pytest.approx(1.0),
        # Every layer, every norm and the head, four bytes a weight; the embedding picks one row.
        tg_tok_s=pytest.approx(1e9 / (4 * (spec.n_layers * layer + norms + v * d) + cache)),
        # Two operations for each weight of the layers; the head runs once for a whole prompt.
        # Attention: two products and two sums for every value of every key that a row sees.
        pp_tok_s=pytest.approx(1e9 / (2 * spec.n_layers * layer + attention / 9)),
    )


@pytest.mark.parametrize("prompt", [1, 3, 4, 9])
def test_a_window_sees_less(models: Models, llama_dir: Path, prompt: int) -> None:
    spec = models(llama_dir, backend="reference").spec
    layers = (replace(spec.layers[0], window=4), *spec.layers[1:])
    rows = range(prompt)
    seen = sum(min(4, row + 1) for row in rows)
    seen += (spec.n_layers - 1) * sum(row + 1 for row in rows)
    found = measure.attention_operations(replace(spec, layers=layers), prompt)
    assert found == 4 * spec.q_size * seen


@pytest.mark.parametrize("backend", BACKENDS)
def test_figures_are_the_engines_own(
    fixed_machine: None,
    models: Models,
    llama_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
) -> None:
    monkeypatch.setattr(measure, "_BATCH_PROMPT", 12)  # the tiny model's context holds 128
    monkeypatch.setattr(measure, "_BATCH_OUTPUT", 4)
    llm = models(llama_dir, backend=backend)
    found = measure.limits(llm.weights, llm.report, 5, prompt=20)
    figures = measure.measure(llm, found, pp=20, tg=4, batch=1, depth=3, repeats=1)
    assert figures.pp_tok_s == pytest.approx(20 / figures.ttft_ms * 1e3)
    assert figures.tg_share == pytest.approx(figures.tg_tok_s / found.tg_tok_s)
    assert figures.pp_share == pytest.approx(figures.pp_tok_s / found.pp_tok_s)
    for stages in (figures.tg_stages, figures.pp_stages):
        assert {"S4", "S6.1", "S6.5", "S6.7", "S9", "loop"} <= stages.keys()
        assert sum(stages.values()) == pytest.approx(100, abs=1)
    assert llm._engine.model.stage_seconds is None


def test_the_ceiling_is_above_what_a_product_reaches() -> None:
    rate = ceiling.multiply_rate("Q4_1", Kernels(kernel_dir()), threads=1, repeats=2)
    assert rate > 1e9


def test_the_machine_has_a_bandwidth_and_a_peak() -> None:
    assert measure.read_bandwidth(1 << 22, threads=2, repeats=2) > 1e8
    assert measure.multiply_rate(threads=1, repeats=1) > 1e8
