"""Reads safetensors: a JSON header, then one data section that the tensors tile without a gap.

Format: https://huggingface.co/docs/safetensors. Knows no architecture; does not read pickles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seethrough.errors import WeightFormatError
from seethrough.weights.mapping import map_file
from seethrough.weights.strict_json import MAX_JSON_BYTES, parse_object, read_object
from seethrough.weights.tensor import BF16, F16, F32, DType, Tensor

_READ: dict[str, DType] = {"F32": F32, "F16": F16, "BF16": BF16}
SUPPORTED = ", ".join(_READ)
# Bits per element of every type that the format knows: sizes are checked also where not read.
_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """What a file (or an index with its shards) holds.

    `unsupported` maps names of tensors of other types (stored masks, position ids) to the type: who
    builds a model decides by name whether one of them matters.
    """

    path: Path
    tensors: dict[str, Tensor]
    unsupported: dict[str, str]
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def open_safetensors(path: Path | str) -> SafetensorsFile:
    """Map one file and check its header whole; `WeightFormatError` on anything out of order."""
    path = Path(path)
    mapped = map_file(path)
    size = int(mapped.size)
    if size < 8:
        raise WeightFormatError(path, f"has {size} bytes; a safetensors file has at least 8")
    length = int.from_bytes(mapped[:8].tobytes(), "little")
    if length > size - 8:
        raise WeightFormatError(
            path,
            f"says that its header has {length} bytes, but only {size - 8} follow: cut off, or not "
            "a safetensors file. Fetch it again.",
        )
    if length > MAX_JSON_BYTES:
        raise WeightFormatError(
            path, f"its header has {length} bytes, more than the limit of {MAX_JSON_BYTES}"
        )
    raw = mapped[8 : 8 + length].tobytes()
    if raw[:1] != b"{":
        raise WeightFormatError(path, "its header does not start with '{': not a safetensors file")
    header = parse_object(raw, path, "the header")
    data = mapped[8 + length :]
    metadata = _metadata(header.pop("__metadata__", {}), path)
    entries = [_entry(name, value, path) for name, value in header.items()]
    _check_tiling(entries, int(data.size), path)
    tensors = {
        e.name: Tensor(e.name, _READ[e.dtype], e.shape, data[e.begin : e.end])
        for e in entries
        if e.dtype in _READ
    }
    unsupported = {e.name: e.dtype for e in entries if e.dtype not in _READ}
    return SafetensorsFile(path, tensors, unsupported, metadata)


def _metadata(value: Any, path: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise WeightFormatError(path, "__metadata__ must map strings to strings")
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63  # bool is an int too, and is refused


def _entry(name: str, value: Any, path: Path) -> _Entry:
    """One header entry, checked by itself: keys, types, and that shape and range agree."""
    what = f"tensor {name[:200]!r}"
    if not name:
        raise WeightFormatError(path, "a tensor has an empty name")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise WeightFormatError(path, f"{what} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise WeightFormatError(
            path, f"{what} has the unknown dtype {str(dtype)[:40]!r}; read are {SUPPORTED}"
        )
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape):
        raise WeightFormatError(path, f"{what}: shape must be a list of integers from 0")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise WeightFormatError(path, f"{what}: data_offsets must be two integers from 0")
    begin, end = offsets
    if begin > end:
        raise WeightFormatError(path, f"{what} ends at {end}, before its start at {begin}")
    try:
        needed = _nbytes(dtype, shape)
    except ValueError as error:
        raise WeightFormatError(path, f"{what}: {error}") from None
    if end - begin != needed:
        raise WeightFormatError(
            path, f"{what}: {dtype} {shape} takes {needed} bytes, its range has {end - begin}"
        )
    return _Entry(name, dtype, tuple(shape), begin, end)


def _nbytes(dtype: str, shape: list[int]) -> int:
    if dtype in _READ:
        return _READ[dtype].nbytes(shape)
    bits = _BITS[dtype] * math.prod(shape[:65])
    if len(shape) > 64 or bits % 8:
        raise ValueError(f"{dtype} of {len(shape)} dimensions does not fill whole bytes")
    return bits // 8


def _check_tiling(entries: list[_Entry], size: int, path: Path) -> None:
    """The ranges, sorted, must cover the data section from 0 to its end, each byte once."""
    at, before = 0, "the start of the data"
    for entry in sorted(entries, key=lambda e: (e.begin, e.end)):
        if entry.begin != at:
            kind = "overlaps" if entry.begin < at else "leaves a gap after"
            raise WeightFormatError(
                path,
                f"tensor {entry.name[:200]!r} at {entry.begin} {kind} {before} (ending at {at})",
            )
        at, before = entry.end, f"tensor {entry.name[:200]!r}"
    if at > size:
        raise WeightFormatError(
            path,
            f"is cut off: its tensors take {at} bytes, but {size} are there. Fetch it again.",
        )
    if at < size:
        raise WeightFormatError(path, f"has {size - at} bytes after its last tensor")


def read_index(path: Path | str) -> dict[str, tuple[str, ...]]:
    """Shard file name -> names of its tensors, from a `model.safetensors.index.json`.

    A shard is a plain file name beside the index: anything that could leave the folder is refused.
    """
    path = Path(path)
    weight_map = read_object(path, "the index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightFormatError(path, "the index has no weight_map of tensor names to shard files")
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if (
            not isinstance(shard, str)
            or not shard.endswith(".safetensors")
            or shard.startswith(".")
            or any(c in shard for c in "/\\\0")
        ):
            raise WeightFormatError(
                path,
                f"tensor {name[:200]!r} is said to lie in {str(shard)[:200]!r}; a shard is a plain "
                "file name ending in .safetensors, beside the index",
            )
        shards.setdefault(shard, []).append(name)
    return {shard: tuple(names) for shard, names in sorted(shards.items())}


def open_index(path: Path | str) -> SafetensorsFile:
    """Open the shards that an index names. Index and shards must agree on every tensor."""
    path = Path(path)
    tensors: dict[str, Tensor] = {}
    unsupported: dict[str, str] = {}
    metadata: dict[str, str] = {}
    for shard, listed in read_index(path).items():
        part = open_safetensors(path.parent / shard)
        held, expected = part.tensors.keys() | part.unsupported.keys(), set(listed)
        if missing := sorted(expected - held):
            raise WeightFormatError(
                path, f"places {_some(missing)} in {shard}, but the shard does not hold it"
            )
        if extra := sorted(held - expected):
            raise WeightFormatError(
                path,
                f"{shard} holds {_some(extra)}, which the index does not place there. Index and "
                "shards are of different versions; fetch both again.",
            )
        tensors |= part.tensors
        unsupported |= part.unsupported
        metadata |= part.metadata
    return SafetensorsFile(path, tensors, unsupported, metadata)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"tensor {names[0][:200]!r}{more}"
