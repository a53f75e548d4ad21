"""The distance to float32 arithmetic: the divergence itself, and the way through both engines."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from seethrough.weights.files import resolve_model

BENCH = Path(__file__).parents[2] / "bench"
UNIFORM = """
import sys
import numpy as np
sys.path.insert(0, {runners!r})
from serve import main

class Uniform:
    about = {{}}
    def __init__(self, setup):
        pass
    def tg(self, prompt, n): return 0.0
    def pp(self, prompt): return 0.0
    def batch(self, prompts, n): return 0.0
    def logits(self, prompt, path):
        np.save(path, np.zeros((len(prompt), 49152), dtype=np.float32))
        return 0.0

main(Uniform)
"""


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("quality")


def test_the_divergence_is_torchs(quality: ModuleType) -> None:
    rng = np.random.default_rng(0)
    p, q = (rng.normal(0, 4, (5, 300)).astype(np.float32) for _ in range(2))
    ours = quality.divergence(p, q)
    log_p, log_q = (torch.tensor(x, dtype=torch.float64).log_softmax(1) for x in (p, q))
    wanted = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)
    np.testing.assert_allclose(ours, wanted.numpy(), rtol=1e-12)
    assert quality.divergence(p, p + 7).max() < 1e-12


def test_the_difference_is_paired(quality: ModuleType) -> None:
    ours, peer = np.array([1.0, 2.0, 6.0]), np.array([2.0, 2.0, 2.0])
    found = quality.summed_up("q4_1", ours, peer)
    assert (found.ours, found.peer, found.difference, found.ratio) == (3, 2, 1, 1.5)
    # Differences -1, 0, 4: their standard deviation is sqrt(7), over sqrt(3).
    assert found.standard_error == pytest.approx(math.sqrt(7 / 3))


def test_both_engines_see_the_same_positions(
    quality: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default_model: str
) -> None:
    """A peer that knows nothing is far away, and ours is near."""
    (tmp_path / "run_llama.py").write_text(UNIFORM.format(runners=str(BENCH / "runners")))
    monkeypatch.setattr(quality, "RUNNERS", tmp_path)
    monkeypatch.setattr(quality, "python_of", lambda name, peers: sys.executable)
    monkeypatch.setattr(quality, "_WINDOW", 32)
    file = resolve_model(default_model).weights[0]
    found = quality.compare("q4_1", file, tmp_path, tmp_path, 90)
    assert found.tokens == 64  # whole windows only
    assert 1e-6 < found.ours < 0.1
    assert found.peer > 2
    assert found.difference == pytest.approx(found.ours - found.peer)


def test_a_peer_that_is_not_there_is_named(
    quality: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        quality.main(["--peers-dir", str(tmp_path)])
    assert "llama.cpp" in capsys.readouterr().err
