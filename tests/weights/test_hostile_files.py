"""Files that lie: each gives one typed error, at once, with little memory, in another process."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import weights_forge as forge

BIG = [1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
HUGE = (1 << 64) - 1
e, st = forge.entry, forge.safetensors


def safetensors_cases() -> dict[str, tuple[bytes, str]]:
    ok = e("F32", [2], 0, 8)
    cases: dict[str, tuple[Any, str]] = {
        "empty": (b"", "is empty"),
        "seven bytes": (b"\1" * 7, "has 7 bytes"),
        "lfs pointer": (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
            "Git LFS pointer",
        ),
        "html": (b"<!DOCTYPE html><html>not found</html>", "only 29 follow"),
        "no header": (st(b""), "does not start"),
        "space first": (st(b" {}"), "does not start"),
        "list": (st(b"[]"), "does not start"),
        "two values": (st(b"{}{}"), "not valid JSON"),
        "bad utf8": (st(b'{"\xff": 1}'), "not valid JSON"),
        "utf16": (st("{}".encode("utf-16-le")), "not valid JSON"),
        "surrogate": (st('{"\\ud800": {}}'), "not valid JSON"),
        "nul bytes": (st(b"{}\0\0"), "not valid JSON"),
        "nan": (st('{"a": NaN}'), "NaN is not JSON"),
        "duplicate": (
            st('{"a": {"dtype":"F32","shape":[0],"data_offsets":[0,0]}, "a": 1}'),
            "twice",
        ),
        "duplicate inside": (
            st('{"a": {"dtype":"F32","dtype":"F16","shape":[0],"data_offsets":[0,0]}}'),
            "'dtype' appears twice",
        ),
        "deep": (st('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"), "nested"),
        "deep 40": (st('{"a": ' + "[" * 40 + "]" * 40 + "}"), "nested"),
        "many values": (st('{"a": [' + "[]," * 400_000 + "[]]}"), "too many values"),
        "long integer": (st('{"a": ' + "9" * 5000 + "}"), "not valid JSON"),
        "same range": (st({"a": ok, "b": ok}, bytes(8)), "overlaps"),
        "overlap": (st({"a": ok, "b": e("F32", [2], 4, 12)}, bytes(12)), "overlaps"),
        "gap": (st({"a": ok, "b": e("F32", [1], 12, 16)}, bytes(16)), "gap"),
        "gap at start": (st({"a": e("F32", [1], 4, 8)}, bytes(8)), "gap"),
        "trailing": (st({"a": ok}, bytes(9)), "1 bytes after"),
        "short": (st({"a": ok}, bytes(7)), "cut off"),
        "product": (st({"a": e("F32", [1 << 62, 4], 0, 0)}), "larger than any file"),
        "wraps to 8": (st({"a": e("F32", [(1 << 62) + 2], 0, 8)}, bytes(8)), "larger than any"),
        "unread wraps": (st({"a": e("I64", [1 << 61, 1 << 61], 0, 8)}, bytes(8)), "takes"),
        "zero and huge": (st({"a": e("F32", [0, 1 << 62], 0, 0)}), "larger than any file"),
        "not its range": (st({"a": e("F32", [3], 0, 8)}, bytes(8)), "takes 12 bytes"),
        "half bytes": (st({"a": e("F4", [3], 0, 1)}, b"0"), "whole bytes"),
        "begin after end": (st({"a": e("F32", [2], 8, 0)}, bytes(8)), "before its start"),
        "rank": (st({"a": e("F32", [1] * 9, 0, 4)}, bytes(4)), "9 dimensions"),
        "unread rank": (st({"a": e("I8", [1] * 99, 0, 1)}, bytes(1)), "99 dimensions"),
        "empty name": (st({"": ok}, bytes(8)), "empty name"),
        "no offsets": (st({"a": {"dtype": "F32", "shape": [2]}}), "exactly"),
        "extra field": (st({"a": {**ok, "x": 1}}, bytes(8)), "exactly"),
        "entry is a list": (st({"a": [1]}), "exactly"),
        "metadata number": (st({"__metadata__": {"a": 1}}), "strings to strings"),
        "metadata null": (st({"__metadata__": None}), "strings to strings"),
        "one offset": (
            st({"a": {"dtype": "F32", "shape": [], "data_offsets": [0]}}),
            "two integers",
        ),
    }
    for dtype in ["F33", "f32", "", None, 5, ["F32"], "Q4_0", "F32" * 10_000]:
        cases[f"dtype {str(dtype)[:9]}"] = (
            st({"a": e(dtype, [2], 0, 8)}, bytes(8)),
            "unknown dtype",
        )
    for shape in [[-1], [True], [1.0], ["1"], [None], [[1]], {"0": 1}, None, [1 << 64]]:
        cases[f"shape {shape}"] = (st({"a": e("F32", shape, 0, 4)}, bytes(4)), "shape must")
    for end in [-8, True, 8.0, "8", None, [8], 1 << 63, 1 << 200]:
        cases[f"end {end}"] = (st({"a": e("F32", [2], 0, end)}, bytes(8)), "two integers")
    for length in [3, 100, *BIG[:5], HUGE, HUGE - 7]:
        message = "not valid JSON" if length == 3 else "only"
        cases[f"length {length}"] = (st({"a": ok}, bytes(8), length=length), message)
    return cases


def gguf_cases() -> dict[str, tuple[bytes, str]]:
    k, i, g, arr = forge.key, forge.info, forge.gguf, forge.array
    one = [i("w", [2], 0, 0)]
    cases = {
        "empty": (b"", "is empty"),
        "magic": (b"GGUF", "the version takes 4 bytes"),
        "other magic": (b"GGML" + bytes(60), "no GGUF file"),
        "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
        "version 0": (g([], [], version=0), "GGUF version 0"),
        "version 1": (g([], [], version=1), "version 1; versions 2 and 3"),
        "version 4": (g([], [], version=4), "GGUF version 4"),
        "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        "empty key": (g([k("", forge.U8, 1)], []), "key is empty"),
        "duplicate key": (g([k("a", forge.U8, 1)] * 2, []), "'a': the key appears twice"),
        "key not utf8": (g([k(b"\xff", forge.U8, 1)], []), "not valid UTF-8"),
        "long key": (g([k("a" * 70_000, forge.U8, 1)], []), "at most 65536"),
        "string not utf8": (
            g([k("a", forge.STR, b"\xff")], []),
            "'a': the string is not valid UTF",
        ),
        "strings not utf8": (
            g([k("a", forge.ARR, arr(forge.STR, ["x", b"\xc3"]))], []),
            "'a': string 1 is not UTF-8",
        ),
        "bool 2": (g([k("a", forge.BOOL, 2)], []), "'a': a bool is stored as 2"),
        "bools 3": (g([k("a", forge.ARR, arr(forge.BOOL, [0, 3]))], []), "stored as 3"),
        "array nest": (
            g([k("a", forge.ARR, struct.pack("<IQ", forge.ARR, 1) * 5000)], []),
            "nested deeper",
        ),
        "tiny array of arrays": (
            g([k("a", forge.ARR, struct.pack("<IQ", forge.ARR, HUGE))], []),
            "bytes are left|are left",
        ),
        "same name": (g([], [i("w", [2], 0, 0), i("w", [2], 0, 32)], bytes(64)), "appears twice"),
        "empty name": (g([], [i("", [2], 0, 0)], bytes(32)), "empty name"),
        "no dims": (g([], [i("w", [], 0, 0)], bytes(32)), "0 dimensions"),
        "five dims": (g([], [i("w", [1] * 5, 0, 0)], bytes(32)), "5 dimensions"),
        "million dims": (g([], [i("w", [1], 0, 0, n_dims=10**6)], bytes(32)), "1000000 dimensions"),
        "zero dim": (g([], [i("w", [2, 0], 0, 0)], bytes(32)), "from 1 to"),
        "product 2**64": (g([], [i("w", [1 << 32, 1 << 32], 0, 0)], bytes(64)), "larger than any"),
        "product wraps to 8": (
            g([], [i("w", [(1 << 62) + 2, 4], 0, 0)], bytes(64)),
            "larger than any",
        ),
        "2**42 + 1": (g([], [i("w", [(1 << 42) + 1], 0, 0)], bytes(64)), "cut off"),
        "block": (g([], [i("w", [33], 2, 0)], bytes(64)), "block of 32"),
        "row, not whole": (g([], [i("w", [16, 2], 2, 0)], bytes(64)), "block of 32"),
        "k block": (g([], [i("w", [32], 12, 0)], bytes(256)), "block of 256"),
        "not aligned": (g([], [i("w", [2], 0, 4)], bytes(64)), "multiple of 32"),
        "on another": (
            g([], [i("w", [64], 0, 0), i("v", [2], 0, 32)], bytes(512)),
            "inside tensor",
        ),
        "same place": (g([], [i("w", [2], 0, 0), i("v", [2], 0, 0)], bytes(64)), "inside tensor"),
        "past the end": (g([], [i("w", [9], 0, 0)], bytes(32)), "data section has 32"),
        "no data": (g([], one), "data section has"),
        "alignment text": (
            g([k("general.alignment", forge.STR, "32")], one, bytes(64)),
            "alignment",
        ),
        "alignment bool": (g([k("general.alignment", forge.BOOL, 1)], one, bytes(64)), "alignment"),
    }
    for kind in (forge.I32, forge.U64, forge.U8):
        keys = [k("general.alignment", kind, 32)]
        cases[f"alignment type {kind}"] = (g(keys, one, bytes(64)), "alignment has value type")
    for alignment in [0, 3, 24, 1 << 17, (1 << 32) - 1]:
        keys = [k("general.alignment", forge.U32, alignment)]
        cases[f"alignment {alignment}"] = (g(keys, one, bytes(64)), "general.alignment is")
    for offset in [1 << 31, 1 << 62, (1 << 63) - 32, (1 << 64) - 32]:
        cases[f"offset {offset}"] = (g([], [i("w", [2], 0, offset)], bytes(64)), "cut off")
    for dim in BIG:
        cases[f"dim {dim}"] = (g([], [i("w", [dim], 0, 0)], bytes(64)), "larger|from 1|cut off")
    for kind in [4, 5, 9, 10, 11, *range(15, 30), *range(31, 42), 99, (1 << 32) - 1]:
        cases[f"type {kind}"] = (
            g([], [i("blk.0.w", [256], kind, 0)], bytes(2048)),
            rf"'blk.0.w' is \w+ \(type {kind}\).*Q4_K",
        )
    for kind in [13, 99, (1 << 32) - 1]:
        cases[f"value type {kind}"] = (
            g([k("a", kind, b"\0" * 8)], []),
            f"'a': value type {kind} is unknown",
        )
        cases[f"element type {kind}"] = (
            g([k("a", forge.ARR, struct.pack("<IQ", kind, 1) + bytes(8))], []),
            f"'a': value type {kind} is unknown",
        )
    for count in BIG:
        cases[f"keys {count}"] = (g([], [], n_keys=count), "at most 65536")
        cases[f"tensors {count}"] = (g([], [], n_tensors=count), "at most 65536")
        cases[f"key length {count}"] = (g([forge.text("a", count)], [], n_keys=1), "at most 65536")
        body = forge.text("abc", count)
        plain = forge.text("a") + struct.pack("<I", forge.STR) + body
        cases[f"string length {count}"] = (g([plain], []), "'a': the string takes")
        cases[f"inner length {count}"] = (
            g([k("a", forge.ARR, struct.pack("<IQ", forge.STR, 1) + body)], []),
            "'a': string 0 takes",
        )
        for kind in (forge.U8, forge.BOOL, forge.STR, forge.F64, forge.ARR):
            payload = struct.pack("<IQ", kind, count) + bytes(64)
            cases[f"array {kind} {count}"] = (
                g([k("a", forge.ARR, payload)], []),
                "'a': an array of",
            )
        name = forge.text("w", count) + bytes(24)
        cases[f"name length {count}"] = (g([], [name]), "at most 65536")
    return cases


CASES = {
    **{
        f"safetensors: {name}": (".safetensors", *case)
        for name, case in safetensors_cases().items()
    },
    **{f"gguf: {name}": (".gguf", *case) for name, case in gguf_cases().items()},
}


def run_worker(paths: list[Path], timeout: float = 60) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("limits_worker.py"))],
        input="\n".join(map(str, paths)),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    results = map(json.loads, done.stdout.splitlines())
    return {result["path"]: result for result in results}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("hostile")
    paths = []
    for number, (suffix, data, _) in enumerate(CASES.values()):
        paths.append(folder / f"{number}{suffix}")
        paths[-1].write_bytes(data)
    found = run_worker(paths)
    return {name: found[path.name] for name, path in zip(CASES, paths, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_one_typed_error_at_once(name: str, results: dict[str, dict[str, Any]]) -> None:
    result = results[name]
    assert result.get("error") == "WeightFormatError", result
    assert result["seconds"] < 1
    assert result["grown_mb"] < 100
    assert len(result["message"]) < 1500
    assert re.search(CASES[name][2], result["message"]), result["message"]


def large_files(folder: Path) -> list[Path]:
    """Files of some 60 to 90 MB whose headers ask for ten times as much as Python objects."""
    head = struct.pack("<Q", 60_000_000)
    (folder / "a.safetensors").write_bytes(head + b"{" + b"[" * 60_000_000)
    (folder / "b.safetensors").write_bytes(head[:8] + bytes(60_000_000))
    wide = b'{"a": "' + b"\xf0\x9f\x99\x82" + b"x" * 8_000_000 + b'"}'  # 4 bytes a character
    (folder / "c.safetensors").write_bytes(struct.pack("<Q", len(wide)) + wide)
    pairs = b'{"a":[' + b'"aa",' * 499_000 + b"0]}"
    (folder / "d.safetensors").write_bytes(struct.pack("<Q", len(pairs)) + pairs)
    empty = struct.pack("<Q", 2) + b"ab"
    bodies = {
        "u8": (forge.U8, 60_000_000, bytes(60_000_000)),
        "f64": (forge.F64, 8_000_000, bytes(64_000_000)),
        "str": (forge.STR, 6_000_000, empty * 6_000_000),
        "arr": (forge.ARR, 5_000_000, struct.pack("<IQ", 0, 0) * 5_000_000),
        "wide": (forge.STR, 1, struct.pack("<Q", 60_000_000) + b"\xf0\x9f\x99\x82" * 15_000_000),
    }
    for name, (kind, count, body) in bodies.items():
        key = forge.key("a", forge.ARR, struct.pack("<IQ", kind, count) + body)
        (folder / f"{name}.gguf").write_bytes(forge.gguf([key], []))
    return sorted(folder.iterdir())


def test_large_headers_cannot_make_us_allocate(tmp_path: Path) -> None:
    for path in large_files(tmp_path):
        result = run_worker([path])[path.name]  # one process each: peaks must not hide each other
        assert result.get("error") == "WeightFormatError", result
        assert result["seconds"] < 1, result
        # Pages of the mapped file count as resident, too; they can be dropped at any time.
        assert result["grown_mb"] < 100, result
        path.unlink()


def test_a_pipe_and_a_folder_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.gguf")
    (tmp_path / "d.safetensors").mkdir()
    found = run_worker([tmp_path / "p.gguf", tmp_path / "d.safetensors"], timeout=20)
    for result in found.values():
        assert result["error"] == "WeightFormatError"
        assert "not a regular file" in result["message"]
