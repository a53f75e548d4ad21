"""Writes safetensors and GGUF files byte by byte, so that any field can lie."""

from __future__ import annotations

import json
import struct
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
_CODES = {
    U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q",
    I64: "q", F64: "d",
}  # fmt: skip


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """`header` is JSON data, text or bytes; `length` is what the file states, where it lies."""
    if not isinstance(header, (str, bytes)):
        header = json.dumps(header)
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def scalar(kind: int, value: Any, order: str = "<") -> bytes:
    return text(value) if kind == STR else struct.pack(order + _CODES[kind], value)


def array(kind: int, values: list[Any], count: int | None = None) -> bytes:
    """The payload of an array value; for kind ARR the values are payloads of arrays."""
    body = b"".join(v if kind == ARR else scalar(kind, v) for v in values)
    return struct.pack("<IQ", kind, len(values) if count is None else count) + body


def key(name: str | bytes, kind: int, payload: Any) -> bytes:
    body = payload if isinstance(payload, bytes) and kind != STR else scalar(kind, payload)
    return text(name) + struct.pack("<I", kind) + body


def info(
    name: str | bytes, dims: list[int], kind: int, offset: int, n_dims: int | None = None
) -> bytes:
    head = text(name) + struct.pack("<I", len(dims) if n_dims is None else n_dims)
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def gguf(
    keys: list[bytes],
    infos: list[bytes],
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = (
        len(infos) if n_tensors is None else n_tensors,
        len(keys) if n_keys is None else n_keys,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(infos)
    return head + b"\0" * (-len(head) % alignment if data else 0) + data
