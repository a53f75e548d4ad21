"""How much memory a model takes that cannot be given back, while it loads and when it runs.

    bench/memory.py --model 8b.gguf --max-model-len 4096

Private memory is what belongs to no file (Linux: Anonymous); the model file's own pages, which the
system may drop at any time, are not in it. The KV pool counts as far as it was written.
"""

from __future__ import annotations

import argparse
import json
import threading
from pathlib import Path

from seethrough import LLM

_INTERPRETER = 250_000_000  # Python, NumPy and the compiler's library


def private_bytes() -> int:
    """Bytes of this process that no file stands behind."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/smaps_rollup has no Anonymous")


class Watch:
    """The most private memory that was seen while it is open."""

    def __init__(self) -> None:
        self.most = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._done.wait(0.02):
            self.most = max(self.most, private_bytes())

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.most = max(self.most, private_bytes())


def main(arguments: list[str] | None = None) -> None:
    """Load, generate a little, print, and one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-model-len", type=int, default=4096)
    asked = parser.parse_args(arguments)
    with Watch() as watch:
        llm = LLM(asked.model, max_model_len=asked.max_model_len)
    llm.generate({"prompt_token_ids": list(range(1, 65))}, max_tokens=8, ignore_eos=True)
    private, report = private_bytes(), llm.report
    largest = max(tensor.nbytes for tensor in llm.weights.tensors.values())
    share = (private - _INTERPRETER) / (report.stored + report.kv_bytes)
    found = {
        "file_bytes": report.stored,
        "kv_pool_bytes": report.kv_bytes,
        "private_bytes": private,
        "private_peak_while_loading": watch.most,
        "largest_tensor_bytes": largest,
        "share_of_file_and_pool": share,
    }
    for name, value in found.items():
        print(f"{name:<28} {value / 1e6:10.1f} MB" if isinstance(value, int) else f"{name} {value}")
    print(json.dumps({"model": report.name, **found}))


if __name__ == "__main__":
    main()
