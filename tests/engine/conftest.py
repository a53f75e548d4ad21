"""Small models, opened once; after every test nothing may be left running."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from seethrough import LLM

sys.path.insert(0, str(Path(__file__).parent))

from engine_forge import Models, Rig, tiny_llama

if TYPE_CHECKING:
    from houses import Houses
    from tiny_models import TinyModels


@pytest.fixture(scope="session")
def models() -> Models:
    return Models()


@pytest.fixture(autouse=True)
def books(models: Models) -> Iterator[None]:
    yield
    models.check()


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def llm(models: Models, llama_dir: Path) -> LLM:
    return models(llama_dir, max_model_len=128)


@pytest.fixture(scope="session")
def houses(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Houses:
    """A tiny model of every family, around which a test builds the engines that it wants."""
    from houses import Houses

    return Houses(tiny, tmp_path_factory.mktemp("houses"))


@pytest.fixture(scope="session")
def rig() -> Rig:
    return Rig()


@pytest.fixture
def says(rig: Rig, models: Models, tmp_path: Path) -> Callable[..., LLM]:
    """Opens a model that says the given parts after a prompt of one token."""
    count = 0

    def build(*parts: str | bytes | int, settings: dict[str, Any] | None = None, **how: Any) -> LLM:
        nonlocal count
        count += 1
        return models(rig.write(tmp_path / f"rigged{count}", *parts, **how), **(settings or {}))

    return build
