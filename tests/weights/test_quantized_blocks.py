"""Every block type against the gguf package, bit for bit, and one row by hand."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from seethrough.weights import tensor as t
from seethrough.weights.gguf.blocks import DEQUANTIZE

QUANTIZED = [dtype for dtype in t.DTYPES.values() if dtype.is_quantized]
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2],
          "Q5_K": [0, 2], "Q6_K": [208]}  # fmt: skip


def random_blocks(dtype: t.DType, count: int, finite: bool = True) -> np.ndarray:
    rng = np.random.default_rng(count)
    blocks = rng.integers(0, 256, (count, dtype.block_bytes), dtype=np.uint8)
    for at in HALVES[dtype.name] if finite else []:
        scale = rng.standard_normal(count).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(count, 2)
    return blocks


def test_the_table_covers_the_types_and_sizes_of_ggml() -> None:
    assert {d.name for d in QUANTIZED} == DEQUANTIZE.keys()
    for dtype in t.DTYPES.values():
        sizes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[dtype.name]]
        assert (dtype.block_size, dtype.block_bytes) == sizes


@pytest.mark.parametrize("dtype", QUANTIZED, ids=lambda d: d.name)
@pytest.mark.parametrize("finite", [True, False], ids=["finite", "any-scale"])
@pytest.mark.filterwarnings("ignore:invalid value")  # the oracle multiplies 0 by inf as well
def test_random_blocks_equal_the_oracle(dtype: t.DType, finite: bool) -> None:
    blocks = random_blocks(dtype, 1500, finite)  # any-scale: subnormals, inf, NaN, -0
    tensor = t.Tensor("w", dtype, (1500, dtype.block_size), blocks.reshape(-1))
    expected = gguf.quants.dequantize(blocks, GGMLQuantizationType[dtype.name])
    got = tensor.to_f32()
    assert got.shape == expected.shape
    assert got.dtype == np.float32
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(got), nan)
    assert got[~nan].tobytes() == expected[~nan].tobytes()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_weights_come_back_close(name: str) -> None:
    values = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    raw = gguf.quants.quantize(values, GGMLQuantizationType[name])
    tensor = t.Tensor("w", t.DTYPES[name], (64, 256), raw.reshape(-1))
    # A step is about 4.5 / 2**bits for a normal block of 32; the mean error is a quarter of it.
    step = 4.5 / 2 ** int(name[1])
    assert np.abs(tensor.to_f32() - values).mean() < step / 3
    expected = gguf.quants.dequantize(raw, GGMLQuantizationType[name])
    assert tensor.to_f32().tobytes() == expected.tobytes()


def test_a_q4_0_block_by_hand() -> None:
    half = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    block = np.concatenate([half, np.full(16, 0xF0, np.uint8)])  # low nibbles 0, high nibbles 15
    got = t.Tensor("w", t.Q4_0, (32,), block).to_f32()
    assert got.tolist() == [-4.0] * 16 + [3.5] * 16


def test_chunks_do_not_change_the_result() -> None:
    blocks = random_blocks(t.Q8_0, 3 * (1 << 18) // 32 + 5)
    tensor = t.Tensor("w", t.Q8_0, (len(blocks), 32), blocks.reshape(-1))
    assert np.array_equal(tensor.to_f32(), DEQUANTIZE["Q8_0"](blocks))
