"""A recorded request, run again alone with a tracer: whether it is the same, and what it would be.

The same request gives the same bits, so what the tracer shows is what happened when it was served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from seethrough.engine.fingerprint import Fingerprint
from seethrough.engine.outputs import CompletionOutput
from seethrough.engine.recorder import Recorded, RecordedSample
from seethrough.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class Replay:
    """What was recorded, and what running it again gave.

    Attributes:
        sample: the recorded sample.
        trace: of the new run.
        fingerprint: of what it ran on now.
    """

    recorded: Recorded
    sample: RecordedSample
    trace: Trace
    fingerprint: Fingerprint

    @property
    def output(self) -> CompletionOutput:
        """What the new run gave."""
        return self.trace.output.outputs[0]

    @property
    def first_difference(self) -> int | None:
        """The first output index at which the runs differ; None where all tokens are the same.

        Where one is shorter, it is the first index that only the other has. Of a request that was
        ended from outside, only what it had said is compared.
        """
        was, now = list(self.sample.token_ids), self.output.token_ids
        if self.output.finish_reason == "abort":
            now = now[: len(was)]
        for index, pair in enumerate(zip(was, now, strict=False)):
            if pair[0] != pair[1]:
                return index
        return None if len(was) == len(now) else min(len(was), len(now))

    @property
    def identical(self) -> bool:
        """Whether the tokens are the same, and the reason for which they ended."""
        if self.first_difference is not None:
            return False
        was = self.sample.finish_reason, self.sample.stop_reason
        return was == (self.output.finish_reason, self.output.stop_reason)

    @property
    def changed_parts(self) -> list[str]:
        """Parts of the fingerprint that are not what they were when the request was served."""
        origin = self.recorded.origin
        return [] if origin is None else origin.fingerprint.changed(self.fingerprint)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: the verdict, both token sequences, and the trace without its arrays."""
        return {
            "request_id": self.recorded.request_id,
            "sample": self.sample.number,
            "identical": self.identical,
            "first_difference": self.first_difference,
            "changed_parts": self.changed_parts,
            "recorded": {
                "token_ids": list(self.sample.token_ids),
                "finish_reason": self.sample.finish_reason,
                "stop_reason": self.sample.stop_reason,
                "error": self.sample.error,
            },
            "trace": self.trace.to_dict(),
        }
