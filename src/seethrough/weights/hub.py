"""Fetching from a hub through `huggingface_hub`, whose cache and environment variables apply."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seethrough.errors import DownloadError
from seethrough.weights.catalog import HubModel

# Config, tokenizer, template and safetensors. Pickles (*.bin, *.pt) and code (*.py) never.
PATTERNS = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "spiece.model",
    "chat_template*",
    "additional_chat_templates/*",
]
_NEVER = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.py"]


def fetch_from_hub(model: HubModel, progress: Callable[[str, int, int | None], None]) -> Path:
    """The snapshot folder of a repository, or the one file asked for, as an absolute path."""
    # Imported here: it takes a third of a second, and only pulling needs it.
    from huggingface_hub import hf_hub_download, snapshot_download

    bar = _progress_bar(model.name, progress)
    try:
        if model.file is not None:
            found = hf_hub_download(model.repo, model.file, tqdm_class=bar)
        else:
            found = snapshot_download(
                model.repo, allow_patterns=PATTERNS, ignore_patterns=_NEVER, tqdm_class=bar
            )
    except Exception as error:
        # The library raises errors of its HTTP client, of the system and its own: no common base.
        raise DownloadError(f"{model.name}: {_one_line(error)}") from error
    return Path(found).absolute()


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no further message"
    return f"{type(error).__name__}: {text[:500]}"


def _progress_bar(name: str, progress: Callable[[str, int, int | None], None]) -> type[Any]:
    """A progress bar that calls `progress` where the library's own would draw."""
    from huggingface_hub.utils.tqdm import tqdm

    class Relay(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Of a snapshot's bars, files are counted in "it" and network bytes end in ".transfer".
            group = str(kwargs.get("name", ""))
            self.counts = kwargs.get("unit") == "B" and not group.endswith(".transfer")
            # tqdm is silent without a terminal. HF_HUB_DISABLE_PROGRESS_BARS still counts.
            kwargs |= {"file": io.StringIO(), "leave": False, "disable": False}
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if self.counts:
                progress(name, int(self.n), int(self.total) if self.total else None)

    return Relay
