"""What was collected, by stage, value, layer, head and token. Arrays are put together on access.

Every number is the one that the request was computed with, except those marked derived: A is the
softmax of S_masked, probs that of candidate_logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seethrough.engine.outputs import RequestOutput
from seethrough.errors import TraceError
from seethrough.model.spec import TransformerSpec
from seethrough.sampling.record import SamplingRecord
from seethrough.stages import STAGE, stage_sort_key
from seethrough.trace.file import manifest, save
from seethrough.trace.filter import TraceFilter
from seethrough.trace.values import DERIVED, HEAD_AXIS, KV_VALUES, Key, row_axis

Array = NDArray[Any]


class Piece(NamedTuple):
    """One array of one chunk, with the positions of its rows."""

    positions: NDArray[np.int64]
    value: Array


class Omitted(NamedTuple):
    """A value that did not fit into the byte budget."""

    step: int
    stage: str
    name: str
    layer: int | None
    nbytes: int


@dataclass(slots=True)
class StepTrace:
    """All that led to one output token: the rows computed for it, their values, the choice."""

    index: int
    positions: list[int] = field(default_factory=list)
    pieces: dict[Key, list[Piece]] = field(default_factory=dict)
    seconds: dict[tuple[str, int | None], float] = field(default_factory=dict)
    record: SamplingRecord | None = None
    token_id: int | None = None
    text: str = ""

    def add(self, key: Key, piece: Piece) -> None:
        """Append a chunk."""
        self.pieces.setdefault(key, []).append(piece)

    def drop_renewed(self, key: Key, positions: NDArray[np.int64]) -> int:
        """Drop what an operation of the same stage is about to renew; its bytes."""
        held = self.pieces.get(key)
        if not held or not np.array_equal(held[-1].positions, positions):
            return 0
        return held.pop().value.nbytes

    def add_seconds(self, stage: str, layer: int | None, seconds: float) -> None:
        """Add to the time of a stage."""
        self.seconds[stage, layer] = self.seconds.get((stage, layer), 0.0) + seconds

    def stage_seconds(self, stage: str) -> float | None:
        """The time of a stage over all layers, or None if it was not timed."""
        spent = [s for (name, _), s in self.seconds.items() if name == stage]
        return sum(spent) if spent else None


@dataclass(frozen=True, slots=True)
class Trace:
    """One request, seen through. `steps[i]` led to output token i."""

    model: str
    spec: TransformerSpec
    chosen: TraceFilter
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_tokens: list[str]
    output_tokens: list[str]
    texts: dict[int, str]
    """Text of every token that appears among the candidates of a step."""
    steps: list[StepTrace]
    omitted: list[Omitted]
    output: RequestOutput

    @property
    def tokens(self) -> list[str]:
        """All tokens of the sequence, in the vocabulary's own spelling."""
        return self.prompt_tokens + self.output_tokens

    def keys(self, step: int | None = None) -> list[Key]:
        """What the trace holds, in the order of the stages and layers; derived values included."""
        found: dict[Key, None] = {}
        for held in self._steps(step):
            found |= {key: None for key, pieces in held.pieces.items() if pieces}
        for name, (stage, source_stage, source) in DERIVED.items():
            layers = [key[2] for key in found if key[:2] == (source_stage, source)]
            found |= {(stage, name, layer): None for layer in layers}
        # A source may be here only for what is derived from it.
        return sorted((k for k in found if self.chosen.wants(k[0], k[2])), key=_order)

    def array(
        self,
        stage: str,
        name: str | None = None,
        *,
        layer: int | None = None,
        head: int | None = None,
        step: int | None = None,
    ) -> Array:
        """A value as one array, over all steps or for one.

        Args:
            name: the value's name in the stage table; by default the stage's own main output.
            layer: needed for S6.x, unless the trace holds one layer only.
            head: picks one head (its number in the model) of a value that has heads.
            step: rows that led to this output token; by default the rows of all, in order.

        Raises:
            TraceError: the trace does not hold it; the message says what it holds.
        """
        name = name or self.main_value(stage)
        layer = self.only_layer(stage, name) if layer is None else layer
        source = _source(stage, name)
        pieces = [p for held in self._steps(step) for p in held.pieces.get((*source, layer), ())]
        if not pieces or not self.chosen.wants(stage, layer):
            raise TraceError(self._missing(stage, name, layer, step))
        value = _join(source[1], [piece.value for piece in pieces])
        if source != (stage, name):
            value = _softmax(value)
        return value if head is None else self._one_head(value, name, head)

    def positions(self, stage: str, name: str, layer: int | None = None) -> list[int]:
        """The positions of a value's rows, over all steps."""
        key = (*_source(stage, name), layer)
        pieces = [p for held in self.steps for p in held.pieces.get(key, ())]
        return [int(position) for piece in pieces for position in piece.positions]

    def save(self, path: str | Path) -> None:
        """Write all arrays as safetensors, with a JSON manifest in the file's metadata."""
        save(self, Path(path))

    def to_dict(self) -> dict[str, Any]:
        """The trace without its arrays, ready for JSON."""
        return manifest(self)

    def _steps(self, step: int | None) -> list[StepTrace]:
        if step is None:
            return self.steps
        if not 0 <= step < len(self.steps):
            raise TraceError(f"no step {step}; the trace has {len(self.steps)}, from 0")
        return [self.steps[step]]

    def main_value(self, stage: str) -> str:
        """The first output of the stage that the trace holds."""
        if stage not in STAGE:
            raise TraceError(f"no stage {stage!r}; known: {', '.join(STAGE)}")
        held = {name for s, name, _ in self.keys() if s == stage}
        names = [value.name for value in STAGE[stage].outputs if value.name in held]
        if not names:
            raise TraceError(self._missing(stage, None, None, None))
        return names[0]

    def only_layer(self, stage: str, name: str) -> int | None:
        layers = [key[2] for key in self.keys() if key[:2] == (stage, name)]
        if len(layers) > 1:
            raise TraceError(f"{stage} {name} exists in {len(layers)} layers: say which (layer=)")
        return layers[0] if layers else None

    def _one_head(self, value: Array, name: str, head: int) -> Array:
        heads = list(range(self.spec.n_heads)) if self.chosen.heads is None else self.chosen.heads
        if head not in heads:
            raise TraceError(f"no head {head} in the trace; it holds {list(heads)}")
        place = list(heads).index(head)
        if name in KV_VALUES:
            group = self.spec.n_heads // self.spec.n_kv_heads
            place = sorted({h // group for h in heads}).index(head // group)
        if name not in HEAD_AXIS:
            raise TraceError(f"{name} has no heads")
        return np.asarray(np.take(value, place, axis=HEAD_AXIS[name]))

    def _missing(self, stage: str, name: str | None, layer: int | None, step: int | None) -> str:
        wanted = " ".join(
            str(part)
            for part in (stage, name, None if layer is None else f"layer {layer}")
            if part is not None
        )
        source_stage, source = (stage, None) if name is None else _source(stage, name)
        for lost in self.omitted:
            asked = lost.stage == source_stage and source in (None, lost.name)
            if asked and layer in (None, lost.layer):
                return (
                    f"{wanted} did not fit into the trace's byte budget "
                    f"({self.chosen.byte_budget} bytes); raise it or choose fewer stages"
                )
        held = sorted({key[:2] for key in self.keys(step)}, key=lambda k: _order((*k, None)))
        names = ", ".join(f"{s} {n}" for s, n in held) or "nothing"
        return f"the trace does not hold {wanted}. It holds: {names}{self._of_positions()}"

    def _of_positions(self) -> str:
        """Which positions were asked for, and which there are; empty if all were."""
        if self.chosen.tokens is None:
            return ""
        chosen = ", ".join(map(str, sorted(self.chosen.tokens)))
        last = max((position for held in self.steps for position in held.positions), default=-1)
        return f" (of the positions {chosen}; 0 to {last} were computed)"


def _source(stage: str, name: str) -> tuple[str, str]:
    """Stage and name of the value that is kept: its own, or what a derived value comes from."""
    derived = DERIVED.get(name)
    return derived[1:] if derived and derived[0] == stage else (stage, name)


def _order(key: Key) -> tuple[Any, ...]:
    stage, name, layer = key
    outputs = [value.name for value in STAGE[stage].outputs]
    place = outputs.index(name) if name in outputs else len(outputs)
    return (-1 if layer is None else layer, stage_sort_key(stage), place, name)


def _join(name: str, values: list[Array]) -> Array:
    """Chunks along the token axis; scores of later tokens are wider, hidden entries are −∞."""
    if name == "S_masked":
        width = max(value.shape[-1] for value in values)
        values = [
            np.pad(v, [(0, 0), (0, 0), (0, width - v.shape[-1])], constant_values=-np.inf)
            for v in values
        ]
    return values[0] if len(values) == 1 else np.concatenate(values, axis=row_axis(name))


def _softmax(scores: Array) -> Array:
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))
