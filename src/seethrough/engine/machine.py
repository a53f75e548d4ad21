"""What this machine gives to the process: threads, memory, processor flags; containers count."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_threads() -> int:
    """Threads that the process may keep busy: its affinity, cut by a container's CPU quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _cpu_quota()
    threads = affinity or 1
    return max(1, threads if quota is None else min(threads, int(quota)))


def _cpu_quota() -> float | None:
    """CPUs granted by cgroup v2 (`cpu.max`: quota and period in microseconds), or None."""
    words = _read(_CGROUP / "cpu.max").split()
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def available_memory() -> int:
    """Bytes that can be taken without swapping: the kernel's estimate, cut by a container limit."""
    free = _meminfo().get("MemAvailable", 0)
    limit, used = _read(_CGROUP / "memory.max").strip(), _read(_CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def total_memory() -> int:
    """Bytes of memory in the machine."""
    return _meminfo().get("MemTotal", 0)


def processor() -> tuple[str, frozenset[str]]:
    """The processor's name and its feature flags, as the kernel lists them."""
    name, flags = "unknown", frozenset[str]()
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() == "flags":
            flags = frozenset(value.split())
            break
    return name, flags


def _meminfo() -> dict[str, int]:
    sizes = {}
    for line in _read(Path("/proc/meminfo")).splitlines():
        key, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            sizes[key] = int(words[0]) * 1024  # the file counts in KiB
    return sizes


def _read(path: Path) -> str:
    """The file's text; empty where the system does not have it."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
