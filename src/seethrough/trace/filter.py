"""What a trace shall keep: stages, layers, heads, positions, and how many bytes in all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from seethrough.errors import TraceError
from seethrough.model.spec import TransformerSpec
from seethrough.stages import STAGE

DEFAULT_BYTE_BUDGET = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TraceFilter:
    """None keeps all of a kind. Build it with `build`, which checks every number."""

    stages: frozenset[str] | None
    layers: frozenset[int] | None
    heads: tuple[int, ...] | None
    tokens: frozenset[int] | None
    byte_budget: int

    @classmethod
    def build(
        cls,
        spec: TransformerSpec,
        stages: Iterable[str] | None = None,
        layers: Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        tokens: Iterable[int] | None = None,
        byte_budget: int = DEFAULT_BYTE_BUDGET,
    ) -> TraceFilter:
        """Check the wishes against the model; `S6` stands for all of S6.1 to S6.8.

        Raises:
            TraceError: names what the model does not have, and what it has.
        """
        if byte_budget < 0:
            raise TraceError(f"byte_budget={byte_budget}: 0 or more is expected")
        return cls(
            stages=None if stages is None else _stages(stages),
            layers=_numbers("layer", layers, spec.n_layers),
            heads=_heads(heads, spec.n_heads),
            tokens=_numbers("token position", tokens, None),
            byte_budget=byte_budget,
        )

    def wants(self, stage: str, layer: int | None) -> bool:
        """Whether values of this stage and layer are kept."""
        if self.stages is not None and stage not in self.stages:
            return False
        return layer is None or self.layers is None or layer in self.layers


def _stages(wanted: Iterable[str]) -> frozenset[str]:
    chosen = set()
    for stage in wanted:
        if stage not in STAGE:
            raise TraceError(f"no stage {stage!r}; known: {', '.join(STAGE)}")
        chosen |= {s for s in STAGE if s == stage or s.startswith(f"{stage}.")}
    return frozenset(chosen)


def _heads(wanted: Iterable[int] | None, n_heads: int) -> tuple[int, ...] | None:
    numbers = _numbers("head", wanted, n_heads)
    return None if numbers is None else tuple(sorted(numbers))


def _numbers(what: str, wanted: Iterable[int] | None, limit: int | None) -> frozenset[int] | None:
    if wanted is None:
        return None
    numbers = frozenset(wanted)
    for number in numbers:
        if number < 0 or (limit is not None and number >= limit):
            known = "0 or more is expected" if limit is None else f"known: 0 to {limit - 1}"
            raise TraceError(f"no {what} {number}; {known}")
    return numbers
