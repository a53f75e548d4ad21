"""Atomics, the barrier, and the compiled loop over the records that every thread runs."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from seethrough.kernels.cpu.path import MACHINE
from seethrough.kernels.cpu.record import COUNTER_BYTES, RECORD_WORDS, SECTION_BYTES, SECTIONS, R, S
from seethrough.kernels.cpu.simd import (
    I8,
    I32,
    I64,
    call,
    inline,
    intrinsic,
    load_i64,
    make,
    pointer,
    store_i64,
)

_KERNEL, _BARRIER = 8 * R.KERNEL, 8 * R.BARRIER
_STEP_BARRIER, _STEP_COUNTERS = 8 * S.BARRIER, 8 * S.COUNTERS
_RECORD_BYTES = 8 * RECORD_WORDS
_SPINS = 4000  # about 50 us of looking before the thread gives its core away


@intrinsic
def fetch_add(typing: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at an address; gives what stood there before."""

    def emit(b: Any, p: Any, v: Any) -> Any:
        return b.atomic_rmw("add", pointer(b, p, I64), v, "seq_cst")

    return make(types.int64(types.int64, types.int64), emit)


@intrinsic
def atomic_load(typing: Any, address: Any) -> Any:
    """The int64 at an address, as other threads left it."""

    def emit(b: Any, p: Any) -> Any:
        return b.load_atomic(pointer(b, p, I64), "acquire", 8)

    return make(types.int64(types.int64), emit)


@intrinsic
def atomic_store(typing: Any, address: Any, value: Any) -> Any:
    """Store an int64 so that who reads it also sees everything before it."""

    def emit(b: Any, p: Any, v: Any) -> None:
        b.store_atomic(v, pointer(b, p, I64), "release", 8)

    return make(types.void(types.int64, types.int64), emit)


@intrinsic
def pause(typing: Any) -> Any:
    """Tell the core that this is a waiting loop."""

    def emit(b: Any) -> None:
        if MACHINE in ("x86_64", "AMD64"):
            call(b, "llvm.x86.sse2.pause", ir.VoidType())

    return make(types.void(), emit)


@intrinsic
def yield_core(typing: Any) -> Any:
    """Let another thread run (sched_yield)."""

    def emit(b: Any) -> None:
        kind = ir.FunctionType(I32, [])
        b.call(cgutils.get_or_insert_function(b.module, kind, "sched_yield"), [])

    return make(types.void(), emit)


@intrinsic
def call_kernel(typing: Any, kernel: Any, record: Any, step: Any, counter: Any, thread: Any) -> Any:
    """Call a kernel by its address (`compiled.Kernels.address` has the convention)."""

    def emit(b: Any, kernel: Any, *args: Any) -> None:
        place = I8.as_pointer()
        nothing = [b.bitcast(cgutils.alloca_once(b, I64), place) for _ in range(2)]
        kind = ir.FunctionType(I32, [place, place] + [I64] * 4).as_pointer()
        b.call(b.bitcast(b.inttoptr(kernel, place), kind), [*nothing, *args])

    return make(types.void(*[types.int64] * 5), emit)


@intrinsic
def ticks(typing: Any) -> Any:
    """The processor's cycle counter."""
    return make(types.int64(), lambda b: call(b, "llvm.readcyclecounter", I64))


@inline
def wait_for_all(barrier: int, threads: int) -> None:
    """Return when all threads are here. Two words on lines of their own: arrived, generation."""
    if threads == 1:
        return
    generation = atomic_load(barrier + 64)
    if fetch_add(barrier, 1) == threads - 1:
        atomic_store(barrier, 0)
        atomic_store(barrier + 64, generation + 1)
        return
    spins = 0
    while atomic_load(barrier + 64) == generation:
        spins += 1
        if spins < _SPINS:
            pause()
        else:
            yield_core()


@inline
def sections_of(step: int) -> int:
    """Into how many sections this step's work is cut: one for each thread, up to SECTIONS."""
    return min(SECTIONS, load_i64(step + 8 * S.THREADS))


@inline
def next_unit(counter: int, units: int, sections: int, thread: int, turn: int) -> tuple[int, int]:
    """A unit of work that nobody has taken, or -1; and `turn` for the next call (0 at first).

    Each thread takes the units of a section of its own, in order, before it helps with the others':
    so it reads memory from end to end, which the processor sees and fetches ahead, and the threads
    do not pass one counter's cache line to and fro.
    """
    while turn < sections:
        section = (thread + turn) % sections
        first, stop = units * section // sections, units * (section + 1) // sections
        unit = first + fetch_add(counter + SECTION_BYTES * section, 1)
        if unit < stop:
            return unit, turn
        turn += 1
    return -1, turn


def run_records(records: int, first: int, stop: int, step: int, thread: int, threads: int) -> None:
    """Run records first .. stop - 1 together with the other threads."""
    barrier = load_i64(step + _STEP_BARRIER)
    counters = load_i64(step + _STEP_COUNTERS)
    if thread == 0:
        for i in range(first, stop):
            for section in range(min(threads, SECTIONS)):
                store_i64(counters + COUNTER_BYTES * i + SECTION_BYTES * section, 0)
    wait_for_all(barrier, threads)
    clock = load_i64(step + 8 * S.CLOCK) if thread == 0 else 0
    for i in range(first, stop):
        record = records + _RECORD_BYTES * i
        if i > first and load_i64(record + _BARRIER) != 0:
            wait_for_all(barrier, threads)
        if clock != 0:
            store_i64(clock + 8 * i, ticks())
        call_kernel(load_i64(record + _KERNEL), record, step, counters + COUNTER_BYTES * i, thread)
    wait_for_all(barrier, threads)
    if clock != 0:
        store_i64(clock + 8 * stop, ticks())


def sweep_barriers(barrier: int, count: int, threads: int) -> None:
    """Meet so many times: what one barrier costs."""
    for _ in range(count):
        wait_for_all(barrier, threads)
