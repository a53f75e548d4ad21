"""The compiled backend of S10 to S12: candidates in a workspace, steps by `kernels.cpu.sampling`.

Up to the penalties the candidates are a row: the model's own until a step changes it, then a copy.
From temperature on they are what is left, values and ids side by side, and each step costs what is
left. Nothing that grows with the vocabulary is allocated for a token, and no row is ever sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from seethrough.sampling import adjust
from seethrough.sampling.ops import Score
from seethrough.sampling.philox import uniform
from seethrough.sampling.softmax import BLOCK, Cut, Ids, Row, check_finite, log
from seethrough.sampling.truncate import BORDER, top_p_limits, typical_limit

_BINS = 2048 * 4  # of one level of a selection

Kernel = Callable[..., None]
# How many arguments each kernel takes, all of them addresses or whole numbers.
_ARGUMENTS = {
    "survey": 3,
    "gather": 5,
    "heat": 4,
    "weigh": 5,
    "draw": 5,
    "rank": 4,
    "best": 7,
    "keep_best": 8,
    "cut_heavy": 8,
    "keep_heavy": 8,
    "mean_shift": 6,
    "cut_typical": 9,
    "keep_near": 8,
}


class KernelSource(Protocol):
    """Where compiled kernels come from."""

    def callable(self, name: str, arguments: int, *, hold_gil: bool) -> Kernel:
        """Kernel `name` as a function of so many integers."""
        ...


class Candidates(NamedTuple):
    """The first `n` of two arrays, in id order, and their addresses.

    `top` is their highest logit; None while they are a whole row that may hold -inf. `owned` says
    that the values lie in the workspace, so that a step may write to them. `first` is where the
    highest stands, if that is known.
    """

    values: Row
    ids: NDArray[np.int32]
    at: tuple[int, int]
    n: int
    top: float | None
    owned: bool
    first: int | None = None


class _Workspace:
    """Arrays for one vocabulary; `at` holds the address of each by its name."""

    def __init__(self, vocab_size: int) -> None:
        blocks = -(-vocab_size // BLOCK)
        self.all_ids = np.arange(vocab_size, dtype=np.int32)
        self.row = np.empty(vocab_size, dtype=np.float32)
        self.values = np.empty(vocab_size, dtype=np.float32)
        self.ids = np.empty(vocab_size, dtype=np.int32)
        self.weights = np.empty(blocks * BLOCK)
        self.mass = np.empty(blocks)
        self.terms = np.empty(blocks * BLOCK)
        self.terms_mass = np.empty(blocks)
        self.keys = np.empty(vocab_size, dtype=np.uint32)
        self.strip_keys = np.empty(vocab_size, dtype=np.uint32)
        self.distances = np.empty(vocab_size, dtype=np.float32)
        self.counts = np.empty(_BINS, dtype=np.int64)
        self.cells = np.empty(_BINS)
        self.best_values = np.empty(vocab_size, dtype=np.float32)
        self.best_ids = np.empty(vocab_size, dtype=np.int32)
        self.words = np.empty(3, dtype=np.int64)
        self.reals = np.empty(4)
        self.at = {name: array.ctypes.data for name, array in vars(self).items()}


class CompiledOps:
    """`SamplingOps` with a workspace for one vocabulary. Not thread-safe: one sampler uses it."""

    def __init__(self, vocab_size: int, kernels: KernelSource) -> None:
        # A kernel takes microseconds; letting go of the GIL could cost a wait of milliseconds.
        self._kernels = {
            name: kernels.callable(f"sample_{name}", count, hold_gil=True)
            for name, count in _ARGUMENTS.items()
        }
        self._size = vocab_size
        self._room = _Workspace(vocab_size)
        self._weighed: Candidates | None = None  # whose weights the workspace holds
        self._total = 0.0

    def begin(self, logits: Row) -> Candidates:
        """The row itself; nothing is copied before a step changes it."""
        if logits.shape != (self._size,):
            raise ValueError(f"expected a row of {self._size} logits, got shape {logits.shape}")
        logits = np.ascontiguousarray(logits, dtype=np.float32)
        at = (logits.ctypes.data, self._room.at["all_ids"])
        holes, first, bad = self._survey(at[0], self._size)
        if bad:
            check_finite(logits)  # says what it is
        top = None if holes else float(logits[first])
        return Candidates(logits, self._room.all_ids, at, self._size, top, False, first)

    def row(self, x: Candidates) -> Row:
        """Put the candidates back at their ids."""
        row = np.full(self._size, -np.inf, dtype=np.float32)
        row[x.ids[: x.n]] = x.values[: x.n]
        return row

    def is_empty(self, x: Candidates) -> bool:
        """Whether all is -inf."""
        return bool(np.isneginf(x.values.max()))

    # Bans and penalties: the plain form, in place.

    def keep_only(self, x: Candidates, ids: Ids) -> Candidates:
        """See `adjust`."""
        return self._edited(x, adjust.keep_only, ids)

    def ban(self, x: Candidates, ids: Ids) -> Candidates:
        """See `adjust`."""
        return self._edited(x, adjust.ban, ids)

    def logit_bias(self, x: Candidates, bias: Mapping[int, float]) -> Candidates:
        """See `adjust`."""
        return self._edited(x, adjust.logit_bias, bias)

    def repetition_penalty(self, x: Candidates, seen: Ids, penalty: float) -> Candidates:
        """See `adjust`."""
        return self._edited(x, adjust.repetition_penalty, seen, penalty)

    def presence_penalty(self, x: Candidates, output: Ids, penalty: float) -> Candidates:
        """See `adjust`."""
        return self._edited(x, adjust.presence_penalty, output, penalty)

    def frequency_penalty(self, x: Candidates, output: Ids, penalty: float) -> Candidates:
        """See `adjust`."""
        return self._edited(x, adjust.frequency_penalty, output, penalty)

    # Temperature and truncation: what is left, in ever shorter arrays.

    def temperature(self, x: Candidates, value: float) -> Candidates:
        """See `adjust`."""
        x, top = self._settled(x)
        room = self._room
        room.reals[0], room.reals[1] = top, value
        self._kernels["heat"](x.at[0], x.n, room.at["reals"], room.at["values"])
        return Candidates(room.values, x.ids, (room.at["values"], x.at[1]), x.n, 0.0, owned=True)

    def top_k(self, x: Candidates, k: int) -> Candidates:
        """See `truncate`."""
        x, _ = self._settled(x)
        return x if k >= x.n else self._keep_best(x, *self._kth(x, k))

    def top_p(self, x: Candidates, p: float) -> Candidates:
        """See `truncate`."""
        x, _ = self._settled(x)
        room = self._room
        limit, tail = top_p_limits(p, self._weigh(x), x.n)
        room.reals[0], room.reals[1] = limit, tail
        at = (room.at[name] for name in ("keys", "terms", "cells", "words", "reals"))
        self._kernels["cut_heavy"](x.at[0], room.at["weights"], x.n, *at)
        cut = self._cut()
        return x if cut is None else self._keep_best(x, cut.key, cut.ties_within(limit))

    def min_p(self, x: Candidates, share: float) -> Candidates:
        """See `truncate`."""
        x, _ = self._settled(x)
        self._weigh(x)
        room = self._room
        room.reals[0] = share * (1 - BORDER)
        at = (room.at[name] for name in ("reals", "values", "ids", "words"))
        self._kernels["keep_heavy"](*x.at, room.at["weights"], x.n, *at)
        return self._kept(x)

    def typical_p(self, x: Candidates, p: float) -> Candidates:
        """See `truncate`."""
        x, top = self._settled(x)
        total, n, room = self._weigh(x), x.n, self._room
        log_total, reals = log(total), room.reals
        reals[0] = top
        at = (room.at[name] for name in ("terms", "terms_mass", "reals"))
        self._kernels["mean_shift"](x.at[0], room.at["weights"], n, *at)
        entropy = log_total - float(reals[0]) / total
        reals[:] = top, log_total, entropy, typical_limit(p, total)
        at = (room.at[name] for name in ("distances", "keys", "terms", "cells", "words", "reals"))
        self._kernels["cut_typical"](x.at[0], room.at["weights"], n, *at)
        cut = self._cut()
        if cut is None:
            return x
        at = (room.at[name] for name in ("values", "ids", "words"))
        self._kernels["keep_near"](*x.at, room.at["distances"], n, cut.key, *at)
        x = self._kept(x)
        _, first, _ = self._survey(x.at[0], x.n)
        return x._replace(top=float(x.values[first]))

    # The choice, and what is reported beside it.

    def greedy(self, x: Candidates) -> int:
        """The id of the highest logit, ties to the lower id."""
        first = self._survey(x.at[0], x.n)[1] if x.first is None else x.first
        return int(x.ids[first])

    def choose(self, x: Candidates, u: float) -> int:
        """See `sampling.choose`."""
        x, _ = self._settled(x)
        room = self._room
        room.reals[0] = u * self._weigh(x)
        at = (room.at[name] for name in ("mass", "reals", "words"))
        self._kernels["draw"](room.at["weights"], x.n, *at)
        return int(x.ids[room.words[0]])

    def uniform(self, seed: int, output_index: int, sample_index: int) -> float:
        """See `sampling.philox`."""
        return uniform(seed, output_index, sample_index)

    def log_total(self, x: Candidates) -> float:
        """log(sum(exp(x)))."""
        x, top = self._settled(x)
        return top + log(self._weigh(x))

    def score(self, x: Candidates, token_id: int) -> Score:
        """Logit and rank of one token that is among the candidates."""
        at = int(np.searchsorted(x.ids[: x.n], np.int32(token_id)))
        self._kernels["rank"](x.at[0], x.n, at, self._room.at["words"])
        return Score(token_id, float(x.values[at]), int(self._room.words[0]))

    def largest(self, x: Candidates, k: int) -> list[Score]:
        """The k highest, by rank; nothing that is -inf."""
        k = min(k, x.n)
        if k == 0:
            return []
        room = self._room
        values, ids = room.best_values, room.best_ids
        at = (room.at[name] for name in ("best_values", "best_ids", "words"))
        self._kernels["keep_best"](*x.at, x.n, *self._kth(x, k), *at)
        n = int(room.words[0])
        order = np.argsort(-values[:n], kind="stable")  # stable: ids ascend within a tie
        found = [(int(ids[i]), float(values[i])) for i in order if values[i] > -np.inf]
        return [Score(i, value, rank) for rank, (i, value) in enumerate(found, start=1)]

    def _survey(self, values_at: int, n: int) -> tuple[int, int, int]:
        """How many are -inf, where the highest is, and whether there is what must not be."""
        self._kernels["survey"](values_at, n, self._room.at["words"])
        holes, first, bad = self._room.words.tolist()
        return holes, first, bad

    def _edited(self, x: Candidates, step: Callable[..., Row], *parameters: Any) -> Candidates:
        """A step of `adjust` on a row of the workspace."""
        room = self._room
        if not x.owned:
            np.copyto(room.row, x.values)
            x = Candidates(room.row, x.ids, (room.at["row"], x.at[1]), x.n, None, owned=True)
        step(x.values, *parameters, out=x.values)
        self._weighed = None
        return x

    def _settled(self, x: Candidates) -> tuple[Candidates, float]:
        """The candidates without -inf, and their highest logit."""
        if x.top is not None:
            return x, x.top
        holes, first, _ = self._survey(x.at[0], x.n)
        top = float(x.values[first])
        if not holes:
            return x._replace(top=top), top
        room = self._room
        at = (room.at[name] for name in ("values", "ids", "words"))
        self._kernels["gather"](x.at[0], x.n, *at)
        return self._kept(x._replace(top=top)), top

    def _weigh(self, x: Candidates) -> float:
        """Weights of settled candidates into the workspace; gives their total."""
        if self._weighed is not x:
            room = self._room
            room.reals[0] = x.top
            at = (room.at[name] for name in ("weights", "mass", "reals"))
            self._kernels["weigh"](x.at[0], x.n, *at)
            self._total = float(room.reals[0])
            self._weighed = x
        return self._total

    def _kth(self, x: Candidates, k: int) -> tuple[int, int]:
        """The key of the k-th highest value and how many of its equals are among the k."""
        room = self._room
        at = (room.at[name] for name in ("keys", "strip_keys", "counts", "words"))
        self._kernels["best"](x.at[0], x.n, k, *at)
        return int(room.words[0]), int(room.words[1])

    def _cut(self) -> Cut | None:
        """What a cutting kernel left in `words` and `reals`."""
        ties, key, _ = self._room.words.tolist()
        weight, before = self._room.reals[:2].tolist()
        return Cut(key, ties, weight, before) if ties else None

    def _keep_best(self, x: Candidates, key: int, ties: int) -> Candidates:
        at = (self._room.at[name] for name in ("values", "ids", "words"))
        self._kernels["keep_best"](*x.at, x.n, key, ties, *at)
        return self._kept(x)

    def _kept(self, x: Candidates) -> Candidates:
        """What a step left; the same object where nothing fell out, so its weights still hold."""
        room, kept = self._room, int(self._room.words[0])
        if kept == x.n:
            return x
        at = (room.at["values"], room.at["ids"])
        return Candidates(room.values, room.ids, at, kept, x.top, owned=True)
