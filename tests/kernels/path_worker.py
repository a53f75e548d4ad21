"""Checks one processor path in a process of its own: `path_worker.py PATH`; prints digests.

Everything is compared with plain float64 or with NumPy's own conversions here; what is printed lets
the caller compare paths with one another, to the bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from seethrough.config import CPUPath
from seethrough.kernels.cpu.path import PATHS, use

asked: CPUPath = next(path for path in PATHS if path == sys.argv[1])
use(asked)

import numpy as np  # noqa: E402
from cpu_harness import expected_linear, kernels, linear, packed, random_tensor  # noqa: E402
from cpu_rows import activate, norm, quantize_rows  # noqa: E402

from seethrough.errors import NonFiniteLogitsError  # noqa: E402
from seethrough.kernels import reference  # noqa: E402
from seethrough.kernels.cpu.forms import FLOATS, FORMS  # noqa: E402
from seethrough.kernels.cpu.simd import (  # noqa: E402
    loadf,
    loadh,
    storef,
    storeh,
)
from seethrough.sampling.bans import History, prepare_bans  # noqa: E402
from seethrough.sampling.compiled import CompiledOps  # noqa: E402
from seethrough.sampling.params import EffectiveParams, SamplingParams, resolve  # noqa: E402
from seethrough.sampling.sampler import sample  # noqa: E402
from seethrough.weights.tensor import Tensor  # noqa: E402

digests: dict[str, str] = {}


def note(name: str, *arrays: np.ndarray) -> None:
    joined = b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)
    digests[name] = hashlib.sha256(joined).hexdigest()


def widen_all(source: int, to: int, count: int) -> None:
    for i in range(0, count, 16):
        storef(to + 4 * i, loadh(source + 2 * i))


def narrow_all(source: int, to: int, count: int) -> None:
    for i in range(0, count, 16):
        storeh(to + 2 * i, loadf(source + 4 * i))


def check_halves() -> None:
    """Every half float there is; and every kind of float32 on its way to one."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    wide = np.empty(1 << 16, dtype=np.float32)
    kernels().callable("widen_all", 3, widen_all)(halves.ctypes.data, wide.ctypes.data, halves.size)
    with np.errstate(invalid="ignore"):
        expected = halves.view(np.float16).astype(np.float32)
    nan = np.isnan(expected)
    assert np.isnan(wide[nan]).all()
    np.testing.assert_array_equal(wide[~nan].view(np.uint32), expected[~nan].view(np.uint32))

    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    near = expected[~nan & np.isfinite(expected)]
    steps = [near, np.nextafter(near, np.float32(9e9)), np.nextafter(near, np.float32(-9e9))]
    middle = ((near[1:] + near[:-1]) / 2).astype(np.float32)
    x = np.concatenate([bits.view(np.float32), *steps, middle, [65519, 65520, -65520, 1e30]])
    x = np.concatenate([x, np.zeros(-x.size % 16)]).astype(np.float32)
    got = np.empty(x.size, dtype=np.uint16)
    kernels().callable("narrow_all", 3, narrow_all)(x.ctypes.data, got.ctypes.data, x.size)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = x.astype(np.float16)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(got[number], wanted.view(np.uint16)[number])
    assert np.isnan(got.view(np.float16)[~number]).all()


def check_products() -> None:
    rng = np.random.default_rng(1)
    for dtype in (*FORMS, *FLOATS):
        tensor = random_tensor(dtype, 33, 512)
        x = rng.standard_normal((7, 512)).astype(np.float32)
        x[3] *= 1e6
        results = []
        for form in (tensor, *extremes(tensor)):
            y = linear(packed(form), x, threads=2)
            size = np.abs(form.to_f32()).astype(np.float64) @ np.abs(x).T.astype(np.float64)
            worst = size.max(axis=0)[:, None]
            assert (np.abs(y - expected_linear(form, x)) <= 2e-6 * worst).all(), dtype
            results.append(y)
        note(f"linear {dtype}", *results)


def extremes(tensor: Tensor) -> list[Tensor]:
    """The same scales with all quants at 0, at 127, at 128 and at their largest."""
    dtype = tensor.dtype.name
    if dtype not in FORMS:
        return []
    scales = slice(208, 210) if dtype == "Q6_K" else slice(0, 4 if FORMS[dtype].has_min else 2)
    made = []
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        blocks = np.full(
            (tensor.data.size // tensor.dtype.block_bytes, tensor.dtype.block_bytes), byte
        )
        blocks = blocks.astype(np.uint8)
        blocks[:, scales] = tensor.data.reshape(blocks.shape)[:, scales]
        made.append(Tensor("t", tensor.dtype, tensor.shape, blocks.reshape(-1)))
    return made


def check_rows() -> None:
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((5, 96)) * 10).astype(np.float32)
    w = rng.standard_normal(96).astype(np.float32)
    got = norm(x, w, 1e-5)
    wanted = reference.rms_norm(x, w, eps=1e-5, weight_offset=0.0)
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=1e-6)
    note("norm", got)
    for kind in ("silu", "gelu", "gelu_tanh", "relu"):
        got = activate(x, kind)
        np.testing.assert_allclose(got, reference.activate(x, kind=kind), rtol=2e-6, atol=5e-6)
        note(kind, got)
    note("quantize", *quantize_rows(x))


def check_sampling() -> None:
    """The plain form is the same on every machine; so each path has to give its bits."""
    size = 3001
    rng = np.random.default_rng(3)
    ops = CompiledOps(size, kernels())
    history, none = History((1, 2, 2), (7, 8)), prepare_bans(resolved(), (), size, lambda t: [0])
    chosen = []
    for spread in (0.0, 1e-3, 1.0, 9.0, 1e37):
        for holes in (0, size // 2, size - 1):
            x = (rng.standard_normal(size) * spread).astype(np.float32)
            x[rng.permutation(size)[:holes]] = -np.inf
            for knobs in CHAINS:
                args = x, resolved(**knobs), history, none
                ours = sample(*args, output_index=len(chosen), ops=ops)
                assert ours == sample(*args, output_index=len(chosen)), (spread, holes, knobs)
                chosen.append(ours.token_id)
    for bad in (np.nan, -np.nan, np.inf):
        x[5] = bad
        with contextlib.suppress(NonFiniteLogitsError):
            ops.begin(x)
            raise AssertionError(f"{bad} was taken")
    note("sampling", np.array(chosen))


CHAINS: tuple[dict[str, float], ...] = (
    {"temperature": 0, "logprobs": 9},
    {"temperature": 0.6, "logprobs": 2},
    {"top_k": 17, "top_p": 0.9, "temperature": 1.3},
    {"top_p": 0.3, "min_p": 0.01},
    {"typical_p": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
)


def resolved(**given: float) -> EffectiveParams:
    return resolve(SamplingParams(**{"seed": 11, **given}), None, {}, lambda: 1)  # type: ignore[arg-type]


check_halves()
check_products()
check_rows()
check_sampling()
print(json.dumps(digests))
