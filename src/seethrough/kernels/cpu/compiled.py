"""Kernels as machine code: compiled once, kept on disk, called by address.

A kernel is a function of int64 arguments without a result. Numba compiles it; its object code is
kept under a name that says everything it depends on (sources, processor, path, versions), so that
a stale one is never found. Numba's own cache does not see a change in an imported intrinsic, and
cannot keep kernels that are made in a loop.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import llvmlite.binding as llvm

from seethrough.kernels.cpu.library import Function, build
from seethrough.kernels.cpu.path import use


class Kernels:
    """Finds kernels by name, on disk or by compiling them, and keeps their code alive.

    Attributes:
        compiled: names of the kernels that were not on disk.
        seconds: what compiling them took.
        unkept: why what was compiled could not be written to disk, None where it could.
    """

    def __init__(self, directory: Path | None, notify: Callable[[str], None] | None = None) -> None:
        """`notify` is told the name of a kernel before it is compiled."""
        self._directory = None if directory is None else directory / stamp()
        self._engines: list[Any] = []  # they own the machine code
        self._addresses: dict[str, int] = {}
        self._notify = notify
        self.compiled: list[str] = []
        self.seconds = 0.0
        self.unkept: OSError | None = None

    def address(self, name: str, function: Function | None = None) -> int:
        """The address of kernel `name`: of `library.py`, or compiled from `function`.

        Called as i32 kernel(void **result, void **error, int64 ...): Numba's own convention; the
        first two point to eight bytes each, and the kernels leave nothing in them.
        """
        if name not in self._addresses:
            symbol, code = self._from_disk(name) or self._compile(name, function)
            # Each in an engine of its own: numba tells functions apart by a count per process, so
            # kernels that two processes compiled may well share symbols.
            engine = _engine()
            engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            engine.finalize_object()
            address = engine.get_function_address(symbol)
            if address == 0:
                raise RuntimeError(f"kernel {name} has no symbol {symbol}")
            self._engines.append(engine)
            self._addresses[name] = address
        return self._addresses[name]

    def callable(
        self,
        name: str,
        arguments: int,
        function: Function | None = None,
        *,
        hold_gil: bool = False,
    ) -> Function:
        """A kernel for Python to call with integers; other Python threads run meanwhile.

        With `hold_gil` they do not: for what is over before they could begin.
        """
        pointers, words = [ctypes.c_void_p] * 2, [ctypes.c_int64] * arguments
        make = ctypes.PYFUNCTYPE if hold_gil else ctypes.CFUNCTYPE
        kind = make(ctypes.c_int32, *pointers, *words)
        code = kind(self.address(name, function))
        result, error = ctypes.c_int64(), ctypes.c_int64()
        places = ctypes.addressof(result), ctypes.addressof(error)

        # A thread may still be on its way out of the code when its owner is gone.
        def call(*values: int, _alive: object = (self, result, error)) -> None:
            status = code(*places, *values)
            if status != 0:
                raise RuntimeError(f"kernel {name} failed with status {status}")

        return call

    def _compile(self, name: str, function: Function | None) -> tuple[str, bytes]:
        # Only here is the compiler needed; a start that finds all kernels on disk never loads it.
        from seethrough.kernels.cpu.compiler import compile_function

        if self._notify is not None:
            self._notify(name)
        started = perf_counter()
        symbol, code = compile_function(function or build(name))
        self.seconds += perf_counter() - started
        self.compiled.append(name)
        try:
            self._to_disk(name, symbol, code)
        except OSError as error:  # a full or read-only disk: the next start compiles again
            self.unkept = error
        return symbol, code

    def _from_disk(self, name: str) -> tuple[str, bytes] | None:
        if self._directory is None:
            return None
        try:
            data = (self._directory / name).read_bytes()
        except OSError:
            return None
        digest, rest = data[:32], data[32:]
        if hashlib.sha256(rest).digest() != digest:  # cut short by a full disk, say
            return None
        symbol, code = rest.split(b"\n", 1)
        return symbol.decode("ascii"), code

    def _to_disk(self, name: str, symbol: str, code: bytes) -> None:
        if self._directory is None:
            return
        rest = symbol.encode("ascii") + b"\n" + code
        data = hashlib.sha256(rest).digest() + rest
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = self._directory / f"{name}.{os.getpid()}"
        try:
            temporary.write_bytes(data)
            temporary.replace(self._directory / name)  # another process sees all of it or nothing
        finally:
            temporary.unlink(missing_ok=True)


def _engine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def stamp() -> str:
    """A name for everything that the machine code depends on."""
    parts = [
        use(),
        llvm.get_host_cpu_name(),
        platform.machine(),
        sys.version,
        version("numba"),
        version("llvmlite"),
        source_hash(),
    ]
    return f"{use()}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}"


def source_hash() -> str:
    """SHA-256 over the sources of this package."""
    digest = hashlib.sha256()
    for source in _sources():
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def _sources() -> Iterable[Path]:
    return sorted(Path(__file__).parent.glob("*.py"))
