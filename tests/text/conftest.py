"""Mini tokenizers of every kind, trained once a session."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mini_tokenizers import KINDS, MAKERS, Mini


@pytest.fixture(scope="session")
def minis() -> dict[str, Mini]:
    """Every mini tokenizer by kind: ours, and the `tokenizers` object that is its oracle."""
    return {kind: MAKERS[kind]() for kind in KINDS}


@pytest.fixture(params=KINDS)
def mini(request: pytest.FixtureRequest, minis: dict[str, Mini]) -> Mini:
    return minis[request.param]


@pytest.fixture(scope="session")
def default_model_metadata(default_model: str) -> dict[str, Any]:
    """The default model's metadata."""
    from seethrough.weights.files import resolve_model
    from seethrough.weights.gguf.reader import open_gguf

    return dict(open_gguf(resolve_model(default_model).weights[0]).metadata)
