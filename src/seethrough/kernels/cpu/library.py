"""Every kernel by its name. What makes it, and with it the compiler, is imported only when asked.

A name says the variant: `linear_Q4_1` takes weights of that type, `attend_2` reads a cache of two
bytes a value, `gate_silu` multiplies silu(x) by a second input.
"""

from __future__ import annotations

from collections.abc import Callable

Function = Callable[..., None]


def build(name: str) -> Function:
    """The Python function that is compiled as kernel `name`.

    Raises:
        KeyError: there is no such kernel.
    """
    if name in _PLAIN:
        return _PLAIN[name]()
    family, _, variant = name.partition("_")
    return _FAMILIES[family](variant)


def _rows(name: str) -> Callable[[], Function]:
    def make() -> Function:
        from seethrough.kernels.cpu import rows

        function: Function = getattr(rows, name)
        return function

    return make


def _threads(name: str) -> Callable[[], Function]:
    def make() -> Function:
        from seethrough.kernels.cpu import threads

        function: Function = getattr(threads, name)
        return function

    return make


def _norm(layer_norm: bool) -> Function:
    from seethrough.kernels.cpu.rows import norm_kernel

    return norm_kernel(layer_norm)


def _join_pieces() -> Function:
    from seethrough.kernels.cpu.attend import join_pieces

    return join_pieces


def _linear(dtype: str) -> Function:
    from seethrough.kernels.cpu.linear import linear_kernel

    return linear_kernel(dtype)


def _embed(dtype: str) -> Function:
    from seethrough.kernels.cpu.rows import embed_kernel

    return embed_kernel(dtype)


def _pack(dtype: str) -> Function:
    from seethrough.kernels.cpu.forms import FLOAT_BYTES, FORMS
    from seethrough.kernels.cpu.pack import pack_floats_kernel, pack_kernel

    return pack_kernel(FORMS[dtype]) if dtype in FORMS else pack_floats_kernel(FLOAT_BYTES[dtype])


def _attend(size: str) -> Function:
    from seethrough.kernels.cpu.attend import attend_kernel

    return attend_kernel(int(size))


def _write(size: str) -> Function:
    from seethrough.kernels.cpu.rows import write_kernel

    return write_kernel(int(size))


def _sample(name: str) -> Function:
    from seethrough.kernels.cpu import sampling, truncation

    function: Function = getattr(sampling, name, None) or getattr(truncation, name)
    return function


def _activation(kind: str, gated: bool) -> Function:
    from seethrough.kernels.cpu.rows import activation_kernel

    return activation_kernel(kind, gated)


_PLAIN: dict[str, Callable[[], Function]] = {
    "rms_norm": lambda: _norm(False),
    "layer_norm": lambda: _norm(True),
    "add": _rows("add"),
    "add_positions": _rows("add_positions"),
    "quantize": _rows("quantize_kernel"),
    "take_rows": _rows("take_rows"),
    "softcap": _rows("softcap"),
    "rotate": _rows("rotate"),
    "join_pieces": _join_pieces,
    "run_records": _threads("run_records"),
    "sweep_barriers": _threads("sweep_barriers"),
}
_FAMILIES: dict[str, Callable[[str], Function]] = {
    "linear": _linear,
    "embed": _embed,
    "pack": _pack,
    "attend": _attend,
    "write": _write,
    "sample": _sample,
    "activate": lambda kind: _activation(kind, False),
    "gate": lambda kind: _activation(kind, True),
}
