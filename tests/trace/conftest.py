"""Small models of several kinds, opened once; after every test nothing may be left running."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from seethrough import LLM

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))

from engine_forge import Models, tiny_model
from traced_kinds import KINDS


@pytest.fixture(scope="session")
def models() -> Models:
    return Models()


@pytest.fixture(autouse=True)
def books(models: Models) -> Iterator[None]:
    yield
    models.check()


@pytest.fixture(scope="session")
def open_kind(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    folders: dict[str, Path] = {}

    def opened(kind: str, **settings: Any) -> LLM:
        if kind not in folders:
            model_type, more = KINDS[kind]
            folders[kind] = tiny_model(tmp_path_factory.mktemp(kind), model_type, **more)
        return models(folders[kind], **({"max_model_len": 128} | settings))

    return opened


@pytest.fixture(scope="session")
def llm(open_kind: Callable[..., LLM]) -> LLM:
    return open_kind("llama")
