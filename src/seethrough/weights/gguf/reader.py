"""Reads a GGUF file (versions 2 and 3, little-endian): metadata, then tensors as views of the map.

The header is distrusted: every count, length, dimension and offset is checked against the file
before use. `general.file_type` is never used: each tensor states its own type. Knows no
architecture. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from seethrough.errors import WeightFormatError
from seethrough.weights.gguf.metadata import MAX_NAME_BYTES, UINT32, Cursor, Value, read_metadata
from seethrough.weights.mapping import map_file
from seethrough.weights.tensor import DTYPES, DType, Tensor

MAGIC = b"GGUF"
MAX_TENSORS = 1 << 16
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 16
_DEFAULT_ALIGNMENT = 32

# ggml's type numbers. Those in DTYPES are read; the others are here so that an error can name them.
_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A file's version, metadata (arrays are lists) and tensors in NumPy's order of dimensions."""

    path: Path
    version: int
    metadata: dict[str, Value]
    tensors: dict[str, Tensor]


class _Info(NamedTuple):
    name: str
    dtype: DType
    shape: tuple[int, ...]  # NumPy order
    nbytes: int
    offset: int  # from the start of the data section


def open_gguf(path: Path | str) -> GGUFFile:
    """Map one file and check its header whole; `WeightFormatError` on anything out of order."""
    path = Path(path)
    cursor = Cursor(map_file(path), path)
    version = _read_version(cursor)
    tensor_count, key_count = cursor.u64("the tensor count"), cursor.u64("the key count")
    if tensor_count > MAX_TENSORS:
        raise cursor.fail(f"{tensor_count} tensors are stated, at most {MAX_TENSORS} are read")
    metadata, kinds = read_metadata(cursor, key_count)
    infos = _read_infos(cursor, tensor_count)
    cursor.key = "the data section"
    tensors = _place(cursor, infos, _alignment(metadata, kinds, path))
    return GGUFFile(path, version, metadata, tensors)


def _read_version(cursor: Cursor) -> int:
    """Magic and version. The magic alone does not tell the byte order, the version does."""
    magic = cursor.data[:4].tobytes()
    if magic != MAGIC:
        raise WeightFormatError(cursor.path, f"starts with {magic!r}, not b'GGUF': no GGUF file")
    cursor.at = 4
    version = cursor.u32("the version")
    if version & 0xFFFF == 0 and version:
        raise WeightFormatError(
            cursor.path, "is a big-endian GGUF file; only little-endian ones are read"
        )
    if version not in (2, 3):
        older = " Convert it again with a current llama.cpp." if version < 2 else ""
        raise WeightFormatError(
            cursor.path, f"is GGUF version {version}; versions 2 and 3 are read.{older}"
        )
    return version


def _read_infos(cursor: Cursor, count: int) -> list[_Info]:
    infos: list[_Info] = []
    names: set[str] = set()
    refused: list[str] = []
    for number in range(count):
        cursor.key = f"tensor {number}"
        name = cursor.text("the name", MAX_NAME_BYTES)
        cursor.key = f"tensor {name[:200]!r}"
        if not name:
            raise cursor.fail(f"tensor {number} has an empty name")
        if name in names:
            raise cursor.fail("the name appears twice")
        names.add(name)
        dims = _read_dims(cursor)
        kind, offset = cursor.u32("the type"), cursor.u64("the offset")
        dtype = DTYPES.get(_TYPE_NAMES.get(kind, ""))
        if dtype is None:
            refused.append(f"{name[:200]!r} is {_TYPE_NAMES.get(kind, 'unknown')} (type {kind})")
            continue
        shape = tuple(reversed(dims))
        try:
            infos.append(_Info(name, dtype, shape, dtype.nbytes(shape), offset))
        except ValueError as error:
            raise cursor.fail(str(error)) from None
    if refused:
        more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
        raise WeightFormatError(
            cursor.path,
            f"tensor {', '.join(refused[:3])}{more}; read are {', '.join(DTYPES)}. "
            "Use a file quantized to one of these.",
        )
    return infos


def _read_dims(cursor: Cursor) -> list[int]:
    count = cursor.u32("the number of dimensions")
    if not 1 <= count <= MAX_DIMS:
        raise cursor.fail(f"it has {count} dimensions, expected 1 to {MAX_DIMS}")
    dims = [cursor.u64("a dimension") for _ in range(count)]
    if not all(0 < n < 1 << 63 for n in dims):
        raise cursor.fail(f"dimensions {dims} must be from 1 to 2**63 - 1")
    return dims


def _alignment(metadata: dict[str, Value], kinds: dict[str, int], path: Path) -> int:
    key = "general.alignment"
    if key not in metadata:
        return _DEFAULT_ALIGNMENT
    value = metadata[key]
    # The format fixes this key's type: a reader that takes another one may place tensors elsewhere.
    if kinds[key] != UINT32 or type(value) is not int:
        raise WeightFormatError(path, f"{key} has value type {kinds[key]}, expected {UINT32} (u32)")
    if not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise WeightFormatError(
            path, f"{key} is {value}; expected a power of two up to {MAX_ALIGNMENT}"
        )
    return value


def _place(cursor: Cursor, infos: list[_Info], alignment: int) -> dict[str, Tensor]:
    """Cut each tensor out of the data section: aligned, inside the file, none on another."""
    start = -(-cursor.at // alignment) * alignment
    size = max(0, int(cursor.data.size) - start)
    end, before = 0, ""
    for info in sorted(infos, key=lambda i: i.offset):
        cursor.key = f"tensor {info.name[:200]!r}"
        if info.offset % alignment:
            raise cursor.fail(f"offset {info.offset} is not a multiple of {alignment}")
        if info.offset < end:
            raise cursor.fail(f"offset {info.offset} lies inside tensor {before[:200]!r}")
        end, before = info.offset + info.nbytes, info.name
        if end > size:
            raise cursor.fail(
                f"its {info.nbytes} bytes end at {end}, but the data section has {size}: the file "
                "is cut off or damaged. Fetch it again."
            )
    data = cursor.data[start:]
    return {
        i.name: Tensor(i.name, i.dtype, i.shape, data[i.offset : i.offset + i.nbytes])
        for i in infos
    }
