"""Attention and the cache it reads: against torch, against loops, and in every layout of blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from torch.nn import functional

from seethrough.kernels import reference as ops
from seethrough.kernels.batch import ForwardBatch

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

PLAIN = {"layer": 0, "scale": 0.5, "window": None, "softcap": None}


@dataclass
class Pages:
    """A cache of two layers, full of NaN."""

    k: Array
    v: Array
    block_size: int


def pages(blocks: int, block_size: int, n_kv: int, head_dim: int, dtype: str = "f4") -> Pages:
    size = (2, blocks, block_size, n_kv, head_dim)
    return Pages(np.full(size, np.nan, dtype), np.full(size, np.nan, dtype), block_size)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@dataclass
class Setting:
    """Requests with their keys and values in shuffled blocks, and their newest rows as queries."""

    q: Array  # [N, H, dh]
    keys: list[Array]  # per request, [t, Hkv, dh]
    values: list[Array]
    kv: Pages
    batch: ForwardBatch


def setting(
    work: list[tuple[int, int]], n_heads: int = 4, n_kv: int = 2, dh: int = 8, block_size: int = 4,
    layer: int = 0, dtype: str = "f4",
) -> Setting:  # fmt: skip
    """`work`: per request (cached positions in all, new rows)."""
    needed = [-(-t // block_size) for t, _ in work]
    order = np.random.default_rng(1).permutation(sum(needed) + 3)
    kv = pages(len(order), block_size, n_kv, dh, dtype)
    tables = np.split(order[: sum(needed)], np.cumsum(needed)[:-1])
    keys = [normal(t, n_kv, dh, seed=10 + i) for i, (t, _) in enumerate(work)]
    values = [normal(t, n_kv, dh, seed=50 + i) for i, (t, _) in enumerate(work)]
    for table, k, v in zip(tables, keys, values, strict=True):
        at = np.arange(len(k))
        slots = table[at // block_size] * block_size + at % block_size
        ops.write_kv(k, v, slots, kv, layer=layer)
    rows = sum(n for _, n in work)
    batch = ForwardBatch(
        token_ids=np.zeros(rows, dtype=np.int64),
        positions=np.concatenate([np.arange(t - n, t) for t, n in work]),
        slots=np.zeros(rows, dtype=np.int64),
        query_start=np.cumsum([0, *(n for _, n in work)]),
        seq_lens=np.array([t for t, _ in work]),
        block_tables=tuple(tables),
        logit_rows=np.arange(rows),
    )
    return Setting(normal(rows, n_heads, dh, seed=99), keys, values, kv, batch)


def slow(
    s: Setting, request: int, scale: float, window: int | None = None, softcap: float | None = None,
    slopes: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Masked scores [H, n, t] and outputs [n, H, dh] of one request, number by number."""
    rows = s.batch.rows_of(request)
    q, k, v = s.q[rows].astype(float), s.keys[request].astype(float), s.values[request]
    n, n_heads, _ = q.shape
    group = n_heads // k.shape[1]
    scores = np.full((n_heads, n, len(k)), -np.inf)
    out = np.zeros(q.shape)
    for i, position in enumerate(s.batch.positions[rows]):
        for h in range(n_heads):
            for j in range(position + 1):
                if window is not None and j <= position - window:
                    continue
                x = float(q[i, h] @ k[j, h // group]) * scale
                if softcap is not None:
                    x = softcap * math.tanh(x / softcap)
                if slopes is not None:
                    x += float(slopes[h]) * (j - int(position))
                scores[h, i, j] = x
            weights = np.exp(scores[h, i] - scores[h, i].max())
            out[i, h] = weights / weights.sum() @ v[:, h // group]
    return scores, out


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window 1": {"window": 1},
    "window 3": {"window": 3},
    "window of the whole": {"window": 100},
    "softcap": {"softcap": 0.8},
    "alibi": {"slopes": np.array([0.5, 0.25, 0.1, 0.01], dtype=np.float32)},
    "all": {"window": 5, "softcap": 1.5, "slopes": np.array([1, 2, 3, 4], dtype=np.float32)},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("n_kv", [1, 2, 4])
def test_ragged_batch_equals_the_definition(variant: str, n_kv: int) -> None:
    more = VARIANTS[variant]
    s = setting([(9, 9), (1, 1), (13, 4), (8, 1)], n_kv=n_kv)
    tapped: list[Array] = []
    attrs = PLAIN | {k: v for k, v in more.items() if k != "slopes"}
    out = ops.attend(s.q, s.kv, s.batch, more.get("slopes"), **attrs, scores=tapped)
    assert len(tapped) == 4
    for request, scores in enumerate(tapped):
        expected_scores, expected = slow(s, request, 0.5, **more)
        assert_allclose(scores, expected_scores, rtol=1e-5, atol=1e-5)
        assert_array_equal(np.isneginf(scores), np.isneginf(expected_scores))
        assert_allclose(out[s.batch.rows_of(request)], expected, rtol=1e-5, atol=1e-5)


def test_equals_torch() -> None:
    s = setting([(20, 20)], n_heads=6, n_kv=2, dh=16)
    q, k, v = (torch.tensor(x).transpose(0, 1)[None] for x in (s.q, s.keys[0], s.values[0]))
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out = ops.attend(s.q, s.kv, s.batch, **PLAIN | {"scale": 0.25})
    assert_allclose(out, expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tapped_scores_are_the_ones_used(variant: str) -> None:
    """softmax(scores) · v is the output; the tap changes no bit."""
    more = dict(VARIANTS[variant])
    slopes = more.pop("slopes", None)
    s = setting([(12, 5), (6, 6)])
    tapped: list[Array] = []
    out = ops.attend(s.q, s.kv, s.batch, slopes, **PLAIN | more, scores=tapped)
    assert_array_equal(ops.attend(s.q, s.kv, s.batch, slopes, **PLAIN | more), out)
    for request, scores in enumerate(tapped):
        weights = torch.softmax(torch.tensor(scores), -1).numpy()
        v = s.values[request].repeat(2, axis=1)
        expected = np.einsum("hnt,thd->nhd", weights, v)
        assert_allclose(out[s.batch.rows_of(request)], expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    work=st.lists(
        st.integers(1, 30).flatmap(lambda t: st.tuples(st.just(t), st.integers(1, t))),
        min_size=1,
        max_size=5,
    ),
    block_size=st.integers(1, 17),
    window=st.none() | st.integers(1, 40),
)
def test_each_request_is_as_alone(
    work: list[tuple[int, int]], block_size: int, window: int | None
) -> None:
    s = setting(work, block_size=block_size)
    attrs = PLAIN | {"window": window}
    whole = ops.attend(s.q, s.kv, s.batch, **attrs)
    assert np.isfinite(whole).all()
    for r in range(len(work)):
        rows = s.batch.rows_of(r)
        for row in range(rows.start, rows.stop):
            position = s.batch.positions[row : row + 1]
            alone = ForwardBatch(
                token_ids=np.zeros(1, dtype=np.int64),
                positions=position,
                slots=np.zeros(1, dtype=np.int64),
                query_start=np.array([0, 1]),
                seq_lens=position + 1,
                block_tables=(s.batch.block_tables[r],),
                logit_rows=np.array([0]),
            )
            out = ops.attend(s.q[row : row + 1], s.kv, alone, **attrs)
            assert_allclose(whole[row], out[0], rtol=1e-5, atol=1e-5)


def test_layers_have_their_own_pages() -> None:
    s = setting([(5, 5)], layer=1)
    assert np.isnan(s.kv.k[0]).all()
    assert np.isfinite(ops.attend(s.q, s.kv, s.batch, **PLAIN | {"layer": 1})).all()


def test_table_longer_than_needed() -> None:
    """Blocks that are reserved but not reached, full of NaN, are not read."""
    s = setting([(5, 2)])
    free = sorted(set(range(s.kv.k.shape[1])) - set(s.batch.block_tables[0].tolist()))
    longer = np.concatenate([s.batch.block_tables[0], free])
    batch = ForwardBatch(
        s.batch.token_ids, s.batch.positions, s.batch.slots, s.batch.query_start,
        s.batch.seq_lens, (longer,), s.batch.logit_rows,
    )  # fmt: skip
    expected = ops.attend(s.q, s.kv, s.batch, **PLAIN)
    assert_array_equal(ops.attend(s.q, s.kv, batch, **PLAIN), expected)


def test_large_scores_stay_sharp() -> None:
    s = setting([(6, 6)])
    out = ops.attend(s.q, s.kv, s.batch, **PLAIN | {"scale": 1e6})
    scores, _ = slow(s, 0, 1e6)
    best = scores.argmax(-1)  # [H, n]
    for h in range(4):
        assert_allclose(out[:, h], s.values[0][best[h], h // 2], rtol=1e-5)


# ------------------------------------------------------------------ writing


def test_write_goes_to_its_slots_and_nowhere_else() -> None:
    kv = pages(3, 4, 2, 8)
    k, v = normal(3, 2, 8), normal(3, 2, 8, seed=1)
    ops.write_kv(k, v, np.array([11, 0, 5]), kv, layer=1)
    flat_k, flat_v = kv.k[1].reshape(12, 2, 8), kv.v[1].reshape(12, 2, 8)
    assert_array_equal(flat_k[[11, 0, 5]], k)
    assert_array_equal(flat_v[[11, 0, 5]], v)
    others = [i for i in range(12) if i not in (11, 0, 5)]
    assert np.isnan(flat_k[others]).all()
    assert np.isnan(kv.k[0]).all()


def test_float16_pages_round_to_nearest_even() -> None:
    kv = pages(1, 4, 1, 2, "f2")
    k = np.array([[[1 + 2**-11, 1 + 3 * 2**-11]], [[1e-9, -70000]], [[65519, 65520]]], "f4")
    ops.write_kv(k, k, np.array([0, 1, 2]), kv, layer=0)
    expected = [[[1, 1 + 2**-9]], [[0, -np.inf]], [[65504, np.inf]]]
    assert_array_equal(kv.k[0, 0, :3], expected)
    assert_array_equal(kv.v[0, 0, :3], expected)


def test_attention_reads_what_was_rounded() -> None:
    s = setting([(7, 7)], dtype="f2")
    s.keys = [k.astype(np.float16).astype(np.float32) for k in s.keys]
    s.values = [v.astype(np.float16).astype(np.float32) for v in s.values]
    out = ops.attend(s.q, s.kv, s.batch, **PLAIN)
    assert out.dtype == np.float32
    assert_allclose(out, slow(s, 0, 0.5)[1], rtol=1e-5, atol=1e-5)
