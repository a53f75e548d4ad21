"""Fixtures that more than one area needs: the tiny random models, and the default model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent / "model"))

if TYPE_CHECKING:
    from tiny_models import TinyModels


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Tiny random models of every family, each built once, as transformers saves them."""
    from tiny_models import TinyModels

    return TinyModels(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def default_model() -> str:
    """The name of the default model, fetched into the cache if it is not there."""
    from seethrough.weights.catalog import DEFAULT_MODEL
    from seethrough.weights.pull import pull

    return pull(DEFAULT_MODEL).name
