"""`seethrough doctor`: what this machine has, what is missing, and how to mend it."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from seethrough import __version__
from seethrough.cli.messages import Speaker, size_text
from seethrough.cli.terminal import print_json
from seethrough.config import BACKENDS
from seethrough.engine.machine import (
    available_memory,
    processor,
    total_memory,
    usable_threads,
)
from seethrough.weights.catalog import DEFAULT_MODEL, default_cache_dir
from seethrough.weights.files import CachedModel, list_models

# Processor features that matter to arithmetic, as the kernel names them.
_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")
_MEMORY_NEEDED = 1_000_000_000


def run(arguments: argparse.Namespace, speaker: Speaker) -> int:
    """Print the findings; exit code 1 if something needs mending."""
    cached = list_models(arguments.cache_dir)
    findings, broken = _findings(arguments, cached, speaker)
    problems = broken + _problems(cached, speaker)
    if arguments.json:
        print_json({**findings, "problems": problems})
    else:
        for name, value in findings.items():
            print(f"{name}: {_plain(value)}")
        for problem in problems:
            print(speaker.text("doctor_mend", what=problem))
        if not problems:
            print(speaker.text("doctor_ok"))
    return 1 if problems else 0


def _findings(
    arguments: argparse.Namespace, cached: list[CachedModel], speaker: Speaker
) -> tuple[dict[str, Any], list[str]]:
    """What there is, and what went wrong while looking."""
    name, flags = processor()
    barrier, problems = _barrier(speaker)
    findings = {
        "seethrough": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": _versions(),
        "processor": name,
        "features": [flag for flag in _FEATURES if flag in flags],
        "backends": list(BACKENDS),
        "cpu_path": _path_and_why(speaker),
        "threads": usable_threads(),
        "barrier": barrier,
        "memory": {"total": total_memory(), "available": available_memory()},
        "cache": str(arguments.cache_dir or default_cache_dir()),
        "models": [
            {"name": m.name, "bytes": m.nbytes, "problem": m.problem, **_left_aside(m)}
            for m in cached
        ],
    }
    return findings, problems


def _path_and_why(speaker: Speaker) -> str:
    """Which instructions the `cpu` backend uses, and what the faster paths lack."""
    from seethrough.kernels.cpu.path import PATHS, best, lacking, needs, processor_flags

    flags = processor_flags()
    chosen = best(flags)
    there = ", ".join(needs(chosen))
    parts = [speaker.text("doctor_path", path=chosen, flags=there) if there else chosen]
    for path in PATHS[: PATHS.index(chosen)]:
        missing = ", ".join(lacking(path, flags))
        parts.append(speaker.text("doctor_lacks", path=path, flags=missing))
    return "; ".join(parts)


def _barrier(speaker: Speaker) -> tuple[str, list[str]]:
    """What one meeting of all threads costs, measured; kernels are compiled for it if need be."""
    from seethrough.engine.load import kernel_dir
    from seethrough.kernels.cpu.compiled import Kernels
    from seethrough.kernels.cpu.workers import Workers

    kernels = Kernels(kernel_dir())
    workers = Workers(usable_threads(), kernels, most_records=1)
    seconds = workers.barrier_seconds()
    workers.close()
    unkept = kernels.unkept
    problems = [] if unkept is None else [speaker.text("doctor_kernels", why=unkept)]
    return f"{seconds * 1e6:.2f} µs", problems


def _versions() -> dict[str, str]:
    """The installed version of everything that we depend on."""
    found = {}
    for requirement in requires("seethrough") or []:
        if "extra ==" not in requirement:
            name = _package(requirement)
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = "missing"
    return found


def _package(requirement: str) -> str:
    for place, char in enumerate(requirement):
        if not (char.isalnum() or char in "-_."):
            return requirement[:place]
    return requirement


def _left_aside(model: CachedModel) -> dict[str, Any]:
    """Tensors that the model's family leaves aside, or why the model cannot run."""
    from seethrough.errors import SeethroughError
    from seethrough.model.load import understand
    from seethrough.weights.checkpoint import open_checkpoint

    if model.files is None:
        return {}
    try:
        weights = understand(open_checkpoint(model.files))
    except SeethroughError as error:
        return {"unsupported": str(error)}
    return {"family": weights.family, "left_aside": list(weights.left_aside)}


def _problems(cached: list[CachedModel], speaker: Speaker) -> list[str]:
    problems = [
        speaker.text("doctor_broken", name=m.name, why=m.problem) for m in cached if m.problem
    ]
    if not any(model.files for model in cached):
        problems.append(speaker.text("doctor_no_model", name=DEFAULT_MODEL))
    free = available_memory()
    if free < _MEMORY_NEEDED:
        problems.append(speaker.text("doctor_memory", free=size_text(free)))
    missing = [name for name, found in _versions().items() if found == "missing"]
    problems += [speaker.text("doctor_missing", name=name) for name in missing]
    return problems


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_size_or_text(k, v)}" for k, v in value.items())
    if isinstance(value, list):
        parts = [_plain(item) if isinstance(item, dict) else str(item) for item in value]
        return "; ".join(parts) or "–"
    return str(value)


def _size_or_text(name: str, value: Any) -> str:
    if name in ("total", "available", "bytes"):
        return size_text(value)
    return str(value) if value not in (None, []) else "–"
