"""Row kernels of the `cpu` backend: the plain twin's numbers, and a row's bits are its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cpu_harness import quantized
from cpu_rows import activate, norm, quantize_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from seethrough.kernels import reference

WIDTHS = st.integers(1, 150)


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(width=WIDTHS, rows=st.integers(1, 9), scale=st.sampled_from([1e-6, 1.0, 1e4]))
def test_norms_are_the_twins(width: int, rows: int, scale: float) -> None:
    x, w, b = normal(rows, width) * np.float32(scale), normal(width, seed=2), normal(width, seed=3)
    wanted = reference.rms_norm(x, w, eps=1e-5, weight_offset=0.0)
    np.testing.assert_allclose(norm(x, w, 1e-5), wanted, rtol=2e-6, atol=1e-6)
    wanted = reference.layer_norm(x, w, b, eps=1e-5, weight_offset=0.0)
    np.testing.assert_allclose(norm(x, w, 1e-5, b), wanted, rtol=1e-4, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_rows_bits_are_its_own(data: st.DataObject) -> None:
    width, rows = data.draw(WIDTHS), data.draw(st.integers(1, 30))
    threads = data.draw(st.sampled_from([1, 2, 3]))
    x, w, b = normal(rows, width), normal(width, seed=2), normal(width, seed=3)
    row = data.draw(st.integers(0, rows - 1))
    alone = x[row : row + 1]
    np.testing.assert_array_equal(norm(x, w, 1e-5, None, threads)[row], norm(alone, w, 1e-5)[0])
    np.testing.assert_array_equal(norm(x, w, 1e-5, b, threads)[row], norm(alone, w, 1e-5, b)[0])
    kind = data.draw(st.sampled_from(["silu", "gelu", "gelu_tanh", "relu"]))
    together = activate(x, kind, x[::-1].copy(), threads)
    np.testing.assert_array_equal(
        together[row], activate(alone, kind, x[::-1][row : row + 1].copy())[0]
    )


@pytest.mark.parametrize("rows", [1, 7])
def test_quantizing_is_as_defined(rows: int) -> None:
    x = normal(rows, 320) * np.float32(3)
    x[0, 64:96] = 0  # an empty block
    x[0, 100] = 1e20
    q, scale = quantize_rows(x, threads=2)
    _, wanted, scales = quantized(x)
    np.testing.assert_array_equal(q, wanted)
    np.testing.assert_array_equal(scale, scales)


EDGES = np.array(
    [0.0, -0.0, 1e-45, -1e-38, 1e-6, 0.6249, 0.625, -0.626, 1, -1, 3.9, 4.1, -5, 9, 20, -20,
     87.3, 88.7, -87.4, -103.9, -104.1, 1e4, -1e4, 3e38, -3e38],
    dtype=np.float32,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations_are_exact_to_float32(kind: str) -> None:
    """Against torch in float64, over the whole range that matters and at the edges."""
    x = np.concatenate([EDGES, np.linspace(-12, 12, 4001).astype(np.float32)])
    wide = torch.as_tensor(x, dtype=torch.float64)
    wanted = {
        "silu": torch.nn.functional.silu(wide),
        "gelu": torch.nn.functional.gelu(wide),
        "gelu_tanh": torch.nn.functional.gelu(wide, approximate="tanh"),
        "relu": torch.relu(wide),
    }[kind].numpy()
    got = activate(x[None], kind)[0].astype(np.float64)
    # A tail that is the difference of nearly equal numbers is as good as float32 of its size 1;
    # erf itself is a few units off near 1.
    allowed = 8e-7 if kind == "gelu" else 3e-7
    assert (np.abs(got - wanted) <= allowed * np.maximum(np.abs(wanted), 1.0)).all()


def test_exp_is_within_two_units_in_the_last_place() -> None:
    """silu(x) = x / (1 + e^-x) shows e^-x where x is very negative: x · e^x and a rounding more."""
    x = np.linspace(-80, -20, 20_001).astype(np.float32)
    got = activate(x[None], "silu")[0]
    wanted = np.array([v * math.exp(v) for v in x.astype(np.float64).tolist()])
    units = np.abs(got - wanted) / np.spacing(np.abs(wanted).astype(np.float32))
    assert units.max() <= 3.5


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu"])
def test_nan_stays(kind: str) -> None:
    x = np.array([[1, np.nan, 2, -np.nan]], dtype=np.float32)
    assert np.isnan(activate(x, kind)[0]).tolist() == [False, True, False, True]
