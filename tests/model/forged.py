"""Checkpoints that are changed in one place: config, tensors, or the file itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tiny_models import TinyModel

from seethrough.errors import CheckpointError, UnsupportedModelError
from seethrough.model.load import understand
from seethrough.weights import tensor as stored
from seethrough.weights.checkpoint import Checkpoint, open_checkpoint
from seethrough.weights.files import resolve_model
from seethrough.weights.tensor import Tensor

Json = dict[str, Any]


def zeros(name: str, shape: tuple[int, ...], dtype: stored.DType = stored.F32) -> Tensor:
    return Tensor(name, dtype, shape, np.zeros(dtype.nbytes(shape), dtype=np.uint8))


def opened(model: TinyModel) -> Checkpoint:
    return open_checkpoint(resolve_model(str(model.folder)))


def with_config(checkpoint: Checkpoint, **config: Any) -> Checkpoint:
    return replace(checkpoint, config=checkpoint.config | config)


def with_tensors(checkpoint: Checkpoint, *tensors: Tensor) -> Checkpoint:
    return replace(checkpoint, tensors=checkpoint.tensors | {t.name: t for t in tensors})


def rewritten(model: TinyModel, folder: Path, change: Callable[[dict[str, Any]], Any]) -> TinyModel:
    """A copy of the folder with its tensors changed."""
    shutil.copytree(model.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return TinyModel(folder)


def refused(checkpoint: Checkpoint, *words: str) -> None:
    """Refused with an error of ours that holds every word."""
    with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
        understand(checkpoint)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert len(message) < 1000
