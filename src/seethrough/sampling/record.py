"""What a traced draw shows: every active step of S10 and S11 with its effect, then the draw.

Only looks at rows that the sampler made anyway; nothing here goes back into a result.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from seethrough.sampling.softmax import Row, largest, softmax


class Candidate(NamedTuple):
    """A token, its logit, and its probability under the softmax of the row it stands in."""

    token_id: int
    logit: float
    prob: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. `mass_kept`: share of the mass before it that its survivors had."""

    name: str
    stage: Literal["S10", "S11"]
    params: dict[str, Any]
    survivors: int
    mass_kept: float
    changed: int
    before: list[Candidate]
    after: list[Candidate]


@dataclass(slots=True)
class SamplingRecord:
    """Filled by `sample`; a step that these parameters leave off does not appear.

    Attributes:
        top_n: how many candidates to show before and after each step.
        candidates: the best of the row that was drawn from.
        u: the draw, None for greedy.
        prob: the chosen id's probability among the candidates.
    """

    top_n: int = 8
    steps: list[StepRecord] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    u: float | None = None
    token_id: int | None = None
    prob: float | None = None

    def add_step(
        self,
        name: str,
        stage: Literal["S10", "S11"],
        params: dict[str, Any],
        before: Row,
        after: Row,
    ) -> None:
        """Note one step by its rows; both have a finite entry."""
        kept = after > -np.inf
        probs = softmax(before)
        # A step that drops nothing keeps exactly 1, whatever the rounding of the sum.
        mass_kept = min(1.0, float(probs[kept].sum())) if probs[~kept].any() else 1.0
        self.steps.append(
            StepRecord(
                name=name,
                stage=stage,
                params=params,
                survivors=int(np.count_nonzero(kept)),
                mass_kept=mass_kept,
                changed=int(np.count_nonzero(before != after)),
                before=self._top(before),
                after=self._top(after),
            )
        )

    def finish(self, row: Row, u: float | None, token_id: int) -> None:
        """Note the row that was chosen from, the draw and the choice."""
        self.candidates = self._top(row)
        self.u = u
        self.token_id = token_id
        self.prob = float(softmax(row)[token_id])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: every number is finite."""
        return asdict(self)

    def _top(self, row: Row) -> list[Candidate]:
        probs = softmax(row)
        return [Candidate(int(i), float(row[i]), float(probs[i])) for i in largest(row, self.top_n)]
