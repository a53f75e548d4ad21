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


def loosened(text: str) -> list[str]:
    """Lines of LLVM code, and attributes of its functions, that let floats be reordered or fused.

    A flag stands among the words between an instruction's name and its type, as in
    `fadd fast float`, `call contract <16 x float> @f(...)`, `select nnan`, `fneg`, `phi`.
    """
    found = []
    for line in text.splitlines():
        words = line.partition("=")[2].split() if "=" in line else line.split()
        head = [word for word in words[:6] if not word.startswith(("@", "%"))]
        named = any(part in line for part in ("llvm.fmuladd", '"unsafe-fp-math"="true"'))
        if FLAGS & set(head) or named:
            found.append(line.strip())
    return found


@pytest.mark.parametrize(
    "line",
    [
        "%3 = fadd fast float %1, %2",
        "%3 = fsub reassoc contract <16 x float> %1, %2",
        "%3 = call fast float @llvm.sqrt.f32(float %1)",
        "%3 = tail call contract <16 x float> @llvm.fma.v16f32(<16 x float> %1)",
        "%3 = fneg nnan float %1",
        "%3 = select nsz i1 %0, float %1, float %2",
        "%3 = phi fast float [ %1, %a ], [ %2, %b ]",
        "%3 = fcmp ninf olt float %1, %2",
        "%3 = call float @llvm.fmuladd.f32(float %0, float %1, float %2)",
        'attributes #0 = { nounwind "unsafe-fp-math"="true" }',
    ],
)
def test_the_check_of_the_code_finds(line: str) -> None:
    assert loosened(line) == [line]


@pytest.mark.parametrize(
    "line",
    [
        "%3 = fadd float %1, %2",
        "%3 = add nsw i64 %fast, 1",
        "%3 = call float @fast(float %contract)",
        "br label %fast",
    ],
)
def test_the_check_of_the_code_lets_pass(line: str) -> None:
    assert loosened(line) == []


def llvm_of(name: str) -> str:
    """What the compiler was given at last: LLVM's own text."""
    function = build(name)
    signature = types.void(*[types.int64] * function.__code__.co_argcount)
    dispatcher = numba.njit(signature, error_model="numpy")(function)
    (text,) = dispatcher.inspect_llvm().values()
    return str(text)


@pytest.mark.parametrize("name", ["linear_Q4_1", "attend_2", "rms_norm", "gate_silu"])
def test_no_kernel_has_such_a_flag_in_its_code(name: str) -> None:
    text = llvm_of(name)
    assert sum(f" {op} " in text for op in ("fadd", "fsub", "fmul", "fdiv", "fcmp")) >= 2
    assert loosened(text) == []


def test_the_flag_of_a_real_compilation_is_found() -> None:
    """Numba told to be fast says so where the check looks."""

    def total(n: int) -> float:
        found = 0.0
        for i in range(n):
            found += i * 0.1
        return found

    compiled = numba.njit("float64(int64)", fastmath=True)(total)
    (text,) = compiled.inspect_llvm().values()
    assert loosened(str(text))
