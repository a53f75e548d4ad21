"""Two traces of the same ids, side by side: where they part, and what that does to the answer.

Reads traces only; how they came to be, and how this is shown, is said elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seethrough.errors import DiffError
from seethrough.trace.trace import Trace
from seethrough.trace.values import DERIVED, Key

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """One value of both traces.

    Attributes:
        relative: ‖a − b‖₂ / ‖a‖₂ over the entries that are finite in both; infinite where only ‖a‖
            is 0.
        largest: the greatest |a − b| of these.
        differing: entries that are not equal bit for bit, hidden ones (−∞) included.
        size: all entries.
    """

    stage: str
    name: str
    layer: int | None
    relative: float
    largest: float
    differing: int
    size: int


@dataclass(frozen=True, slots=True)
class PositionDiff:
    """What both predict after one position.

    Attributes:
        position: of the last token that both have seen.
        next_id: the token that follows it.
        prob: its probability by the raw logits, in A and in B.
        rank: its rank among all, from 1.
        best: what each would choose greedily.
        kl: Σ p_A · ln(p_A / p_B) of the raw logits, in nats.
        kl_candidates: the same of what was drawn from (S11); None for prompt positions. Infinite
            where B leaves out what A keeps.
        output_index: which output token the next one is; None inside the prompt.
    """

    position: int
    next_id: int
    prob: tuple[float, float]
    rank: tuple[int, int]
    best: tuple[int, int]
    kl: float
    kl_candidates: float | None
    output_index: int | None


@dataclass(frozen=True, slots=True)
class Diff:
    """Values in the order in which they are computed, then positions.

    `unlike` names values that only one has, or that have different shapes.
    """

    values: list[ValueDiff]
    positions: list[PositionDiff]
    unlike: list[str]

    @property
    def identical(self) -> bool:
        """Whether nothing differs by a single bit."""
        return not self.unlike and all(value.differing == 0 for value in self.values)

    def parting(self, tolerance: float | None = None) -> ValueDiff | None:
        """The first value with a relative error above `tolerance`; without one, the first that
        differs by a bit.
        """
        for value in self.values:
            beyond = value.differing > 0 if tolerance is None else value.relative > tolerance
            if beyond:
                return value
        return None

    def to_dict(self, tolerance: float) -> dict[str, Any]:
        """Plain JSON; what is infinite becomes null."""
        return {
            "identical": self.identical,
            "parting": _plain(self.parting()),
            "tolerance": tolerance,
            "parting_above_tolerance": _plain(self.parting(tolerance)),
            "values": [_plain(value) for value in self.values],
            "positions": [_plain(position) for position in self.positions],
            "unlike": self.unlike,
        }


def diff(a: Trace, b: Trace) -> Diff:
    """Compare two traces of the same ids; `LLM.follow` makes the second one.

    Raises:
        DiffError: their ids differ, so that nothing stands beside what it belongs to.
    """
    if _ids(a) != _ids(b):
        raise DiffError("the two traces have other ids: trace B along A's ids (LLM.follow)")
    held_a, held_b = a.keys(), b.keys()
    order = _order(a)
    shared = sorted(set(held_a) & set(held_b), key=order.__getitem__)
    unlike = [f"{_name(key)}: only in A" for key in held_a if key not in set(held_b)]
    unlike += [f"{_name(key)}: only in B" for key in held_b if key not in set(held_a)]
    values = []
    for key in shared:
        x, y = (trace.array(key[0], key[1], layer=key[2]) for trace in (a, b))
        if x.shape == y.shape:
            values.append(_compare(key, x, y))
        else:
            unlike.append(f"{_name(key)}: {list(x.shape)} in A, {list(y.shape)} in B")
    return Diff(values, list(_positions(a, b)), unlike)


# ---------------------------------------------------------------------- values


def _compare(key: Key, x: NDArray[Any], y: NDArray[Any]) -> ValueDiff:
    differing = int(np.count_nonzero((x != y) & ~((x != x) & (y != y))))
    if differing == 0:
        return ValueDiff(*key, 0.0, 0.0, 0, x.size)
    finite = np.isfinite(x) & np.isfinite(y)
    left, right = x[finite].astype(np.float64), y[finite].astype(np.float64)
    error, norm = float(np.linalg.norm(left - right)), float(np.linalg.norm(left))
    largest = float(np.abs(left - right).max(initial=0.0))
    relative = error / norm if norm > 0 else (math.inf if error > 0 else 0.0)
    return ValueDiff(*key, relative, largest, differing, x.size)


def _order(trace: Trace) -> dict[Key, tuple[int, bool]]:
    """When each value was made; a derived one stands right behind what it is derived from."""
    made: dict[Key, tuple[int, bool]] = {}
    for step in trace.steps:
        for key in step.pieces:
            made.setdefault(key, (len(made), False))
    for name, (stage, source_stage, source) in DERIVED.items():
        for key in [key for key in made if key[:2] == (source_stage, source)]:
            made[stage, name, key[2]] = made[key][0], True
    return made


def _name(key: Key) -> str:
    stage, name, layer = key
    return f"{stage} {name}" + ("" if layer is None else f" of layer {layer}")


# ---------------------------------------------------------------------- positions


def _ids(trace: Trace) -> list[int]:
    return trace.prompt_token_ids + trace.output.outputs[0].token_ids


def _positions(a: Trace, b: Trace) -> Iterator[PositionDiff]:
    """One for each position whose logits both hold and that has a token behind it."""
    logits = [_by_position(trace) for trace in (a, b)]
    ids, prompt = _ids(a), len(a.prompt_token_ids)
    for position in sorted(logits[0].keys() & logits[1].keys()):
        if position + 1 >= len(ids):
            continue
        next_id, index = ids[position + 1], position + 1 - prompt
        rows = [held[position] for held in logits]
        width = min(len(row) for row in rows)  # one may have padding that nothing means
        p, q = (_log_softmax(row[:width]) for row in rows)
        yield PositionDiff(
            position=position,
            next_id=next_id,
            prob=(math.exp(p[next_id]), math.exp(q[next_id])),
            rank=(_rank(p, next_id), _rank(q, next_id)),
            best=(int(p.argmax()), int(q.argmax())),
            kl=_kl(p, q),
            kl_candidates=_candidates(a, b, index) if index >= 0 else None,
            output_index=index if index >= 0 else None,
        )


def _by_position(trace: Trace) -> dict[int, NDArray[Any]]:
    if ("S9", "logits", None) not in trace.keys():  # noqa: SIM118 - a method, not a mapping's
        return {}
    rows = trace.array("S9", "logits")
    return dict(zip(trace.positions("S9", "logits"), rows, strict=True))


def _candidates(a: Trace, b: Trace, index: int) -> float | None:
    key = ("S11", "candidate_logits", None)
    if any(key not in trace.keys(index) for trace in (a, b)):
        return None
    rows = [trace.array("S11", "candidate_logits", step=index)[0] for trace in (a, b)]
    width = min(len(row) for row in rows)
    p, q = (_log_softmax(row[:width]) for row in rows)
    return _kl(p, q)


def _log_softmax(row: NDArray[Any]) -> F64:
    x = row.astype(np.float64)
    x = x - x.max()
    return np.asarray(x - math.log(float(np.exp(x).sum())))


def _kl(p: F64, q: F64) -> float:
    """Σ eᵖ (p − q) over what A gives any probability; never below 0."""
    kept = p > -np.inf
    if np.isneginf(q[kept]).any():
        return math.inf
    return max(0.0, float(np.sum(np.exp(p[kept]) * (p[kept] - q[kept]))))


def _rank(scores: F64, token_id: int) -> int:
    """1 for the greatest; of equal ones the lower id stands first."""
    score = scores[token_id]
    return (
        1
        + int(np.count_nonzero(scores > score))
        + int(np.count_nonzero(scores[:token_id] == score))
    )


def _plain(found: ValueDiff | PositionDiff | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {name: _finite(value) for name, value in asdict(found).items()}


def _finite(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
