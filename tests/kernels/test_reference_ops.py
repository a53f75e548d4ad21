"""Every operation of the reference backend against torch, or against rows worked out by hand."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from torch.nn import functional

from seethrough.kernels import reference as ops

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ------------------------------------------------------------------ by hand


def test_embed_by_hand() -> None:
    table = np.array([[1, 2], [3, 4], [5, 6]], dtype=np.float32)
    out = ops.embed(np.array([2, 0, 2]), table, scale=0.5)
    assert_array_equal(out, [[2.5, 3], [0.5, 1], [2.5, 3]])
    assert out.dtype == np.float32


def test_add_positions_by_hand() -> None:
    table = np.array([[9, 9], [1, 2], [3, 4], [5, 6]], dtype=np.float32)
    x = np.array([[10, 20], [30, 40]], dtype=np.float32)
    assert_array_equal(
        ops.add_positions(x, np.array([2, 0]), table, offset=1), [[15, 26], [31, 42]]
    )


def test_rms_norm_by_hand() -> None:
    x = np.array([[3, 4], [0, 0]], dtype=np.float32)
    weight = np.array([1, -0.5], dtype=np.float32)
    root = math.sqrt(12.5 + 0.5)
    out = ops.rms_norm(x, weight, eps=0.5, weight_offset=1.0)
    assert_allclose(out, [[6 / root, 2 / root], [0, 0]], rtol=1e-6)


def test_layer_norm_by_hand() -> None:
    x = np.array([[1, 3], [5, 5]], dtype=np.float32)
    weight, bias = np.array([2, 1], dtype=np.float32), np.array([0.5, -1], dtype=np.float32)
    out = ops.layer_norm(x, weight, bias, eps=3.0, weight_offset=0.0)
    assert_allclose(out, [[-0.5, -0.5], [0.5, -1]], rtol=1e-6)


def test_linear_by_hand() -> None:
    x = np.array([[1, 2]], dtype=np.float32)
    weight = np.array([[1, 0], [0, 1], [1, 1]], dtype=np.float32)
    assert_array_equal(ops.linear(x, weight), [[1, 2, 3]])
    assert_array_equal(ops.linear(x, weight, np.array([1, 1, -3], dtype=np.float32)), [[2, 3, 0]])


def test_rotate_by_hand() -> None:
    """A quarter turn of pair (0, 2), none of pair (1, 3)."""
    cos = np.array([[1, 1], [0, 1]], dtype=np.float32)
    sin = np.array([[0, 0], [1, 0]], dtype=np.float32)
    x = np.array([[[1, 2, 3, 4]], [[1, 2, 3, 4]]], dtype=np.float32)
    out = ops.rotate(x, np.array([1, 0]), cos, sin)
    assert_array_equal(out, [[[-3, 2, 1, 4]], [[1, 2, 3, 4]]])


def test_heads_are_neighbouring_columns() -> None:
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    heads = ops.split_heads(x, n_heads=3)
    assert_array_equal(heads[1], [[6, 7], [8, 9], [10, 11]])
    assert_array_equal(ops.merge_heads(heads), x)


def test_small_operations_by_hand() -> None:
    x = np.array([[1, -2], [3, 4], [5, 6]], dtype=np.float32)
    assert_array_equal(ops.add(x, x), 2 * x)
    assert_array_equal(ops.take_rows(x, np.array([2, 0, 2])), [[5, 6], [1, -2], [5, 6]])
    assert_array_equal(ops.activate(x, kind="relu"), [[1, 0], [3, 4], [5, 6]])
    assert_array_equal(ops.gate(x, x + 1, kind="relu"), [[2, 0], [12, 20], [30, 42]])
    assert_allclose(ops.softcap(x, cap=2.0)[0], [2 * math.tanh(0.5), -2 * math.tanh(1)], rtol=1e-6)


# ------------------------------------------------------------------ against torch


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_norms_equal_torch(scale: float) -> None:
    x, weight, bias = normal(9, 64) * np.float32(scale), normal(64, seed=1), normal(64, seed=2)
    rms = functional.rms_norm(torch.tensor(x), (64,), torch.tensor(weight), 1e-6)
    assert_allclose(ops.rms_norm(x, weight, eps=1e-6, weight_offset=0.0), rms, rtol=1e-5, atol=1e-6)
    layer = functional.layer_norm(
        torch.tensor(x), (64,), torch.tensor(weight), torch.tensor(bias), 1e-5
    )
    ours = ops.layer_norm(x, weight, bias, eps=1e-5, weight_offset=0.0)
    assert_allclose(ours, layer, rtol=1e-5, atol=1e-5)


def test_norms_work_on_every_head_alone() -> None:
    x, weight, bias = normal(5, 4, 16), normal(16, seed=1), normal(16, seed=2)
    for head in range(4):
        whole = ops.rms_norm(x, weight, eps=1e-6, weight_offset=1.0)[:, head]
        alone = ops.rms_norm(x[:, head], weight, eps=1e-6, weight_offset=1.0)
        assert_allclose(whole, alone, rtol=1e-6)
        whole = ops.layer_norm(x, weight, bias, eps=1e-6, weight_offset=0.0)[:, head]
        alone = ops.layer_norm(x[:, head], weight, bias, eps=1e-6, weight_offset=0.0)
        assert_allclose(whole, alone, rtol=1e-5, atol=1e-6)


TORCH = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


@pytest.mark.parametrize("kind", TORCH)
def test_activations_equal_torch(kind: str) -> None:
    x = np.concatenate([np.linspace(-12, 12, 2001), np.linspace(-1e-3, 1e-3, 101)])
    x = x.astype(np.float32)
    expected = TORCH[kind](torch.tensor(x)).numpy()
    assert_allclose(ops.activate(x, kind=kind), expected, rtol=1e-5, atol=2e-6)
    up = normal(x.size, seed=3)
    assert_allclose(ops.gate(x, up, kind=kind), expected * up, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", TORCH)
def test_activations_at_the_extremes(kind: str) -> None:
    """No overflow, no warning, no NaN: the identity on one side and zero on the other."""
    x = np.array([-1e4, -3e3, -100, -0.0, 0.0, 100, 3e3, 1e4], dtype=np.float32)
    out = ops.activate(x, kind=kind)
    assert_allclose(out, TORCH[kind](torch.tensor(x)).numpy(), rtol=1e-6)
    assert_array_equal(out, [0, 0, 0, 0, 0, 100, 3e3, 1e4])
    assert out.dtype == np.float32


def test_unknown_activation() -> None:
    with pytest.raises(KeyError, match="mish"):
        ops.activate(normal(2, 2), kind="mish")


def test_softcap_equals_torch_and_stays_inside() -> None:
    x = np.array([-1e30, -1e4, -30, -1, 0, 1, 30, 1e4, 1e30], dtype=np.float32)
    out = ops.softcap(x, cap=30.0)
    assert_allclose(out, 30 * torch.tanh(torch.tensor(x) / 30), rtol=1e-6)
    assert np.abs(out).max() <= 30


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e38])
def test_softmax_equals_torch(scale: float) -> None:
    s = np.clip(normal(3, 5, 8), -1, 1) * np.float32(scale)
    s[:, 1:, 3] = -np.inf
    out = ops.softmax(s)
    assert_allclose(out, torch.softmax(torch.tensor(s), -1), rtol=1e-5, atol=1e-7)
    assert (out[:, 1:, 3] == 0).all()


def test_rotation_keeps_lengths_and_relative_angles() -> None:
    """q·k depends on the distance of two positions alone: what rotary embeddings are for."""
    angles = np.arange(40)[:, None] * np.array([1.0, 0.3, 0.05, 0.001])[None, :]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    q, k = normal(1, 2, 8).repeat(40, 0), normal(1, 2, 8, seed=1).repeat(40, 0)
    at = np.arange(40)
    turned_q, turned_k = ops.rotate(q, at, cos, sin), ops.rotate(k, at, cos, sin)
    assert_allclose(np.linalg.norm(turned_q, axis=-1), np.linalg.norm(q, axis=-1), rtol=1e-5)
    scores = np.einsum("ihd,jhd->hij", turned_q, turned_k)
    for distance in (0, 3, 17):
        diagonal = np.diagonal(scores, -distance, axis1=1, axis2=2)
        assert_allclose(diagonal, diagonal[:, :1].repeat(diagonal.shape[1], 1), atol=1e-4)


# ------------------------------------------------------------------ rows


BY_ROW = {
    "embed": lambda x, rows: ops.embed(rows, normal(64, 16, seed=5), scale=1.5),
    "add_positions": lambda x, rows: ops.add_positions(x, rows, normal(64, 16, seed=5), offset=0),
    "rms_norm": lambda x, rows: ops.rms_norm(x, normal(16), eps=1e-6, weight_offset=1.0),
    "layer_norm": lambda x, rows: ops.layer_norm(
        x, normal(16), normal(16, seed=1), eps=1e-6, weight_offset=0.0
    ),
    "linear": lambda x, rows: ops.linear(x, normal(24, 16, seed=2), normal(24, seed=3)),
    "split_heads": lambda x, rows: ops.split_heads(x, n_heads=4),
    "rotate": lambda x, rows: ops.rotate(
        x.reshape(-1, 2, 8), rows, normal(64, 4, seed=6), normal(64, 4, seed=7)
    ),
    "add": lambda x, rows: ops.add(x, 2 * x),
    "activate": lambda x, rows: ops.activate(x, kind="gelu"),
    "gate": lambda x, rows: ops.gate(x, x, kind="silu"),
    "softcap": lambda x, rows: ops.softcap(x, cap=3.0),
    "merge_heads": lambda x, rows: ops.merge_heads(x.reshape(-1, 4, 4)),
}


@pytest.mark.parametrize("name", BY_ROW)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_row_depends_on_itself_alone(name: str, data: st.DataObject) -> None:
    x = normal(40, 16, seed=9)
    before = x.copy()
    whole = BY_ROW[name](x, np.arange(40))
    chosen = np.array(data.draw(st.lists(st.integers(0, 39), min_size=1, max_size=20)))
    assert_allclose(BY_ROW[name](x[chosen], chosen), whole[chosen], rtol=1e-5, atol=1e-6)
    assert_array_equal(x, before)  # inputs are not written to


def test_results_are_float32_and_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, call in BY_ROW.items():
            assert call(normal(5, 16), np.arange(5)).dtype == np.float32, name
