"""What an engine has done since it was built: counters, no times and no names of requests."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class EngineMetrics:
    """Counters of an engine.

    Attributes:
        steps: steps that computed anything.
        step_tokens: rows of the last step.
        computed_tokens: rows of all steps.
        recomputed_tokens: those of them that had been computed or found before, and were lost.
        prompt_tokens: tokens of the prompts that were started.
        cached_tokens: those of them that were found in the prefix cache.
        output_tokens: tokens that were chosen.
        preemptions: times that a request had to give back its blocks.
        finished: requests by the reason for which they ended.
    """

    steps: int = 0
    step_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0)
    )


@dataclass(frozen=True, slots=True)
class EngineState:
    """How an engine stands now, with what it has done. Of the blocks, idle ones can be had too."""

    running: int
    waiting: int
    blocks: int
    blocks_held: int
    blocks_idle: int
    counted: EngineMetrics

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)
