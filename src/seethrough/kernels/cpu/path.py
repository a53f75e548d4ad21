"""Which processor path the kernels are compiled for: chosen once, before any of them is imported.

avx512    16 lanes in one register, byte dot products by VNNI
avx2      the same lanes in two registers, byte dot products by pmaddubsw, half floats by F16C
portable  the same lanes in what LLVM makes for a processor without extensions

A path's own instruction on a processor without it would end the process, so flags decide, not
trial. Integer parts are exact on all paths; avx512 and avx2 round floats alike as well.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import get_args

from seethrough.config import CPUPath
from seethrough.errors import ParameterError

PATHS: tuple[CPUPath, ...] = get_args(CPUPath)
MACHINE = platform.machine()

_NEEDS: dict[CPUPath, frozenset[str]] = {
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx2", "fma", "f16c"}),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "portable": frozenset(),
}
_chosen: list[CPUPath] = []  # at most one: machine code for two paths cannot share a process


def processor_flags() -> frozenset[str]:
    """What the system says this processor has; empty where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def needs(path: CPUPath) -> tuple[str, ...]:
    """The flags that `path` needs."""
    return tuple(sorted(_NEEDS[path]))


def lacking(path: CPUPath, flags: frozenset[str]) -> tuple[str, ...]:
    """The flags that `path` needs and a processor with `flags` lacks."""
    return tuple(sorted(_NEEDS[path] - flags))


def best(flags: frozenset[str]) -> CPUPath:
    """The fastest path that a processor with these flags can run."""
    return next(path for path in PATHS if not lacking(path, flags))


def use(asked: CPUPath | None = None) -> CPUPath:
    """Choose the path of this process: the asked one, or the fastest; later calls give the same.

    Raises:
        ParameterError: the processor cannot run the asked path, or another one is in use already.
    """
    flags = processor_flags()
    if asked is not None and lacking(asked, flags):
        missing = ", ".join(lacking(asked, flags))
        raise ParameterError("cpu_path", asked, f"this processor lacks {missing}")
    if not _chosen:
        _chosen.append(asked or best(flags))
    if asked is not None and asked != _chosen[0]:
        raise ParameterError("cpu_path", asked, f"this process already uses {_chosen[0]}")
    return _chosen[0]
