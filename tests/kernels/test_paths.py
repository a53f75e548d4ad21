"""The processor paths: each is checked in a process of its own, by `path_worker.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from seethrough.errors import ParameterError
from seethrough.kernels.cpu import path as paths
from seethrough.kernels.cpu.path import PATHS, best, lacking, processor_flags, use

AVX2 = {"avx2", "fma", "f16c"}
VNNI = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"}


@cache
def digests(path: str) -> dict[str, str]:
    worker = Path(__file__).parent / "path_worker.py"
    ran = subprocess.run([sys.executable, worker, path], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, str] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_right(path: paths.CPUPath) -> None:
    missing = lacking(path, processor_flags())
    if missing:
        pytest.skip(f"this processor lacks {', '.join(missing)}")
    assert len(digests(path)) == 18


def test_wide_paths_give_the_same_bits() -> None:
    """avx512 and avx2 round alike; on portable the whole-number part does."""
    missing = lacking("avx512", processor_flags())
    if missing:
        pytest.skip(f"this processor lacks {', '.join(missing)}")
    assert digests("avx512") == digests("avx2")


def test_flags_decide() -> None:
    assert best(frozenset()) == "portable"
    assert best(frozenset(AVX2)) == "avx2"
    assert best(frozenset(AVX2 - {"f16c"})) == "portable"
    assert best(frozenset(VNNI)) == "avx512"
    assert best(frozenset(VNNI - {"avx512_vnni"})) == "avx2"
    assert lacking("avx2", frozenset({"fma"})) == ("avx2", "f16c")


def test_a_processor_is_not_asked_for_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "processor_flags", lambda: frozenset({"sse2"}))
    monkeypatch.setattr(paths, "_chosen", [])
    with pytest.raises(ParameterError, match=r"cpu_path='avx2'.*lacks avx2, f16c, fma"):
        use("avx2")
    assert use() == "portable"


def test_one_process_has_one_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "processor_flags", lambda: frozenset(AVX2))
    monkeypatch.setattr(paths, "_chosen", [])
    assert use("avx2") == use() == use("avx2")
    with pytest.raises(ParameterError, match="this process already uses avx2"):
        use("portable")
