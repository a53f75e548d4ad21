"""The promise of the `cpu` backend on the default model, whole: a row's bits are its own.

One prefill = chunks of any size = one token at a time; 1 thread = 2; alone = with mates in the
batch; traced = untraced. Logits of every position and every value of every stage, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from seethrough.kernels.batch import ForwardBatch
from seethrough.kv.pool import BlockTable, KVPool, KVShape
from seethrough.model.load import ModelWeights, Placement, build_model, understand
from seethrough.model.program import Op
from seethrough.model.run import Model
from seethrough.weights.catalog import default_cache_dir
from seethrough.weights.checkpoint import open_checkpoint
from seethrough.weights.files import resolve_model

F32 = NDArray[np.float32]
LENGTH = 300  # past a piece of attention (256) and past a block row of matrices
ROWS = 512


@dataclass
class Whole:
    """The default model on some threads, and a pool that every run starts anew."""

    weights: ModelWeights
    model: Model

    def pool(self) -> KVPool:
        spec = self.weights.spec
        shape = KVShape(spec.n_layers, spec.n_kv_heads, spec.head_dim, np.dtype(np.float16))
        return KVPool(shape, 96)

    def logits(self, ids: Sequence[int], chunk: int, tracer: Any = None) -> F32:
        """Logits of every position, computed so many positions at a time."""
        pool = self.pool()
        table = BlockTable(pool)
        table.reserve(len(ids))
        rows = []
        for start in range(0, len(ids), chunk):
            batch = step([(ids[start : start + chunk], start, table)])
            rows.append(self.model.run(batch, pool, tracer).copy())
        return np.concatenate(rows)


def step(parts: Sequence[tuple[Sequence[int], int, BlockTable]]) -> ForwardBatch:
    """One step of several requests: ids, their first position, block table."""
    lengths = [len(ids) for ids, _, _ in parts]
    rows = sum(lengths)
    return ForwardBatch(
        token_ids=np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _, _ in parts]),
        positions=np.concatenate([np.arange(at, at + len(ids)) for ids, at, _ in parts]),
        slots=np.concatenate([table.slots(at, at + len(ids)) for ids, at, table in parts]),
        query_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        seq_lens=np.array([at + len(ids) for ids, at, _ in parts]),
        block_tables=tuple(np.asarray(table.blocks) for _, _, table in parts),
        logit_rows=np.arange(rows),
    )


@dataclass
class Values:
    """A tracer that keeps everything, per operation over all steps."""

    kept: dict[tuple[Any, ...], list[F32]] = field(default_factory=dict)

    def wants_scores(self, layer: int) -> bool:
        return True

    def op_done(self, op: Op, outputs: tuple[F32, ...], scores: list[F32], seconds: float) -> None:
        for value in outputs:
            key = (op.stage, op.kernel, op.layer, op.outputs)
            self.kept.setdefault(key, []).append(value)
        for value in scores:  # [H, n, t], with t growing from step to step
            wide = np.full((*value.shape[:2], LENGTH), -np.inf, dtype=np.float32)
            wide[:, :, : value.shape[2]] = value
            self.kept.setdefault(("S6.4", op.layer), []).append(wide.transpose(1, 0, 2))

    def joined(self) -> dict[tuple[Any, ...], F32]:
        return {key: np.concatenate(values) for key, values in self.kept.items()}


@pytest.fixture(scope="module")
def placed(default_model: str) -> Callable[[int], Whole]:
    weights = understand(open_checkpoint(resolve_model(default_model, None)))
    made: dict[int, Whole] = {}

    def place(threads: int) -> Whole:
        if threads not in made:
            placement = Placement(
                backend="cpu",
                threads=threads,
                max_model_len=1024,
                max_rows=ROWS,
                kv_bytes=2,
                kernel_dir=default_cache_dir().parent / "kernels",
            )
            made[threads] = Whole(weights, build_model(weights, placement))
        return made[threads]

    return place


@pytest.fixture(scope="module")
def whole(placed: Callable[[int], Whole]) -> Iterator[Whole]:
    return placed(2)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return [int(i) for i in np.random.default_rng(7).integers(0, 49_152, LENGTH)]


@pytest.fixture(scope="module")
def expected(whole: Whole, ids: list[int]) -> F32:
    return whole.logits(ids, LENGTH)


@pytest.mark.parametrize("chunk", [1, 7, 16, 255, 256, 257])
def test_chunks_change_nothing(whole: Whole, ids: list[int], expected: F32, chunk: int) -> None:
    np.testing.assert_array_equal(whole.logits(ids, chunk), expected)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("chunk", [LENGTH, 37, 1])
def test_threads_change_nothing(
    placed: Callable[[int], Whole], ids: list[int], expected: F32, threads: int, chunk: int
) -> None:
    np.testing.assert_array_equal(placed(threads).logits(ids, chunk), expected)


def test_mates_change_nothing(whole: Whole, ids: list[int], expected: F32) -> None:
    """The request in chunks of random sizes beside others of every length."""
    rng = np.random.default_rng(3)
    pool, got, done = whole.pool(), [], 0
    table = BlockTable(pool)
    table.reserve(LENGTH)
    while done < LENGTH:
        take = int(min(rng.integers(1, 60), LENGTH - done))
        mates = []
        for _ in range(int(rng.integers(0, 5))):
            mate = BlockTable(pool)
            length = int(rng.integers(1, 70))
            mate.reserve(length)
            mates.append((rng.integers(0, 49_152, length).tolist(), 0, mate))
        at = int(rng.integers(0, len(mates) + 1))
        parts = [*mates[:at], (ids[done : done + take], done, table), *mates[at:]]
        logits = whole.model.run(step(parts), pool)
        first = sum(len(part[0]) for part in parts[:at])
        got.append(logits[first : first + take].copy())
        for _, _, mate in mates:
            mate.release()
        done += take
    np.testing.assert_array_equal(np.concatenate(got), expected)


def test_looking_changes_nothing(whole: Whole, ids: list[int], expected: F32) -> None:
    """Traced equals untraced, and every value is the same in one prefill and in chunks."""
    one, many = Values(), Values()
    np.testing.assert_array_equal(whole.logits(ids, LENGTH, one), expected)
    np.testing.assert_array_equal(whole.logits(ids, 41, many), expected)
    first, second = one.joined(), many.joined()
    assert first.keys() == second.keys()
    assert len(first) == sum(bool(op.outputs) for op in whole.model.ops) + 30
    for key, value in first.items():
        np.testing.assert_array_equal(second[key], value, err_msg=str(key))


def test_it_is_the_reference_within_its_rounding(
    whole: Whole, ids: list[int], expected: F32
) -> None:
    """int8 activations and a float16 cache move logits a little; a wrong kernel, far."""
    placement = Placement(
        backend="reference", threads=2, max_model_len=1024, max_rows=ROWS, kv_bytes=2
    )
    plain = Whole(whole.weights, build_model(whole.weights, placement)).logits(ids, LENGTH)
    assert np.corrcoef(plain.ravel(), expected.ravel())[0, 1] > 0.99
    assert (plain.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.85
