"""What the sampler needs of a backend: every step from logits to an id, and the plain NumPy form.

Knows no parameters, only what each step does. A backend holds the candidates as it likes; the
sampler hands them from step to step and never looks inside. All backends give the same ids and
scores, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from seethrough.sampling import adjust, truncate
from seethrough.sampling.choose import choose, greedy
from seethrough.sampling.philox import uniform
from seethrough.sampling.softmax import Ids, Row, check_finite, largest, log_total

C = TypeVar("C")


class Score(NamedTuple):
    """A token's logit and its rank among the candidates: 1 is highest, ties by lower id."""

    token_id: int
    logit: float
    rank: int


class SamplingOps(Protocol[C]):
    """A backend of S10 to S12. `C` is its candidates, which a step may use up."""

    def begin(self, logits: Row) -> C:
        """All that is not -inf in a row; the row is never written to.

        Raises:
            NonFiniteLogitsError: NaN, +inf, or no finite logit.
        """
        ...

    def row(self, x: C) -> Row:
        """The candidates as a row [V], -inf where a token is out; it stays as it is."""
        ...

    def is_empty(self, x: C) -> bool:
        """Whether nothing is left. May be asked before temperature and truncation only."""
        ...

    # Each of these is described where the plain form is, in `adjust` and `truncate`.
    def keep_only(self, x: C, ids: Ids) -> C: ...
    def ban(self, x: C, ids: Ids) -> C: ...
    def logit_bias(self, x: C, bias: Mapping[int, float]) -> C: ...
    def repetition_penalty(self, x: C, seen: Ids, penalty: float) -> C: ...
    def presence_penalty(self, x: C, output: Ids, penalty: float) -> C: ...
    def frequency_penalty(self, x: C, output: Ids, penalty: float) -> C: ...
    def temperature(self, x: C, value: float) -> C: ...
    def top_k(self, x: C, k: int) -> C: ...
    def top_p(self, x: C, p: float) -> C: ...
    def min_p(self, x: C, share: float) -> C: ...
    def typical_p(self, x: C, p: float) -> C: ...

    def greedy(self, x: C) -> int:
        """The id of the highest logit, ties to the lower id."""
        ...

    def choose(self, x: C, u: float) -> int:
        """The first id, in id order, whose cumulative mass exceeds u times the total."""
        ...

    def uniform(self, seed: int, output_index: int, sample_index: int) -> float:
        """The draw for one token, in [0, 1); see `sampling.philox`."""
        ...

    def log_total(self, x: C) -> float:
        """log(sum(exp(x))). Does not use the candidates up."""
        ...

    def score(self, x: C, token_id: int) -> Score:
        """Logit and rank of one token. Does not use the candidates up."""
        ...

    def largest(self, x: C, k: int) -> list[Score]:
        """The k highest (fewer, if fewer are left), by rank. Does not use the candidates up."""
        ...


class NumpyOps:
    """The plain form: the candidates are a row, and each step makes a new one."""

    keep_only = staticmethod(adjust.keep_only)
    ban = staticmethod(adjust.ban)
    logit_bias = staticmethod(adjust.logit_bias)
    repetition_penalty = staticmethod(adjust.repetition_penalty)
    presence_penalty = staticmethod(adjust.presence_penalty)
    frequency_penalty = staticmethod(adjust.frequency_penalty)
    temperature = staticmethod(adjust.temperature)
    top_k = staticmethod(truncate.top_k)
    top_p = staticmethod(truncate.top_p)
    min_p = staticmethod(truncate.min_p)
    typical_p = staticmethod(truncate.typical_p)
    greedy = staticmethod(greedy)
    log_total = staticmethod(log_total)
    uniform = staticmethod(uniform)

    def begin(self, logits: Row) -> Row:
        """The row itself."""
        check_finite(logits)
        return logits

    def row(self, x: Row) -> Row:
        """The row itself."""
        return x

    def is_empty(self, x: Row) -> bool:
        """Whether all is -inf."""
        return bool(np.isneginf(x.max()))

    def choose(self, x: Row, u: float) -> int:
        """See `sampling.choose`."""
        return choose(x, u)[1]

    def score(self, x: Row, token_id: int) -> Score:
        """Counts what is higher, and what is equal and before."""
        higher = np.count_nonzero(x > x[token_id])
        ties = np.count_nonzero(x[:token_id] == x[token_id])
        return Score(token_id, float(x[token_id]), 1 + int(higher) + int(ties))

    def largest(self, x: Row, k: int) -> list[Score]:
        """See `sampling.softmax`."""
        return [Score(int(i), float(x[i]), n) for n, i in enumerate(largest(x, k), start=1)]


NUMPY = NumpyOps()
