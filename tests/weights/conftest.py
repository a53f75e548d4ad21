"""Makes the forge importable by the tests beside it and adds the fuzz options."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seed", type=int, default=None, help="seed of the file fuzz tests")
    parser.addoption("--fuzz-files", type=int, default=None, help="number of files to fuzz")
