"""What `bench` calls a limit, against hand-counted bytes and operations."""

from __future__ import annotations

import pytest

from seethrough import LLM
from seethrough.engine import measure
from seethrough.engine.measure import Limits


@pytest.fixture
def fixed_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 GB/s of reading, 1 GFLOP/s of multiplying."""
    monkeypatch.setattr(measure, "read_bandwidth", lambda nbytes, threads: 1e9)
    monkeypatch.setattr(measure, "multiply_rate", lambda threads: 1e9)


def test_limits_count_what_a_token_needs(fixed_machine: None, llm: LLM) -> None:
    spec = llm.spec
    d, v = spec.d_model, spec.vocab_size
    layer = d * spec.q_size * 2 + d * spec.kv_size * 2 + 3 * d * spec.d_ff
    norms = (2 * spec.n_layers + 1) * d
    found = measure.limits(llm.weights, threads=2, backend="reference")
    assert found == Limits(
        read_gb_s=1.0,
        gflop_s=1.0,
        # Every layer, every norm and the head, four bytes a weight; the embedding picks one row.
        tg_tok_s=pytest.approx(1e9 / (4 * (spec.n_layers * layer + norms + v * d))),
        # Two operations for each weight of the layers; the head runs once for a whole prompt.
        pp_tok_s=pytest.approx(1e9 / (2 * spec.n_layers * layer)),
    )


def test_figures_are_the_engines_own(
    fixed_machine: None, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_BATCH_PROMPT", 12)  # the tiny model's context holds 128
    monkeypatch.setattr(measure, "_BATCH_OUTPUT", 4)
    found = measure.limits(llm.weights, threads=1, backend="cpu")
    figures = measure.measure(llm, found, pp=20, tg=4, batch=1, depth=3, repeats=1)
    assert figures.pp_tok_s == pytest.approx(20 / figures.ttft_ms * 1e3)
    assert figures.tg_share == pytest.approx(figures.tg_tok_s / found.tg_tok_s)
    assert figures.pp_share == pytest.approx(figures.pp_tok_s / found.pp_tok_s)


def test_the_machine_has_a_bandwidth_and_a_peak() -> None:
    assert measure.read_bandwidth(1 << 22, threads=2, repeats=2) > 1e8
    assert measure.multiply_rate(threads=1, repeats=1) > 1e8
