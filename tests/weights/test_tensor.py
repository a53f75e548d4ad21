"""Tensor: exact conversions, row operations on raw bytes, refusals."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seethrough.errors import CheckpointError
from seethrough.weights import tensor as t

SIXTEEN_BITS = np.arange(1 << 16, dtype=np.uint16)


def make(dtype: t.DType, shape: tuple[int, ...], seed: int = 0) -> t.Tensor:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[dtype.name])
    return t.Tensor("w", dtype, shape, np.ascontiguousarray(raw).view(np.uint8).reshape(-1))


def test_every_f16_and_bf16_value_is_exact() -> None:
    raw = SIXTEEN_BITS.view(np.uint8)
    for dtype, kind in ((t.F16, torch.float16), (t.BF16, torch.bfloat16)):
        got = t.Tensor("w", dtype, (256, 256), raw).to_f32()
        want = torch.from_numpy(SIXTEEN_BITS.view(np.int16)).view(kind).float().numpy()
        want = want.reshape(256, 256)
        nan = np.isnan(want)
        assert np.array_equal(np.isnan(got), nan)
        assert got[~nan].tobytes() == want[~nan].tobytes()


def test_f32_is_a_copy_with_the_same_bits_also_where_unaligned() -> None:
    values = np.array([1.0, -0.0, np.inf, np.nan, 1e-45], np.float32)
    buffer = np.concatenate([np.zeros(1, np.uint8), values.view(np.uint8)])
    got = t.Tensor("w", t.F32, (5,), buffer[1:]).to_f32()
    assert got.tobytes() == values.tobytes()
    got[0] = 7.0
    assert buffer[1:5].view("<f4")[0] == 1.0


@pytest.mark.parametrize("dtype", [t.F32, t.F16, t.BF16, t.Q4_1, t.Q8_0], ids=lambda d: d.name)
@settings(deadline=None, max_examples=30)
@given(index=st.lists(st.integers(0, 7), max_size=12))
def test_take_rows_equals_taking_from_the_values(dtype: t.DType, index: list[int]) -> None:
    tensor = make(dtype, (8, 64))
    taken = tensor.take_rows(index)
    assert taken.shape == (len(index), 64)
    assert np.array_equal(taken.to_f32(), tensor.to_f32()[np.array(index, dtype=int)])


@pytest.mark.parametrize("dtype", [t.F16, t.Q4_0], ids=lambda d: d.name)
def test_slice_rows_is_a_view(dtype: t.DType) -> None:
    tensor = make(dtype, (6, 2, 32))
    part = tensor.slice_rows(2, 5)
    assert part.shape == (3, 2, 32)
    assert np.array_equal(part.to_f32(), tensor.to_f32()[2:5])
    assert np.shares_memory(part.data, tensor.data)
    assert tensor.slice_rows(6, 6).shape == (0, 2, 32)


def test_transpose_moves_values_and_refuses_blocks() -> None:
    tensor = make(t.BF16, (3, 5))
    assert np.array_equal(tensor.transpose().to_f32(), tensor.to_f32().T)
    with pytest.raises(CheckpointError, match="blocks run along rows"):
        make(t.Q8_0, (32, 32)).transpose()
    with pytest.raises(CheckpointError, match="not a matrix"):
        make(t.F32, (4,)).transpose()


@pytest.mark.parametrize("index", [[-1], [8], [0, 99], [[0, 1]], [0.5], [True], ["a"]])
def test_take_rows_refuses(index: list[object]) -> None:
    with pytest.raises(CheckpointError, match="'w'"):
        make(t.F32, (8, 4)).take_rows(index)  # type: ignore[arg-type]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 9), (3, 2)])
def test_slice_rows_refuses(start: int, stop: int) -> None:
    with pytest.raises(CheckpointError, match="8 rows"):
        make(t.F32, (8, 4)).slice_rows(start, stop)


def test_a_quantized_vector_or_a_scalar_has_no_rows() -> None:
    for tensor in (make(t.Q8_0, (32,)), t.Tensor("w", t.F32, (), np.zeros(4, np.uint8))):
        with pytest.raises(CheckpointError, match="no rows"):
            tensor.take_rows([0])


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        (t.F32, (2, 2), 15),
        (t.Q4_0, (2, 33), 36),
        (t.Q4_0, (), 18),
        (t.F32, (-1, 4), 0),
        (t.F32, (1,) * 9, 4),
        (t.F32, (0, 1 << 62), 0),
    ],
)
def test_shape_and_bytes_must_agree(dtype: t.DType, shape: tuple[int, ...], nbytes: int) -> None:
    with pytest.raises(CheckpointError, match="'w'"):
        t.Tensor("w", dtype, shape, np.zeros(nbytes, np.uint8))


def test_empty_and_renamed() -> None:
    empty = t.Tensor("w", t.F32, (0, 3), np.zeros(0, np.uint8))
    assert empty.to_f32().shape == (0, 3)
    assert empty.take_rows([]).shape == (0, 3)
    assert empty.renamed("v").name == "v"
    assert empty.nbytes == 0
