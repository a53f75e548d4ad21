"""What decides the bits of an answer besides the request: the model's files, and the arithmetic.

Asked for when a record is written or read, never on the way to a token. Hashes of files are kept
by path, size and time of change, so a model is read for this once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from seethrough.weights.catalog import default_cache_dir
from seethrough.weights.files import ModelFiles

_SOURCES = ("kernels", "model", "sampling")  # packages whose code computes
_LIBRARIES = {"cpu": ("numba", "llvmlite"), "reference": ("numpy",)}
_BESIDE = (".json", ".model", ".jinja", ".txt")  # what a folder holds beside its weights
_MOST_KEPT = 512
Stamp = tuple[int, int]  # size in bytes, time of change in nanoseconds


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`model`: a SHA-256 over the files. `arithmetic`: parts by name, each a version or a hash."""

    model: str
    arithmetic: Mapping[str, str]

    def changed(self, other: Fingerprint) -> list[str]:
        """Names of the parts in which two fingerprints differ; `model` is one."""
        names = self.arithmetic.keys() | other.arithmetic.keys()
        parts = sorted(n for n in names if self.arithmetic.get(n) != other.arithmetic.get(n))
        return (["model"] if self.model != other.model else []) + parts


@dataclass(frozen=True, slots=True)
class Identity:
    """A loaded model's files as they were when it was loaded, and what it computes with."""

    stamps: Mapping[Path, Stamp]
    backend: str
    cpu_path: str | None
    kv_dtype: str
    hashes: Path = field(default_factory=lambda: default_cache_dir().parent / "fingerprints.json")

    @classmethod
    def of(
        cls, files: ModelFiles, *, backend: str, cpu_path: str | None, kv_dtype: str
    ) -> Identity:
        """Note size and time of the files that decide the answer."""
        return cls({path: _stamp(path) for path in _files(files)}, backend, cpu_path, kv_dtype)

    def fingerprint(self) -> Fingerprint:
        """Read what has to be read. Takes a second for each gigabyte that was never hashed.

        Raises:
            OSError: a file cannot be read any more.
        """
        return Fingerprint(self._model(), self._arithmetic())

    def _model(self) -> str:
        """One hash over the names and hashes of all files."""
        known = _Hashes(self.hashes)
        total = hashlib.sha256()
        for path, stamp in sorted(self.stamps.items(), key=lambda item: item[0].name):
            if _stamp(path) != stamp:
                return f"{path.name} was changed after it was loaded"
            total.update(f"{path.name} {known.of(path, stamp)}\n".encode())
        known.keep()
        return total.hexdigest()

    def _arithmetic(self) -> dict[str, str]:
        parts = {"sources": _sources(), "backend": self.backend, "kv_cache_dtype": self.kv_dtype}
        if self.cpu_path is not None:
            parts["cpu_path"] = self.cpu_path
        return parts | {name: _version(name) for name in _LIBRARIES.get(self.backend, ())}


class _Hashes:
    """Hashes of files on this machine, kept in one JSON file; a damaged one counts as empty."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._kept = _read(place)
        self._new = False

    def of(self, path: Path, stamp: Stamp) -> str:
        key, wanted = str(path.resolve()), list(stamp)
        kept = self._kept.pop(key, None)
        if not (isinstance(kept, list) and len(kept) == 3 and kept[:2] == wanted):
            kept, self._new = [*wanted, _file_hash(path)], True
        self._kept[key] = kept  # last, so that the oldest go first
        return str(kept[2])

    def keep(self) -> None:
        """Write what is new, in one piece. Where that cannot be, it is hashed again next time."""
        if not self._new:
            return
        rest = dict(list(self._kept.items())[-_MOST_KEPT:])
        temporary = self._place.with_name(f"{self._place.name}.{os.getpid()}")
        try:
            self._place.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(rest), encoding="utf-8")
            temporary.replace(self._place)
        except OSError:
            temporary.unlink(missing_ok=True)


def _read(place: Path) -> dict[str, Any]:
    try:
        kept = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _files(files: ModelFiles) -> Iterable[Path]:
    yield from files.weights
    if files.format == "safetensors":
        for path in files.root.iterdir():
            if path.suffix in _BESIDE and path.is_file():
                yield path


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sources() -> str:
    """One hash over the code of the packages that compute."""
    total = hashlib.sha256()
    root = Path(__file__).parent.parent
    for package in _SOURCES:
        for path in sorted((root / package).rglob("*.py")):
            total.update(f"{path.relative_to(root)} ".encode())
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:32]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
