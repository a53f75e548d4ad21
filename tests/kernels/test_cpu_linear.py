"""Matrix products of the `cpu` backend: every stored type, every shape, every number of rows.

The expectation is float64 over the file's own weights (which `gguf` checks elsewhere) and the
activations that the kernel sees; the difference is float32 rounding alone.
"""

from __future__ import annotations

import numpy as np
import pytest
from cpu_harness import (
    expected_linear,
    linear,
    packed,
    quantized,
    random_tensor,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from seethrough.kernels.cpu.forms import FLOATS, FORMS, packed_bytes
from seethrough.weights.tensor import DTYPES, Tensor

TYPES = [*FORMS, *FLOATS]
BLOCK = {name: DTYPES[name].block_size if name in FORMS else 1 for name in TYPES}


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 23, 70])
def test_products_are_right(dtype: str, rows: int) -> None:
    tensor = random_tensor(dtype, 41, 512)
    x = normal(rows, 512)
    wanted = expected_linear(tensor, x)
    size = np.abs(tensor.to_f32()).astype(np.float64) @ np.abs(x).T.max(axis=1)
    error = np.abs(linear(packed(tensor), x, threads=2) - wanted)
    assert (error <= 1e-6 * size).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_row_depends_on_that_row_alone(data: st.DataObject) -> None:
    """Any shape, any mates, any number of threads: the row's bits are those of its lone run."""
    dtype = data.draw(st.sampled_from(TYPES))
    outputs = data.draw(st.integers(1, 70))
    columns = BLOCK[dtype] * data.draw(st.integers(1, 3 if BLOCK[dtype] == 256 else 9))
    if dtype in FLOATS:
        columns = data.draw(st.integers(1, 200))
    rows = data.draw(st.integers(1, 40))
    threads = data.draw(st.sampled_from([1, 2, 3]))
    matrix = packed(random_tensor(dtype, outputs, columns, seed=rows))
    x = normal(rows, columns, seed=outputs) * np.float32(data.draw(st.sampled_from([1e-3, 1, 1e3])))
    bias = normal(outputs) if data.draw(st.booleans()) else None
    together = linear(matrix, x, bias, threads)
    row = data.draw(st.integers(0, rows - 1))
    np.testing.assert_array_equal(linear(matrix, x[row : row + 1], bias)[0], together[row])


@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_do_not_overflow(dtype: str, byte: int, sign: int) -> None:
    """All quants and all activations at their extremes: 16-bit partial sums must still hold."""
    tensor = random_tensor(dtype, 16, 512)
    kind = tensor.dtype
    blocks = tensor.data.copy().reshape(-1, kind.block_bytes)
    scales = {"Q6_K": [208, 209], "Q4_K": [0, 1, 2, 3], "Q5_K": [0, 1, 2, 3]}.get(
        dtype, [0, 1, 2, 3] if dtype in ("Q4_1", "Q5_1") else [0, 1]
    )
    kept = blocks[:, scales].copy()
    blocks[:] = byte
    blocks[:, scales] = kept
    full = Tensor("t", kind, tensor.shape, blocks.reshape(-1))
    x = np.full((5, 512), sign, dtype=np.float32)
    x[1::2] *= np.where(np.arange(512) % 2, 1, -1).astype(np.float32)
    wanted = expected_linear(full, x)
    scale = np.abs(full.to_f32()).astype(np.float64).sum(axis=1)
    assert (np.abs(linear(packed(full), x) - wanted) <= 1e-6 * scale).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["Q4_1", "Q8_0", "Q6_K", "F32", "BF16"])
def test_what_is_no_number_shows(dtype: str, bad: float) -> None:
    """It must not round to an ordinary int8. Whole chains are tested with the norm's kernel."""
    from cpu_rows import quantize_rows

    x = normal(3, 512)
    x[1, 300] = bad
    matrix = packed(random_tensor(dtype, 20, 512))
    if dtype in FORMS:
        _, scale = quantize_rows(x)
        assert np.isnan(scale[1, 300 // 32])
        assert np.isfinite(np.delete(scale, 300 // 32, axis=1)).all()
        assert np.isfinite(scale[[0, 2]]).all()
    else:
        y = linear(matrix, x)
        assert not np.isfinite(y[1]).any()
        assert np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_memory_is_what_the_file_holds(dtype: str) -> None:
    """Nothing is expanded: packed sizes stay within a few percent of the file's."""
    columns, rows = 4096, 4096
    stored = DTYPES[dtype].nbytes((rows, columns))
    assert packed_bytes(dtype, (rows, columns)) <= 1.03 * stored
    assert packed(random_tensor(dtype, 64, 512)).data.nbytes == packed_bytes(dtype, (64, 512))


def test_activations_are_within_half_a_step() -> None:
    x = normal(4, 96)
    _, q, scale = quantized(x)
    seen = q.reshape(4, 3, 32) * scale[..., None]
    assert (np.abs(seen.reshape(4, 96) - x) <= 0.5001 * np.repeat(scale, 32, axis=1)).all()
