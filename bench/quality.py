"""How far an engine is from the float32 arithmetic of the same file, beside llama.cpp's distance.

    bench/quality.py --types q4_1 q8_0 q4_k

For every position of a text, KL(p || q): p from the `reference` backend (weights expanded to
float32, float32 arithmetic and cache), q from the `cpu` backend or from llama.cpp, each with its
defaults. The positions are the same, so the difference is paired: its mean, its standard error, and
the ratio of the two means. Files of other types are made by llama.cpp's quantizer. The text is
chapters I to III of "Alice's Adventures in Wonderland" (1865), in windows of 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from child import Child
from installed import RUNNERS, default_peers_dir, missing, python_of
from numpy.typing import NDArray

from seethrough.config import EngineConfig
from seethrough.engine.load import Loaded, load
from seethrough.kernels.batch import ForwardBatch
from seethrough.kv.pool import BlockTable
from seethrough.weights.catalog import DEFAULT_MODEL
from seethrough.weights.files import resolve_model

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
TEXT = Path(__file__).parent / "texts" / "alice.txt"
TYPES = ("q4_1", "q8_0", "q4_k")  # the first is what the default model's file holds
_WINDOW = 512
_PEER = "llama.cpp"
_Logits = Callable[[list[int]], F32]


@dataclass(frozen=True, slots=True)
class Quality:
    """Mean KL divergences in nats, and the paired difference (ours - peer's)."""

    type: str
    tokens: int
    ours: float
    peer: float
    difference: float
    standard_error: float

    @property
    def ratio(self) -> float:
        """Ours over the peer's; below 1, ours is nearer."""
        return self.ours / self.peer


def divergence(wanted: F32, found: F32) -> F64:
    """KL(softmax(wanted) || softmax(found)) per row, in nats. [n, V], [n, V] -> [n]"""
    p, q = _log_softmax(wanted), _log_softmax(found)
    return np.asarray((np.exp(p) * (p - q)).sum(axis=1), dtype=np.float64)


def _log_softmax(logits: F32) -> F64:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=1, keepdims=True)), dtype=np.float64)


def summed_up(kind: str, ours: F64, peer: F64) -> Quality:
    """Means, and the standard error of the mean of the paired differences."""
    difference = ours - peer
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference))
    return Quality(
        kind, len(ours), float(ours.mean()), float(peer.mean()), float(difference.mean()), error
    )


def logits_of(loaded: Loaded) -> _Logits:
    """All positions' logits of a window, by the engine's own model and cache."""

    def run(ids: list[int]) -> F32:
        engine = loaded.engine
        table = BlockTable(engine.pool)
        table.reserve(len(ids))
        count = np.arange(len(ids))
        batch = ForwardBatch(
            token_ids=np.array(ids),
            positions=count,
            slots=table.slots(0, len(ids)),
            query_start=np.array([0, len(ids)]),
            seq_lens=np.array([len(ids)]),
            block_tables=(table.array,),
            logit_rows=count,
        )
        logits = engine.model.run(batch, engine.pool).copy()
        table.release()
        return logits

    return run


def peer_logits(peer: Child, folder: Path) -> _Logits:
    """The same from a runner, through a file."""

    def run(ids: list[int]) -> F32:
        path = folder / "logits.npy"
        peer.ask({"work": "logits", "prompt": ids, "path": str(path)})
        return np.asarray(np.load(path), dtype=np.float32)

    return run


def compare(kind: str, file: Path, peers: Path, folder: Path, tokens: int) -> Quality:
    """One file: reference, ours and llama.cpp over the same windows."""
    sizes = {"max_model_len": _WINDOW, "max_num_batched_tokens": _WINDOW}
    reference = load(str(file), EngineConfig(backend="reference", kv_cache_dtype="f32", **sizes))
    ours = load(str(file), EngineConfig(backend="cpu", **sizes))
    command = [str(python_of(_PEER, peers)), str(RUNNERS / "run_llama.py")]
    command += ["--model", str(file), "--threads", str(ours.report.threads)]
    command += ["--context", str(_WINDOW), "--requests", "1", "--request-tokens", str(_WINDOW)]
    peer = Child(command, folder / "llama.log", ours.report.threads, 600)
    peer.wait_ready()
    run_reference, run_ours = logits_of(reference), logits_of(ours)
    run_peer = peer_logits(peer, folder)
    near, far = [], []
    ids = reference.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:tokens]
    for window in _windows(ids):
        wanted = run_reference(window)
        near.append(divergence(wanted, run_ours(window)))
        far.append(divergence(wanted, run_peer(window)))
    peer.stop()
    ours.engine.model.close()
    return summed_up(kind, np.concatenate(near), np.concatenate(far))


def _windows(ids: list[int]) -> Iterator[list[int]]:
    for first in range(0, len(ids) - _WINDOW + 1, _WINDOW):
        yield ids[first : first + _WINDOW]


def _file(kind: str, source: Path, peers: Path, folder: Path) -> Path:
    """The file itself, or its weights in another type."""
    if kind == TYPES[0]:
        return source
    target = folder / f"{kind}.gguf"
    python = python_of(_PEER, peers)
    script = RUNNERS / "quantize_llama.py"
    with (folder / "quantize.log").open("wb") as log:
        subprocess.run([python, script, source, kind, target], check=True, stdout=log, stderr=log)
    return target


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, compare, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF file of type q4_1")
    parser.add_argument("--tokens", type=int, default=4608)
    parser.add_argument("--peers-dir", type=Path, default=default_peers_dir())
    asked = parser.parse_args(arguments)
    peers = asked.peers_dir
    if reason := missing(_PEER, peers):
        parser.error(reason)
    source = resolve_model(asked.model).weights[0]
    print(f"KL to float32 arithmetic of the same file, {TEXT.name}, windows of {_WINDOW} tokens")
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        for kind in asked.types:
            folder = Path(temporary)
            file = _file(kind, source, peers, folder)
            quality = compare(kind, file, peers, folder, asked.tokens)
            found.append(asdict(quality) | {"ratio": quality.ratio})
            print(
                f"  {kind:<6} {quality.tokens} tokens   ours {quality.ours:.3e}   llama.cpp "
                f"{quality.peer:.3e}   ratio {quality.ratio:.3f}   difference "
                f"{quality.difference:+.2e} ± {quality.standard_error:.2e}",
                flush=True,
            )
    print(json.dumps({"text": TEXT.name, "window": _WINDOW, "types": found}))


if __name__ == "__main__":
    main()
