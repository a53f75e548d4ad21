"""No source asks the compiler to reorder or contract floating point: the promise needs that."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest
from numba.core import types

import seethrough
from seethrough.kernels.cpu.library import build

SOURCE = Path(seethrough.__file__).parent
# https://llvm.org/docs/LangRef.html#fast-math-flags
FLAGS = {"fast", "nnan", "ninf", "nsz", "arcp", "contract", "afn", "reassoc"}
LICENCES = {"fastmath", "parallel"}  # of numba.njit


def licences(source: str) -> Iterator[str]:
    """What in a source would let float operations be regrouped, fused or shared out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword):
            given = node.value.value if isinstance(node.value, ast.Constant) else True
            if (node.arg in LICENCES and given) or node.arg == "flags":
                yield f"line {node.value.lineno}: {node.arg}="
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = set(node.value.replace(".", " ").split())
            if node.value in FLAGS or "fmuladd" in words:
                yield f"line {node.lineno}: {node.value!r}"
        if isinstance(node, (ast.Attribute, ast.Name)):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name == "prange":
                yield f"line {node.lineno}: prange"


@pytest.mark.parametrize("package", ["kernels", "model", "sampling"])
def test_no_source_lets_floats_be_reordered(package: str) -> None:
    found = {
        str(path): list(licences(path.read_text(encoding="utf-8")))
        for path in (SOURCE / package).rglob("*.py")
    }
    assert len(found) > 5
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "bad",
    [
        "numba.njit(fastmath=True)(f)",
        "@njit(fastmath={'contract'})\ndef f(): ...",
        "njit(parallel=True)",
        "for i in numba.prange(3): ...",
        "b.fadd(x, y, flags=('fast',))",
        "b.fadd(x, y, flags)\nflags = ['reassoc']",
        "call(b, 'llvm.fmuladd.v16f32', VF, x, y, z)",
    ],
)
def test_the_check_finds(bad: str) -> None:
    assert list(licences(bad))


@pytest.mark.parametrize("name", ["linear_Q4_1", "attend_2", "rms_norm", "gate_silu"])
def test_no_kernel_has_such_a_flag_in_its_code(name: str) -> None:
    """What the compiler was given at last: LLVM's own text."""
    function = build(name)
    signature = types.void(*[types.int64] * function.__code__.co_argcount)
    dispatcher = numba.njit(signature, error_model="numpy")(function)
    (text,) = dispatcher.inspect_llvm().values()
    floats = [
        line.split()
        for line in text.splitlines()
        if any(f" {op} " in line for op in ("fadd", "fsub", "fmul", "fdiv", "fcmp"))
    ]
    assert len(floats) > 3
    assert not [line for line in floats if FLAGS & set(line)]
    assert "llvm.fmuladd" not in text
