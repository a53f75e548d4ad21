"""A trace as a file: arrays as safetensors, everything else as JSON in the file's metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from seethrough.engine.outputs import to_json
from seethrough.errors import TraceError
from seethrough.stages import STAGE
from seethrough.trace.values import DERIVED, row_axis

if TYPE_CHECKING:
    from seethrough.trace.trace import StepTrace, Trace

FORMAT = "seethrough-trace/1"


def array_name(stage: str, name: str, layer: int | None) -> str:
    """Name of an array in the file, such as `S6.4.S_masked.layer3`."""
    return f"{stage}.{name}" if layer is None else f"{stage}.{name}.layer{layer}"


def save(trace: Trace, path: Path) -> None:
    """Write the file; its metadata key `seethrough` holds the manifest.

    Raises:
        TraceError: it cannot be written there.
    """
    arrays = {
        array_name(*key): np.ascontiguousarray(trace.array(key[0], key[1], layer=key[2]))
        for key in trace.keys()  # noqa: SIM118 - a method, not a mapping's
    }
    # The file is written beside it and renamed: that would put a file in the place of a device.
    if path.exists() and not path.is_file():
        raise TraceError(f"the trace cannot be written to {path}: it is not a regular file")
    try:
        save_file(arrays, path, metadata={"seethrough": json.dumps(manifest(trace))})
    except SafetensorError as error:  # it carries what the system said
        raise TraceError(f"the trace cannot be written to {path}: {error}") from None


def manifest(trace: Trace) -> dict[str, Any]:
    """The trace without its arrays."""
    return {
        "format": FORMAT,
        "model": trace.model,
        "request": to_json(trace.output, 0.0),
        "prompt_tokens": trace.prompt_tokens,
        "output_tokens": trace.output_tokens,
        "texts": {str(token_id): text for token_id, text in trace.texts.items()},
        "arrays": [_describe(trace, key) for key in trace.keys()],  # noqa: SIM118
        "omitted": [lost._asdict() for lost in trace.omitted],
        "steps": [_step(step) for step in trace.steps],
    }


def _describe(trace: Trace, key: tuple[str, str, int | None]) -> dict[str, Any]:
    stage, name, layer = key
    value = trace.array(stage, name, layer=layer)
    return {
        "array": array_name(*key),
        "stage": stage,
        "value": name,
        "layer": layer,
        "heads": None if trace.chosen.heads is None else list(trace.chosen.heads),
        "shape": list(value.shape),
        "dtype": str(value.dtype),
        "token_axis": row_axis(name),
        "positions": trace.positions(stage, name, layer),
        "derived": name in DERIVED,
    }


def _step(step: StepTrace) -> dict[str, Any]:
    seconds = {stage: step.stage_seconds(stage) for stage in STAGE}
    return {
        "index": step.index,
        "positions": step.positions,
        "token_id": step.token_id,
        "text": step.text,
        "ms": {stage: spent * 1e3 for stage, spent in seconds.items() if spent is not None},
        "sampling": None if step.record is None else step.record.to_dict(),
    }
