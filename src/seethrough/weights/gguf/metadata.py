"""GGUF's key-value section: values of 13 types, read in order. Knows no key's meaning.

A length that a file states is compared with the bytes that are left before anything is made of it,
and all that is made is counted against one budget, so no file can cost more than that.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import sys
from pathlib import Path
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from seethrough.errors import WeightFormatError

Value = bool | int | float | str | list["Value"]

# Bytes of Python objects that the metadata may take. The largest vocabularies in use (260,000
# tokens with scores, types and 510,000 merges) take about 60 MB.
METADATA_BUDGET = 80 << 20
MAX_ARRAY_DEPTH = 4
MAX_ENTRIES = 1 << 16
MAX_NAME_BYTES = 1 << 16  # of a key; tensor names are shorter
_BOOL, _STRING, _ARRAY = 7, 8, 9
UINT32 = 4
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "<u1",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_U32, _U64 = Struct("<I"), Struct("<Q")
_WINDOW = 1 << 16  # bytes of a string array that are decoded between two looks at the budget


class Cursor:
    """A position in the mapped bytes; every read checks what is left. `key` is for messages."""

    def __init__(self, data: NDArray[np.uint8], path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0
        self.key = "the header"
        self._budget = METADATA_BUDGET

    def fail(self, why: str) -> WeightFormatError:
        """The error to raise, naming the key that is being read."""
        return WeightFormatError(self.path, f"{self.key}: {why}")

    def _need(self, count: int, what: str) -> int:
        """Step over `count` bytes and return where they start."""
        start, left = self.at, self.data.size - self.at
        if count > left:
            raise self.fail(
                f"{what} takes {count} bytes at offset {start}, but {left} are left: the file is "
                "cut off or damaged. Fetch it again."
            )
        self.at = start + count
        return start

    def _spend(self, count: int) -> None:
        if count > self._budget:
            raise self.fail(f"the metadata would take more than {METADATA_BUDGET >> 20} MiB")
        self._budget -= count

    def u32(self, what: str) -> int:
        """One unsigned 32-bit number."""
        value: int = _U32.unpack_from(self.data.data, self._need(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        """One unsigned 64-bit number."""
        value: int = _U64.unpack_from(self.data.data, self._need(8, what))[0]
        return value

    def text(self, what: str, limit: int | None = None) -> str:
        """A length and that many bytes of UTF-8."""
        length = self.u64(f"the length of {what}")
        if limit is not None and length > limit:
            raise self.fail(f"{what} has {length} bytes, at most {limit} are read")
        start = self._need(length, what)
        self._spend(4 * length)  # one character beyond U+FFFF makes Python keep 4 bytes for each
        try:
            value = str(self.data[start : self.at].data, "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not valid UTF-8 ({error.reason})") from None
        self._budget += 4 * length
        self._spend(sys.getsizeof(value))
        return value

    def value(self, kind: int) -> Value:
        """A value of the type with this number."""
        if kind == _STRING:
            return self.text("the string")
        if kind == _ARRAY:
            return self._array(1)
        return self._numbers(kind, 1)[0]

    def _array(self, depth: int) -> list[Value]:
        kind, count = self.u32("the array's element type"), self.u64("the array's length")
        if depth > MAX_ARRAY_DEPTH:
            raise self.fail(f"arrays are nested deeper than {MAX_ARRAY_DEPTH}")
        if kind == _STRING:
            return self._strings(count)
        if kind != _ARRAY:
            return self._numbers(kind, count)
        self._fits(count, 12)
        self._spend(count * (sys.getsizeof([]) + 8))
        return [self._array(depth + 1) for _ in range(count)]

    def _fits(self, count: int, least: int) -> None:
        """Refuse a count whose elements, at their smallest, would pass the end of the file."""
        start = self._need(count * least, f"an array of {count} elements")
        self.at = start

    def _numbers(self, kind: int, count: int) -> list[Value]:
        code = _SCALARS.get(kind)
        if code is None:
            raise self.fail(f"value type {kind} is unknown (0 to 12 are known)")
        dtype = np.dtype(code)
        start = self._need(count * dtype.itemsize, f"an array of {count} numbers")
        # A list slot and a number; CPython keeps all integers up to 256 ready.
        self._spend(count * (8 if code == "<u1" else 40))
        numbers = self.data[start : self.at].view(dtype)
        if kind != _BOOL:
            return list(numbers.tolist())
        if numbers.size and numbers.max() > 1:
            raise self.fail(f"a bool is stored as {int(numbers.max())}, expected 0 or 1")
        return list(numbers.astype(np.bool_).tolist())

    def _strings(self, count: int) -> list[Value]:
        """`count` strings, decoded window by window: vocabularies have hundreds of thousands."""
        self._fits(count, 8)
        self._spend(8 * count)
        found: list[str] = []
        while len(found) < count:
            first, start = len(found), self.at
            window = self.data[self.at : self.at + _WINDOW].tobytes()
            try:
                self.at += _decode_strings(window, count - first, found)
            except UnicodeDecodeError as error:
                raise self.fail(f"string {len(found)} is not UTF-8 ({error.reason})") from None
            self._spend(_cost(found[first:], self.data[start : self.at]))
            if len(found) == first:  # longer than the window, or cut off
                found.append(self.text(f"string {first}"))
        return list(found)


def _cost(strings: list[str], raw: NDArray[np.uint8]) -> int:
    """At least the memory that CPython's strings take: `sys.getsizeof`, at a sixth of its time.

    Its header is 40 bytes and a final zero for ASCII, else 56 or more; a character takes 1, 2 or 4.
    """
    chars, ascii_ones = sum(map(len, strings)), sum(map(str.isascii, strings))
    if ascii_ones == len(strings):
        return 49 * len(strings) + chars
    width = 4 if raw.max() >= 0xF0 else 2  # 0xF0 starts the characters beyond U+FFFF
    return 49 * ascii_ones + 80 * (len(strings) - ascii_ones) + width * chars


def _decode_strings(window: bytes, limit: int, found: list[str]) -> int:
    """Append up to `limit` strings that lie whole in `window`; return the bytes they take."""
    at, size, unpack, append = 0, len(window), _U64.unpack_from, found.append
    for _ in range(limit):
        if at + 8 > size:
            break
        end = at + 8 + unpack(window, at)[0]
        if end > size:
            break
        append(window[at + 8 : end].decode())
        at = end
    return at


def read_metadata(cursor: Cursor, count: int) -> tuple[dict[str, Value], dict[str, int]]:
    """`count` keys with their values, and the type number of each; keys are unique, not empty."""
    if count > MAX_ENTRIES:
        raise cursor.fail(f"{count} metadata keys are stated, at most {MAX_ENTRIES} are read")
    metadata: dict[str, Value] = {}
    kinds: dict[str, int] = {}
    for number in range(count):
        cursor.key = f"metadata key {number}"
        key = cursor.text("the key", MAX_NAME_BYTES)
        if not key:
            raise cursor.fail("the key is empty")
        cursor.key = repr(key[:200])
        if key in metadata:
            raise cursor.fail("the key appears twice")
        kinds[key] = cursor.u32("the value's type")
        metadata[key] = cursor.value(kinds[key])
    return metadata, kinds
