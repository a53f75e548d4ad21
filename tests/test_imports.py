"""Imports point downwards only, as the architecture document says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "seethrough"
ARCHITECTURE = ROOT / "docs" / "architecture.md"

BOTTOM = {"errors", "config"}
LEAVES = {"text", "weights", "kernels", "stages"}
BELOW_ENGINE = LEAVES | {"model", "kv", "sampling"}
# What each package may import besides itself and the bottom. `llm`, `cli` and the package's own
# front door stand on top and may import everything.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": set(),
    "text": set(),
    "weights": set(),
    "kernels": set(),
    "stages": set(),
    "stages_doc": {"stages"},
    "kv": {"kernels"},
    "model": {"kernels", "kv", "weights", "stages"},
    "sampling": {"kernels"},
    "pipeline": {"model", "sampling"},
    "engine": BELOW_ENGINE,
    "trace": BELOW_ENGINE | {"engine"},
}
TOP = {"__init__", "__main__", "llm", "async_llm", "cli"}
# The pipeline is an oracle: it may share data and tables with the model, never its arithmetic.
PIPELINE_MAY = {"seethrough.model.spec", "seethrough.model.positions"}


def package_of(module: str) -> str:
    """`seethrough.text.chat` -> `text`; `seethrough` itself -> `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(nodes: Iterable[ast.AST], path: Path) -> list[str]:
    """Modules of ours that these nodes import."""
    found: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = source_of(node, path)
            found += [name_in(base, alias.name) for alias in node.names]
    return [name for name in found if name.split(".")[0] == "seethrough"]


def source_of(node: ast.ImportFrom, path: Path) -> str:
    """The module that `from … import` names; dots count from the file's own package."""
    if node.level == 0:
        return node.module or ""
    package = path.relative_to(SOURCE.parent).parent.parts
    return ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])


def name_in(module: str, name: str) -> str:
    """`from seethrough import pipeline` means the module `seethrough.pipeline`."""
    inside = SOURCE.parent.joinpath(*module.split("."), name)
    is_module = inside.is_dir() or inside.with_suffix(".py").exists()
    return f"{module}.{name}" if is_module else module


FILES = sorted(SOURCE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
# Every import, also inside functions and for type checking only.
EDGES = {module_of(path): imported(ast.walk(tree), path) for path, tree in TREES.items()}
PACKAGES = {package_of(module) for module in EDGES}


def test_the_check_sees_the_sources() -> None:
    assert len(FILES) > 40
    assert "seethrough.kernels.reference" in EDGES["seethrough.model.load"]
    assert "seethrough.pipeline" in {name_in("seethrough", "pipeline")}


def test_every_package_has_its_place() -> None:
    assert ALLOWED.keys() | TOP >= PACKAGES
    assert not ALLOWED.keys() & TOP


@pytest.mark.parametrize("module", EDGES)
def test_imports_point_downwards(module: str) -> None:
    own = package_of(module)
    if own in TOP:
        return
    allowed = ALLOWED[own] | BOTTOM | {own}
    upwards = [name for name in EDGES[module] if package_of(name) not in allowed]
    assert not upwards, f"{module} imports {upwards}"


def test_bottom_imports_nothing_but_errors() -> None:
    assert EDGES["seethrough.errors"] == []
    assert set(EDGES["seethrough.config"]) <= {"seethrough.errors"}


def test_pipeline_shares_no_arithmetic_with_the_model() -> None:
    names = EDGES["seethrough.pipeline"]
    assert {name for name in names if package_of(name) == "model"} <= PIPELINE_MAY


def test_nothing_but_the_top_and_the_tests_uses_the_pipeline() -> None:
    users = [m for m, names in EDGES.items() if "seethrough.pipeline" in names]
    assert all(package_of(user) in TOP for user in users)


def test_no_cycles_between_modules() -> None:
    """While modules are imported; what a function imports when it is called comes later."""
    graph = {module_of(p): set(imported(TREES[p].body, p)) for p in FILES}
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_every_package_is_in_the_architecture_document() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    table = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    named = {name.removesuffix(".py") for name in re.findall(r"`(\w+(?:\.py)?)`", table)}
    unsaid = {"__init__", "__main__", "stages_doc"}  # fronts, and the maker of a document
    assert PACKAGES - unsaid <= named
    assert named & {"text", "weights", "model"}


def test_the_document_says_the_same_edges() -> None:
    """The sentence about imports, clause by clause."""
    flat = " ".join(ARCHITECTURE.read_text(encoding="utf-8").split())
    assert "`text`, `weights`, `kernels` and `stages` know nothing above them" in flat
    for package in ("kv", "model", "sampling"):
        clause = re.search(rf"`{package}` knows ([^;]+);", flat)
        assert clause is not None, package
        assert set(re.findall(r"`(\w+)`", clause[1])) == ALLOWED[package]
