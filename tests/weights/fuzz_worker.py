"""Mutates honest files, opens each and compares what is accepted with the packages' own readers.

    fuzz_worker.py SEED FIRST COUNT FOLDER

File i depends on SEED and i alone. Prints a line before and after each file, so that whoever reads
the output of a crashed or hanging run knows the file. The file stays in FOLDER if it failed.
"""

from __future__ import annotations

import json
import random
import re
import struct
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import safetensors
import weights_forge as forge
from limits_worker import peak_mb

from seethrough.errors import WeightFormatError
from seethrough.weights.gguf.reader import GGUFFile, open_gguf
from seethrough.weights.safetensors import SafetensorsFile, open_safetensors
from seethrough.weights.tensor import DTYPES

EXTREMES = [0, 1, 2, 7, 8, 31, 33, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62]
EXTREMES += [2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]


def honest_gguf(rng: random.Random) -> tuple[bytes, int]:
    """A small valid file and the length of its header."""
    keys = [
        forge.key("general.architecture", forge.STR, "llama"),
        forge.key("llama.block_count", forge.U32, 2),
        forge.key("llama.rope.freq_base", forge.F32, 10000.0),
        forge.key("ok", forge.BOOL, 1),
        forge.key("tokens", forge.ARR, forge.array(forge.STR, ["<s>", "é", "透", "ab"] * 5)),
        forge.key("scores", forge.ARR, forge.array(forge.F32, [0.5] * 9)),
        forge.key("flags", forge.ARR, forge.array(forge.BOOL, [0, 1])),
    ]
    alignment = rng.choice([32, 32, 8, 64])
    if alignment != 32:
        keys.append(forge.key("general.alignment", forge.U32, alignment))
    infos, data = [], b""
    for number in range(rng.randint(0, 6)):
        dtype = rng.choice([*DTYPES.values()])
        kind = gguf.GGMLQuantizationType[dtype.name]
        dims = [256 * rng.randint(1, 3), *rng.choices([1, 2, 5], k=rng.randint(0, 2))]
        infos.append(forge.info(f"blk.{number}.w", dims, int(kind), len(data)))
        data += rng.randbytes(dtype.nbytes(tuple(reversed(dims))))
        data += b"\0" * (-len(data) % alignment)
    whole = forge.gguf(keys, infos, data, version=rng.choice([2, 3]), alignment=alignment)
    return whole, len(whole) - len(data)


def honest_safetensors(rng: random.Random) -> tuple[bytes, int]:
    """A small valid file and the length of its header."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}} if rng.random() < 0.5 else {}
    at = 0
    for number in range(rng.randint(0, 6)):
        dtype, size = rng.choice([("F32", 4), ("F16", 2), ("BF16", 2), ("I64", 8), ("BOOL", 1)])
        shape = rng.choices([0, 1, 3, 16, 64], [1, 4, 4, 4, 4], k=rng.randint(0, 3))
        end = at + size * int(np.prod(shape))
        header[f"layers.{number}.w"] = forge.entry(dtype, shape, at, end)
        at = end
    whole = forge.safetensors(header, rng.randbytes(at))
    return whole, len(whole) - at


def mutate(rng: random.Random, data: bytes, header: int, other: bytes) -> bytes:
    """One of: flips, a cut, an inserted or deleted range, an extreme number, a splice."""
    raw = bytearray(data)
    at = rng.randrange(max(1, min(len(raw), header if rng.random() < 0.9 else len(raw))))
    match rng.choice(
        ["flip", "flip", "bit", "cut", "insert", "delete", "u64", "u32", "text", "splice"]
    ):
        case "flip":
            raw[at : at + 1] = rng.randbytes(1)
        case "bit" if raw:
            raw[at] ^= 1 << rng.randrange(8)
        case "cut":
            del raw[rng.randrange(len(raw) + 1) :]
        case "insert":
            raw[at:at] = (
                rng.randbytes(rng.randint(1, 40))
                if rng.random() < 0.5
                else raw[: rng.randint(1, 99)]
            )
        case "delete":
            del raw[at : at + rng.choice([1, 4, 8, 32, 100])]
        case "u64":
            raw[at : at + 8] = struct.pack("<Q", rng.choice(EXTREMES))
        case "u32":
            raw[at : at + 4] = struct.pack("<I", rng.choice(EXTREMES) % 2**32)
        case "text":
            raw = bytearray(replace_number(rng, bytes(raw), header))
        case "splice":
            raw[at:] = other[min(at, len(other)) :]
    return bytes(raw)


def replace_number(rng: random.Random, raw: bytes, header: int) -> bytes:
    """Put another number (or word) where the JSON header has one, mostly with a right length."""
    found = [*re.finditer(rb"\d+|true|F32|I64|\w+", raw[8:header])]
    if not found:
        return raw
    spot = rng.choice(found)
    new = rng.choice([str(rng.choice(EXTREMES)), "-1", "true", "1.0", "F16", "a", "[0]"]).encode()
    body = raw[8 : 8 + spot.start()] + new + raw[8 + spot.end() : header]
    length = raw[:8] if rng.random() < 0.2 else struct.pack("<Q", len(body))
    return length + body + raw[header:]


def forge_file(seed: int, index: int) -> tuple[str, bytes]:
    rng = random.Random(f"{seed}/{index}")
    suffix, make = rng.choice([(".gguf", honest_gguf), (".safetensors", honest_safetensors)])
    data, header = make(rng)
    other, _ = make(rng)
    for _ in range(rng.choice([0, 1, 1, 1, 1, 2, 3])):
        data = mutate(rng, data, header, other)
    return suffix, data[:200_000]


def compare_gguf(got: GGUFFile, path: Path) -> None:
    oracle = gguf.GGUFReader(path)
    assert [*got.tensors] == [t.name for t in oracle.tensors], "names"
    for want in oracle.tensors:
        tensor = got.tensors[want.name]
        assert tensor.dtype.name == want.tensor_type.name, "type"
        assert tensor.shape == tuple(reversed(want.shape.tolist())), "shape"
        assert tensor.data.tobytes() == want.data.tobytes(), "bytes"
        values = np.asarray(gguf.quants.dequantize(want.data, want.tensor_type), np.float32)
        assert np.array_equal(tensor.to_f32(), values, equal_nan=True), "values"
    fields = {k: f for k, f in oracle.fields.items() if not k.startswith("GGUF.")}
    assert [*got.metadata] == [*fields], "keys"
    for key, field in fields.items():
        if field.types.count(gguf.GGUFValueType.ARRAY) < 2:  # the oracle flattens nested arrays
            assert repr(got.metadata[key]) == repr(field.contents()), f"value of {key}"


def compare_safetensors(got: SafetensorsFile, data: bytes) -> None:
    oracle = dict(safetensors.deserialize(data))
    assert oracle.keys() == got.tensors.keys() | got.unsupported.keys(), "names"
    for name, tensor in got.tensors.items():
        assert oracle[name]["dtype"] == tensor.dtype.name, "type"
        assert oracle[name]["shape"] == list(tensor.shape), "shape"
        assert bytes(oracle[name]["data"]) == tensor.data.tobytes(), "bytes"
    for name, dtype in got.unsupported.items():
        assert oracle[name]["dtype"] == dtype, "unsupported type"


def run_one(path: Path, data: bytes) -> tuple[str, float]:
    started = time.perf_counter()
    try:
        opened = open_gguf(path) if path.suffix == ".gguf" else open_safetensors(path)
    except WeightFormatError as error:
        return f"refused: {error.why[:60]}", time.perf_counter() - started
    seconds = time.perf_counter() - started
    if isinstance(opened, GGUFFile):
        compare_gguf(opened, path)
    else:
        compare_safetensors(opened, data)
    return "accepted", seconds


def main() -> None:
    seed, first, count = map(int, sys.argv[1:4])
    np.seterr(all="ignore")
    base = peak_mb()
    for index in range(first, first + count):
        suffix, data = forge_file(seed, index)
        path = Path(sys.argv[4]) / f"{index}{suffix}"
        path.write_bytes(data)
        print(json.dumps({"started": index}), flush=True)
        outcome, seconds = run_one(path, data)
        grown = peak_mb() - base
        print(json.dumps({"done": index, "outcome": outcome, "seconds": seconds, "mb": grown}))
        path.unlink()


if __name__ == "__main__":
    main()
