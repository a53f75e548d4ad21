"""Kernels on disk: found again, told apart, and never trusted when damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from seethrough.kernels.cpu.compiled import Kernels
from seethrough.kernels.cpu.simd import inline, load_i64, store_i64


def adder(amount: int) -> Callable[..., None]:
    """A kernel that calls a helper; kernel and helper have the same names for every amount."""

    @inline
    def helper(at: int) -> int:
        total = 0
        for i in range(load_i64(at)):
            for j in range(load_i64(at + 8)):
                total += (amount ^ (total >> 3)) + load_i64(at + 8 * ((i + j) & 1))
            for j in range(load_i64(at)):
                total ^= amount + (total << 1) + load_i64(at + 8 * ((i ^ j) & 1))
        return total

    def kernel(at: int, to: int) -> None:
        # Called so often that the compiler leaves it a function of its own.
        store_i64(to, helper(at) + helper(at + 8) + helper(at + 16))
        store_i64(to + 8, helper(at + 8) ^ helper(at))
        store_i64(to + 16, helper(at + 16) ^ helper(at + 8))

    return kernel


def expected(amount: int) -> list[int]:
    """The same in Python's integers, held to 64 bits."""
    data = DATA.tolist()

    def helper(at: int) -> int:
        total = 0
        for i in range(data[at]):
            for j in range(data[at + 1]):
                total += (amount ^ (total >> 3)) + data[at + ((i + j) & 1)]
            for j in range(data[at]):
                total ^= amount + (total << 1) + data[at + ((i ^ j) & 1)]
        return total

    a, b, c = helper(0), helper(1), helper(2)
    return [a + b + c, b ^ a, c ^ b]


DATA = np.array([3, 2, 1, 2], dtype=np.int64)


def run(kernels: Kernels, name: str, amount: int) -> list[int]:
    out = np.empty(3, dtype=np.int64)
    kernels.callable(name, 2, adder(amount))(DATA.ctypes.data, out.ctypes.data)
    return out.tolist()


def compile_one(directory: Path, amount: int) -> list[int]:
    return run(Kernels(directory), f"test_{amount}", amount)


def test_kernels_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    """Two fresh processes compile alike, so their functions have the same symbols."""
    for amount in (10, 1000):
        command = [sys.executable, __file__, str(tmp_path), str(amount)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stderr
        assert json.loads(ran.stdout) == expected(amount)
    together = Kernels(tmp_path)
    assert [run(together, f"test_{a}", a) for a in (1000, 10)] == [expected(1000), expected(10)]
    assert together.compiled == []


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "a folder"])
def test_a_damaged_kernel_is_compiled_again(tmp_path: Path, damage: str) -> None:
    assert compile_one(tmp_path, 7) == expected(7)
    (path,) = tmp_path.glob("*/test_7")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "a folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"cut": data[:-9], "flipped": data, "empty": b""}[damage])
    kernels = Kernels(tmp_path)
    assert run(kernels, "test_7", 7) == expected(7)
    assert kernels.compiled == ["test_7"]
    assert not list(tmp_path.glob("*/*.*"))  # no temporary file stays behind
    if damage == "a folder":  # cannot be replaced by a file
        assert "test_7" in str(kernels.unkept)
        return
    assert kernels.unkept is None
    assert Kernels(tmp_path).callable("test_7", 2)


def test_a_folder_that_cannot_be_written_costs_the_next_start_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kernels = Kernels(tmp_path / "file" / "kernels")
    assert run(kernels, "test_3", 3) == expected(3)
    assert "file" in str(kernels.unkept)


if __name__ == "__main__":
    print(json.dumps(compile_one(Path(sys.argv[1]), int(sys.argv[2]))))
