"""Opens each file named on standard input and prints what came of it, as one JSON line a file.

Run as a process of its own, so that a hang, a crash or a large allocation is seen from outside.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from seethrough.errors import SeethroughError
from seethrough.weights.gguf.reader import open_gguf
from seethrough.weights.safetensors import open_index, open_safetensors


def peak_mb() -> float:
    """This process's own peak memory. `ru_maxrss` would start at that of the parent."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmHWM")


def open_any(path: Path) -> dict[str, object]:
    if path.suffix == ".json":
        return {"tensors": len(open_index(path).tensors)}
    if path.suffix == ".gguf":
        return {"tensors": len(open_gguf(path).tensors)}
    return {"tensors": len(open_safetensors(path).tensors)}


def main() -> None:
    base = peak_mb()
    for line in sys.stdin.read().splitlines():
        path, started = Path(line), time.perf_counter()
        try:
            result = open_any(path)
        except SeethroughError as error:
            result = {"error": type(error).__name__, "message": str(error)}
        except BaseException as error:  # noqa: BLE001 - what must never come out is reported, too
            result = {"error": f"UNTYPED {type(error).__name__}", "message": str(error)}
        result |= {"seconds": time.perf_counter() - started, "grown_mb": peak_mb() - base}
        print(json.dumps({"path": path.name, **result}), flush=True)


if __name__ == "__main__":
    main()
