"""What the processor can do at most with one weight type: the tile on data that never leaves L1."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from seethrough.kernels.cpu.compiled import Kernels
from seethrough.kernels.cpu.forms import ACT_BYTES, BLOCK, FORMS, LANES, packed_bytes
from seethrough.kernels.cpu.memory import aligned
from seethrough.kernels.cpu.record import RECORD_WORDS, STEP_WORDS, L, R, S
from seethrough.kernels.cpu.workers import Workers

_ROWS, _COLUMNS, _RECORDS = 16, 256, 512
_GROUPS = 8  # of each thread: with rows and results they fit its first cache


def multiply_rate(dtype: str, kernels: Kernels, threads: int, repeats: int = 7) -> float:
    """Operations a second (a product and a sum are two) of all threads; best of repeats."""
    workers = Workers(threads, kernels, _RECORDS)
    quantized = dtype in FORMS
    group_bytes = packed_bytes(dtype, (1, _COLUMNS))
    stride = _COLUMNS // BLOCK * ACT_BYTES if quantized else 4 * _COLUMNS
    groups = _GROUPS * threads
    weights, x = aligned(group_bytes * groups), aligned(_ROWS * stride)
    y = aligned(4 * LANES * groups * _ROWS)
    records = np.zeros((_RECORDS, RECORD_WORDS), dtype=np.int64)
    for record in records:
        record[R.KERNEL] = kernels.address(f"linear_{dtype}")
        record[R.ROWS] = S.ROWS
        for word, value in {
            L.WEIGHTS: weights.ctypes.data,
            L.GROUP_BYTES: group_bytes,
            L.GROUPS: groups,
            L.DEPTH: _COLUMNS // BLOCK if quantized else _COLUMNS,
            L.X: x.ctypes.data,
            L.X_STRIDE: stride,
            L.Y: y.ctypes.data,
            L.Y_STRIDE: 4 * LANES * groups,
        }.items():
            record[word] = value
    step = np.zeros(STEP_WORDS, dtype=np.int64)
    step[S.ROWS], step[S.SHARES], step[S.THREADS] = _ROWS, threads, threads
    step[S.COUNTERS], step[S.BARRIER] = workers.counters, workers.barrier
    best = float("inf")
    for _ in range(repeats):
        started = perf_counter()
        workers.run(records.ctypes.data, 0, _RECORDS, step.ctypes.data)
        best = min(best, perf_counter() - started)
    workers.close()
    return 2 * _RECORDS * _ROWS * _COLUMNS * LANES * groups / best
