"""Pulling from a hub: a stand-in server here, huggingface_hub in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import weights_forge as forge

COMMIT = "c" * 40
CODE = """
import json, sys
from pathlib import Path
from seethrough.errors import SeethroughError
from seethrough.weights.pull import pull
from seethrough.weights.files import resolve_model
from seethrough.weights.checkpoint import open_checkpoint
seen = []
try:
    files = pull(sys.argv[1], Path(sys.argv[2]), lambda *args: seen.append(args))
    again = resolve_model(sys.argv[1], Path(sys.argv[2]))
    tensors = sorted(open_checkpoint(again).tensors)
    held = sorted(p.name for p in files.root.iterdir())
    print(json.dumps({"name": files.name, "tensors": tensors, "held": held, "seen": seen}))
except SeethroughError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
"""


@dataclass
class Hub:
    """Repositories as {id: {file: bytes}}; what was asked for is kept in `asked`."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    broken: str | None = None  # the file whose transfer ends half way
    url: str = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        path = path.partition("?")[0]
        for repo, files in self.repos.items():
            info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            if path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/main"):
                return 200, {}, json.dumps(info).encode()
            if path.startswith(f"/api/models/{repo}/tree/"):
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": etag(data)}
                    for name, data in files.items()
                ]
                return 200, {}, json.dumps(tree).encode()
            for name, data in files.items():
                if path in (f"/{repo}/resolve/{rev}/{name}" for rev in ("main", COMMIT)):
                    self.asked.append(name)
                    return 200, {"ETag": f'"{etag(data)}"', "X-Repo-Commit": COMMIT}, data
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[Hub]:
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = state.answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                cut = state.broken is not None and self.path.endswith(state.broken)
                self.wfile.write(body[: len(body) // 2] if cut else body)

        do_HEAD = do_GET

        def log_message(self, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


def pull(hub: Hub, tmp_path: Path, name: str, **more: str) -> dict[str, Any]:
    env = {
        k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()
    }
    env |= {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        **more,
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE, name, str(tmp_path / "cache")],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def sharded() -> dict[str, bytes]:
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    return {
        "config.json": b"{}",
        "tokenizer.json": b"{ }",  # equal files would be fetched once
        "chat_template.jinja": b"x",
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        **{shard: safetensors.torch.save({n: torch.ones(900)}) for n, shard in weight_map.items()},
    }


UNWANTED = {
    "pytorch_model.bin": b"pickle",
    "training_args.bin": b"pickle",
    "tokenizer.py": b"code",
    "modeling_x.py": b"code",
    "tokenizer.pkl": b"pickle",
    "README.md": b"text",
    "onnx/model.onnx": b"x",
}


def test_a_repository_without_its_pickles_and_code(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/m"] = sharded() | UNWANTED
    got = pull(hub, tmp_path, "org/m")
    assert got.get("name") == "org/m", got
    assert got["tensors"] == ["a", "b"]
    assert got["held"] == sorted(sharded())
    assert not set(hub.asked) & UNWANTED.keys()
    total = max(done for _, done, _ in got["seen"])
    assert total == sum(map(len, sharded().values()))
    assert all(what == "org/m" for what, _, _ in got["seen"])
    offline = pull(hub, tmp_path, "org/m", HF_HUB_OFFLINE="1")
    assert offline["tensors"] == ["a", "b"]


def test_one_gguf_file(hub: Hub, tmp_path: Path) -> None:
    data = forge.gguf([], [forge.info("w", [2], 0, 0)], bytes(8))
    hub.repos["org/q"] = {"m.Q4_0.gguf": data, "m.Q8_0.gguf": b"other", "config.json": b"{}"}
    got = pull(hub, tmp_path, "org/q:m.Q4_0.gguf")
    assert got.get("tensors") == ["w"], got
    assert set(hub.asked) == {"m.Q4_0.gguf"}
    without = pull(hub, tmp_path, "org/q")
    assert without["error"] == "DownloadError"
    assert "org/q:FILE.gguf" in without["message"]


def test_an_interrupted_pull_is_not_found_and_can_go_on(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/m"] = sharded()
    hub.broken = "model-00002-of-00002.safetensors"
    got = pull(hub, tmp_path, "org/m")
    assert got["error"] == "DownloadError", got
    assert not list((tmp_path / "cache").rglob("org--m"))
    hub.broken = None
    assert pull(hub, tmp_path, "org/m")["tensors"] == ["a", "b"]


def test_errors_name_the_model_and_the_cause(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/pickles"] = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    for name, more, cause in [
        ("org/none", {}, "RepositoryNotFoundError"),
        ("org/m", {"HF_HUB_OFFLINE": "1"}, "LocalEntryNotFoundError"),
        ("org/m", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "LocalEntryNotFoundError"),
        ("org/pickles", {}, "holds no model.safetensors"),
        ("org/m:x.gguf", {}, "NotFound"),
    ]:
        got = pull(hub, tmp_path, name, **more)
        assert got.get("error") == "DownloadError", got
        assert got["message"].startswith(name)
        assert cause in got["message"]
        assert "\n" not in got["message"]
