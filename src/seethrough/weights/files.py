"""A model's name to its files on this machine. Fetches nothing and knows no architecture."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from seethrough.errors import ModelNotFoundError, SeethroughError, WeightFormatError
from seethrough.weights.catalog import (
    PACKAGED,
    HubModel,
    default_cache_dir,
    parse_name,
    shown,
)
from seethrough.weights.safetensors import read_index

INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies. `weights`: the files with tensors; `index`: what places them, if any."""

    name: str
    root: Path
    format: Literal["gguf", "safetensors"]
    weights: tuple[Path, ...]
    index: Path | None = None

    @property
    def nbytes(self) -> int:
        """Size of the weight files."""
        return sum(path.stat().st_size for path in self.weights)


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache; `files` is None where `problem` says why it cannot be used."""

    name: str
    nbytes: int
    files: ModelFiles | None
    problem: str | None


def resolve_model(name: str, cache_dir: Path | None = None) -> ModelFiles:
    """Find a GGUF file, a folder, a short name, `org/name` or `org/name:file.gguf`.

    What exists as a path wins over the cache. Raises `ModelNotFoundError` (with the command that
    fetches it) or `WeightFormatError` for what is there but cannot be used.
    """
    if not name or "\0" in name or len(name) > 4096:
        raise ModelNotFoundError(f"{shown(name)} cannot be the name of a model")
    try:
        return _resolve(name, cache_dir)
    except (OSError, ValueError, RuntimeError) as error:  # unreadable, too long, links in a circle
        raise ModelNotFoundError(f"{shown(name)} cannot be looked up: {error}") from None


def _resolve(name: str, cache_dir: Path | None) -> ModelFiles:
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_folder(path, name=path.resolve().name or name)
    if path.exists():
        return _from_file(path, name=path.stem)
    if name.startswith(("/", ".", "~")) or (name.lower().endswith(".gguf") and ":" not in name):
        raise ModelNotFoundError(f"{shown(name)}: no such file or folder")
    return _from_cache(name, cache_dir or default_cache_dir())


def _from_cache(name: str, cache: Path) -> ModelFiles:
    model = parse_name(name)
    place = model.place(cache)
    if not place.exists():
        raise ModelNotFoundError(
            f"{model.name} is not on this machine: no folder of that name here, and nothing at "
            f"{place}. Fetch it with `seethrough pull {model.name}`."
        )
    if isinstance(model, HubModel):
        if model.file is None:
            return _from_folder(place, model.name)
        return _from_file(place, model.name)
    size = place.stat().st_size
    if size != model.nbytes:
        raise WeightFormatError(
            place,
            f"has {size} bytes, {model.name} has {model.nbytes}. Fetch it again with "
            f"`seethrough pull {model.name}`.",
        )
    return _from_file(place, model.name)


def _from_file(path: Path, name: str) -> ModelFiles:
    if path.suffix.lower() in _PICKLES:
        raise _pickle_error(path)
    if path.suffix.lower() == ".safetensors":
        raise WeightFormatError(
            path, "is one part of a model: pass its folder, which holds config.json as well"
        )
    if path.suffix.lower() != ".gguf":
        raise WeightFormatError(path, "is no model: a .gguf file or a folder is expected")
    if _SPLIT.search(path.name):
        raise WeightFormatError(
            path, "is one part of a split GGUF file. Join the parts: `llama-gguf-split --merge`."
        )
    return ModelFiles(name, path.parent, "gguf", (path,))


def _from_folder(root: Path, name: str) -> ModelFiles:
    """Safetensors before GGUF; an index before a single file; pickles never."""
    held = sorted(os.listdir(root))
    index = root / INDEX_NAME
    if INDEX_NAME in held or _SINGLE_NAME in held:
        if "config.json" not in held:
            raise WeightFormatError(root, "holds safetensors weights but no config.json")
        if INDEX_NAME not in held:
            return ModelFiles(name, root, "safetensors", (root / _SINGLE_NAME,))
        shards = tuple(root / shard for shard in read_index(index))
        if missing := [shard.name for shard in shards if not shard.exists()]:
            raise WeightFormatError(
                index, f"names {len(missing)} shard(s) that are not there: {', '.join(missing[:3])}"
            )
        return ModelFiles(name, root, "safetensors", shards, index)
    ggufs = [entry for entry in held if entry.lower().endswith(".gguf")]
    if len(ggufs) == 1:
        return _from_file(root / ggufs[0], name)
    if ggufs:
        raise WeightFormatError(
            root, f"holds {len(ggufs)} GGUF files ({', '.join(ggufs[:4])} …): pass one of them"
        )
    if loose := [entry for entry in held if entry.endswith(".safetensors")]:
        raise WeightFormatError(
            root,
            f"holds {', '.join(loose[:3])}, but neither {_SINGLE_NAME} nor {INDEX_NAME}, so which "
            "of them make up the model is unknown",
        )
    for entry in held:
        if entry.lower().endswith(_PICKLES):
            raise _pickle_error(root / entry)
    raise WeightFormatError(root, f"holds no {_SINGLE_NAME}, no {INDEX_NAME} and no .gguf file")


def _pickle_error(path: Path) -> WeightFormatError:
    return WeightFormatError(
        path,
        "is a pickle checkpoint, which can run any code when opened, so it is never read. Convert "
        "it on a machine where that is safe: in transformers, "
        "from_pretrained(…).save_pretrained(…) writes safetensors.",
    )


def list_models(cache_dir: Path | None = None) -> list[CachedModel]:
    """All models in the cache by name, also damaged ones with what is wrong."""
    cache = cache_dir or default_cache_dir()
    names = [model.name for model in PACKAGED.values() if model.place(cache).exists()]
    hub = cache / "hub"
    if hub.is_dir():
        for entry in sorted(os.listdir(hub)):
            if not entry.startswith("."):
                org, _, rest = entry.partition("--")
                names.append(f"{org}/{rest.replace('--', ':', 1)}")
    return [_cached(name, cache) for name in names]


def _cached(name: str, cache: Path) -> CachedModel:
    try:
        files = _from_cache(name, cache)
        return CachedModel(name, files.nbytes, replace(files, name=name), None)
    except (SeethroughError, OSError) as error:
        return CachedModel(name, 0, None, str(error))
