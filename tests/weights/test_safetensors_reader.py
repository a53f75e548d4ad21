"""The safetensors reader against the safetensors package, and index folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import weights_forge as forge
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seethrough.errors import ModelNotFoundError, WeightFormatError
from seethrough.weights.safetensors import open_index, open_safetensors

READ = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
OTHER = [
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint16, torch.uint32,
]  # fmt: skip
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    held=st.dictionaries(names, st.tuples(shapes, st.sampled_from([*READ, *OTHER])), max_size=6),
    metadata=st.none() | st.dictionaries(st.text(max_size=5).filter(str.isascii), st.just("é")),
)
def test_what_the_package_writes_is_read_equal(tmp_path: Path, held, metadata) -> None:
    torch.manual_seed(0)
    written = {
        name: (torch.randn(shape) * 40).to(dtype)
        if dtype.is_floating_point or dtype.is_complex
        else torch.randint(0, 2, shape).to(dtype)
        for name, (shape, dtype) in held.items()
    }
    path = tmp_path / "a.safetensors"
    # With metadata {} and no tensors the package itself writes broken JSON.
    safetensors.torch.save_file(written, path, metadata or None)
    opened = open_safetensors(path)
    assert opened.metadata == (metadata or {})
    assert opened.tensors.keys() == {n for n, t in written.items() if t.dtype in READ}
    assert opened.unsupported.keys() == written.keys() - opened.tensors.keys()
    for name, tensor in opened.tensors.items():
        assert tensor.dtype.name == READ[written[name].dtype]
        assert tensor.shape == tuple(written[name].shape)
        assert tensor.to_f32().tobytes() == written[name].float().numpy().tobytes()


def test_tensors_are_views_of_one_read_only_map(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file({"w": torch.ones(4)}, path)
    tensor = open_safetensors(path).tensors["w"]
    assert not tensor.data.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        tensor.data[0] = 1


def test_empty_shapes_metadata_only_and_odd_offsets_are_legal(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(forge.safetensors({"__metadata__": {"format": "pt"}}))
    assert open_safetensors(path).metadata == {"format": "pt"}
    header = {
        "b": forge.entry("F32", [1], 1, 5),
        "none": forge.entry("F32", [0, 1 << 40], 1, 1),
        "a": forge.entry("U8", [1], 0, 1),
        "end": forge.entry("BF16", [3, 0], 5, 5),
        "scalar": forge.entry("F16", [], 5, 7),
    }
    data = b"\7" + np.float32(1.5).tobytes() + np.float16(-2).tobytes()
    path.write_bytes(forge.safetensors(json.dumps(header) + "   ", data))
    opened = open_safetensors(path)
    assert opened.unsupported == {"a": "U8"}
    assert opened.tensors["b"].to_f32().tolist() == [1.5]
    assert opened.tensors["scalar"].to_f32() == -2
    assert opened.tensors["none"].to_f32().shape == (0, 1 << 40)
    assert len(safetensors.deserialize(path.read_bytes())) == 5  # the package agrees


def test_cut_at_any_byte_or_longer_is_an_error(tmp_path: Path) -> None:
    whole = safetensors.torch.save({"w": torch.ones(3, 2), "v": torch.zeros(2)})
    path = tmp_path / "a.safetensors"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(WeightFormatError) as caught:
            open_safetensors(path)
        assert str(path) in str(caught.value)
    for extra in (b"\0", b"\0" * 4096):
        path.write_bytes(whole + extra)
        with pytest.raises(WeightFormatError, match="after its last tensor"):
            open_safetensors(path)


def write_shards(folder: Path, weight_map: dict[str, str], shards: dict[str, list[str]]) -> Path:
    for number, (shard, held) in enumerate(shards.items()):
        tensors = {name: torch.full((2,), float(number)) for name in held}
        safetensors.torch.save_file(tensors, folder / shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


def test_an_index_decides_which_files_are_read(tmp_path: Path) -> None:
    shards = {"m-1.safetensors": ["a", "b"], "m-2.safetensors": ["c"], "model.safetensors": ["a"]}
    weight_map = {"a": "m-1.safetensors", "c": "m-2.safetensors", "b": "m-1.safetensors"}
    opened = open_index(write_shards(tmp_path, weight_map, shards))
    assert {n: t.to_f32().tolist() for n, t in opened.tensors.items()} == {
        "a": [0, 0],
        "b": [0, 0],
        "c": [1, 1],
    }


@pytest.mark.parametrize(
    ("weight_map", "shards", "message"),
    [
        ({"a": "m.safetensors", "b": "m.safetensors"}, {"m.safetensors": ["a"]}, "'b' in m"),
        ({"a": "m.safetensors"}, {"m.safetensors": ["a", "b"]}, "holds tensor 'b'"),
        (
            {"a": "m.safetensors", "b": "n.safetensors"},
            {"m.safetensors": ["a"], "n.safetensors": ["a", "b"]},
            "n.safetensors holds tensor 'a'",
        ),
        ({"a": "../m.safetensors"}, {}, "plain file name"),
        ({"a": "/etc/m.safetensors"}, {}, "plain file name"),
        ({"a": "x/m.safetensors"}, {}, "plain file name"),
        ({"a": "x\\m.safetensors"}, {}, "plain file name"),
        ({"a": "m\0.safetensors"}, {}, "plain file name"),
        ({"a": "..safetensors"}, {}, "plain file name"),
        ({"a": "m.bin"}, {}, "plain file name"),
        ({"a": 7}, {}, "plain file name"),
        ({}, {}, "no weight_map"),
        (["a"], {}, "no weight_map"),
    ],
)
def test_index_and_shards_must_agree(tmp_path: Path, weight_map, shards, message: str) -> None:
    with pytest.raises(WeightFormatError, match=message):
        open_index(write_shards(tmp_path, weight_map, shards))


def test_a_tensor_twice_in_the_index_and_a_missing_shard(tmp_path: Path) -> None:
    index = write_shards(tmp_path, {"a": "m.safetensors"}, {})
    with pytest.raises(ModelNotFoundError, match=r"m\.safetensors"):
        open_index(index)
    index.write_text('{"weight_map": {"a": "m.safetensors", "a": "n.safetensors"}}')
    with pytest.raises(WeightFormatError, match="'a' appears twice"):
        open_index(index)
