"""A model's files to named tensors and config. Knows both formats, and no architecture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from seethrough.errors import WeightFormatError
from seethrough.weights.files import ModelFiles
from seethrough.weights.gguf.metadata import Value
from seethrough.weights.gguf.reader import open_gguf
from seethrough.weights.safetensors import open_index, open_safetensors
from seethrough.weights.strict_json import read_object
from seethrough.weights.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that the files say. Safetensors: `config` and `generation_config`; GGUF: `metadata`."""

    format: Literal["gguf", "safetensors"]
    name: str
    root: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    metadata: dict[str, Value]
    tensors: dict[str, Tensor]
    unsupported: dict[str, str]  # tensor name -> type that is not read

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    """Open what `resolve_model` found; nothing is copied, tensors are views of memory maps."""
    if files.format == "gguf":
        return _open_gguf(files)
    config = read_object(files.root / "config.json", "config.json")
    generation_path = files.root / "generation_config.json"
    generation: dict[str, Any] = {}
    if generation_path.exists():
        generation = read_object(generation_path, "generation_config.json")
    if files.index is not None:
        opened = open_index(files.index)
    else:
        (path,) = files.weights
        opened = open_safetensors(path)
    return Checkpoint(
        format="safetensors",
        name=files.name,
        root=files.root,
        config=config,
        generation_config=generation,
        metadata={},
        tensors=opened.tensors,
        unsupported=opened.unsupported,
    )


def _open_gguf(files: ModelFiles) -> Checkpoint:
    (path,) = files.weights
    opened = open_gguf(path)
    parts = opened.metadata.get("split.count", 0)
    if parts not in (0, 1):
        raise WeightFormatError(
            path,
            f"is one of {parts} parts of a split GGUF file. Join the parts with "
            "`llama-gguf-split --merge`.",
        )
    return Checkpoint(
        format="gguf",
        name=files.name,
        root=files.root,
        config={},
        generation_config={},
        metadata=opened.metadata,
        tensors=opened.tensors,
        unsupported={},
    )
