"""A Python function to object code, by Numba; loaded only when a kernel is not on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numba.core import types

from seethrough.kernels.cpu.path import use


def compile_function(function: Callable[..., None]) -> tuple[str, bytes]:
    """Compile a function whose arguments are all int64; gives its symbol and its object code.

    No flag that would let the compiler reorder or contract floating point is ever set.
    """
    _keep_to_path()
    signature: Any = types.void(*[types.int64] * function.__code__.co_argcount)
    options = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    dispatcher = numba.njit(signature, **options)(function)
    (result,) = dispatcher.overloads.values()
    _, _, (code, _) = result.library.serialize_using_object_code()
    return result.fndesc.llvm_func_name, code


def _keep_to_path() -> None:
    """Hold the compiler to the instructions of the chosen path."""
    path = use()
    if path == "portable":
        numba.config.CPU_NAME, numba.config.CPU_FEATURES = "generic", ""
    elif path == "avx2":
        features = get_host_cpu_features()
        for name in list(features):
            if name.startswith(("avx512", "amx", "avx10")):
                features[name] = False
        numba.config.CPU_NAME, numba.config.CPU_FEATURES = get_host_cpu_name(), features.flatten()
