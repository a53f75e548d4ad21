"""The GGUF reader against files of the gguf package and against hand-made ones."""

from __future__ import annotations

import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import weights_forge as forge

from seethrough.errors import WeightFormatError
from seethrough.weights import tensor as t
from seethrough.weights.gguf.reader import open_gguf

KINDS = [*t.DTYPES]


def raw_rows(name: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(len(name))
    kind = gguf.GGMLQuantizationType[name]
    try:
        return gguf.quants.quantize(rng.standard_normal(shape).astype(np.float32), kind)
    except NotImplementedError:  # K-quants: any bytes are blocks; small scales keep them finite
        block = t.DTYPES[name]
        count = int(np.prod(shape)) // block.block_size
        return np.full((count, block.block_bytes), 0x21, np.uint8).reshape(*shape[:-1], -1)


def write(path: Path, fill) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 8, 4096])
def test_tensors_of_every_type_equal_the_oracle(tmp_path: Path, alignment: int | None) -> None:
    shapes = [(3, 512), (256,), (2, 3, 256), (2, 1, 2, 256)]

    def fill(writer: gguf.GGUFWriter) -> None:
        if alignment:
            writer.add_custom_alignment(alignment)
        for number, name in enumerate(KINDS):
            rows = raw_rows(name, shapes[number % 4])
            floats = name in ("F32", "F16")
            kind = None if floats else gguf.GGMLQuantizationType[name]
            writer.add_tensor(f"blk.{number}.{name}", rows, raw_dtype=kind)

    path = write(tmp_path / "a.gguf", fill)
    opened, oracle = open_gguf(path), gguf.GGUFReader(path)
    assert [*opened.tensors] == [tensor.name for tensor in oracle.tensors]
    for want in oracle.tensors:
        got = opened.tensors[want.name]
        assert got.dtype.name == want.tensor_type.name
        assert got.shape == tuple(reversed(want.shape.tolist()))
        expected = gguf.quants.dequantize(want.data, want.tensor_type)
        assert got.to_f32().tobytes() == np.asarray(expected, np.float32).tobytes()
        assert not got.data.flags.owndata


def test_metadata_of_every_value_type(tmp_path: Path) -> None:
    nested = forge.array(
        forge.ARR, [forge.array(forge.U8, [1, 2]), forge.array(forge.STR, ["x", ""])]
    )
    values = {
        "u8": (forge.U8, 255), "i8": (forge.I8, -128), "u16": (forge.U16, 65535),
        "i16": (forge.I16, -32768), "u32": (forge.U32, 2**32 - 1), "i32": (forge.I32, -(2**31)),
        "f32": (forge.F32, 0.5), "yes": (forge.BOOL, 1), "no": (forge.BOOL, 0),
        "str": (forge.STR, "透视 \0 🙂"), "u64": (forge.U64, 2**64 - 1),
        "i64": (forge.I64, -(2**63)), "f64": (forge.F64, 1e300), "long": (forge.STR, "y" * 200_000),
    }  # fmt: skip
    keys = [forge.key(name, kind, value) for name, (kind, value) in values.items()]
    keys.append(forge.key("nested", forge.ARR, nested))
    long_strings = ["a", "b" * 100_000, "", "c" * 65_528, "d" * 70_000, "é"]
    keys.append(forge.key("strings", forge.ARR, forge.array(forge.STR, long_strings)))
    keys.append(forge.key("bools", forge.ARR, forge.array(forge.BOOL, [0, 1])))
    keys.append(forge.key("empty", forge.ARR, forge.array(forge.F32, [])))
    path = tmp_path / "a.gguf"
    for version in (2, 3):
        path.write_bytes(forge.gguf(keys, [], version=version))
        opened = open_gguf(path)
        assert opened.version == version
        expected = {name: value for name, (_, value) in values.items()}
        expected |= {"yes": True, "no": False, "nested": [[1, 2], ["x", ""]]}
        expected |= {"strings": long_strings, "bools": [False, True], "empty": []}
        assert opened.metadata == expected
        assert opened.metadata["yes"] is True
        assert opened.metadata["bools"][1] is True
        assert opened.tensors == {}


def test_a_large_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list([f"token{i}" for i in range(50_000)])
        writer.add_token_merges([f"a{i} b{i}" for i in range(50_000)])
        writer.add_token_scores([float(i) for i in range(50_000)])
        writer.add_token_types([1] * 50_000)

    path = write(tmp_path / "a.gguf", fill)
    started = time.process_time()
    metadata = open_gguf(path).metadata
    assert time.process_time() - started < 0.6  # 0.15 s alone; headroom for a busy machine
    assert metadata["tokenizer.ggml.tokens"][49_999] == "token49999"
    assert metadata["tokenizer.ggml.merges"][0] == "a0 b0"
    assert metadata["tokenizer.ggml.scores"][7] == 7.0


def test_cut_at_any_byte_is_an_error(tmp_path: Path) -> None:
    keys = [
        forge.key("general.architecture", forge.STR, "llama"),
        forge.key("t", forge.ARR, forge.array(forge.STR, ["a", "bc"])),
        forge.key("s", forge.ARR, forge.array(forge.F32, [1.0])),
    ]
    infos = [forge.info("w", [32, 2], 8, 0), forge.info("v", [3], 0, 96)]
    whole = forge.gguf(keys, infos, bytes(96 + 12))
    path = tmp_path / "a.gguf"
    path.write_bytes(whole)
    assert open_gguf(path).tensors.keys() == {"w", "v"}
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(WeightFormatError) as caught:
            open_gguf(path)
        assert str(path) in str(caught.value)


def test_the_file_type_key_is_not_used_for_decoding(tmp_path: Path) -> None:
    """The type of a file and of a tensor use different numbers (vllm-project/vllm#42734)."""
    data = np.array([1.0, 2.0], "<f4").tobytes()
    path = tmp_path / "a.gguf"
    path.write_bytes(
        forge.gguf(
            [forge.key("general.file_type", forge.U32, 8)], [forge.info("w", [2], 0, 0)], data
        )
    )
    assert open_gguf(path).tensors["w"].to_f32().tolist() == [1.0, 2.0]


def test_tensors_may_lie_in_any_order_with_gaps(tmp_path: Path) -> None:
    data = np.arange(24, dtype="<f4").tobytes()
    path = tmp_path / "a.gguf"
    path.write_bytes(
        forge.gguf([], [forge.info("b", [4], 0, 64), forge.info("a", [2], 0, 0)], data)
    )
    opened = open_gguf(path)
    assert [*opened.tensors] == ["b", "a"]
    assert opened.tensors["b"].to_f32().tolist() == [16, 17, 18, 19]
    assert opened.tensors["a"].to_f32().tolist() == [0, 1]
