"""Thousands of mutated files: each is read as the packages read it, or refused with a typed error.

Opening a file must also stay within 1 s and 100 MB. Options: --fuzz-seed, --fuzz-files.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SEED, FILES, NIGHTLY_FILES, BATCH = 20261201, 2_000, 20_000, 500


def run_batch(seed: int, first: int, count: int, folder: Path) -> Counter[str]:
    command = [sys.executable, str(Path(__file__).with_name("fuzz_worker.py"))]
    command += [*map(str, (seed, first, count)), str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"seed {seed}: hangs after {(error.stdout or b'')[-300:]!r}")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode != 0:
        pytest.fail(f"seed {seed}, file in {folder}: {lines[-1:]} then {done.stderr[-1500:]}")
    results = [line for line in lines if "done" in line]
    assert len(results) == count
    for result in results:
        assert result["seconds"] < 1, (seed, result)
        assert result["mb"] < 100, (seed, result)
    return Counter(result["outcome"].partition(":")[0] for result in results)


def run_fuzz(request: pytest.FixtureRequest, folder: Path, files: int) -> None:
    seed = request.config.getoption("--fuzz-seed", default=None) or SEED
    files = request.config.getoption("--fuzz-files", default=None) or files
    print(f"file fuzz: seed {seed}, {files} files")
    outcomes: Counter[str] = Counter()
    for first in range(0, files, BATCH):
        outcomes += run_batch(seed, first, min(BATCH, files - first), folder)
    print(dict(outcomes))
    assert outcomes.total() == files
    if files >= BATCH:  # both ways are really taken
        assert outcomes["accepted"] > files // 10
        assert outcomes["refused"] > files // 4


def test_mutated_files(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    run_fuzz(request, tmp_path, FILES)


@pytest.mark.nightly
def test_many_mutated_files(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    run_fuzz(request, tmp_path, NIGHTLY_FILES)
