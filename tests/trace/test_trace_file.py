"""A saved trace, read back with safetensors alone: all arrays, and a manifest of what they are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from traced_kinds import KINDS

from seethrough import LLM
from seethrough.errors import TraceError
from seethrough.stages import STAGE
from seethrough.trace.trace import Trace

TEXT = "the quick brown fox"
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 9, "seed": 2**63, "max_tokens": 3}


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    def strict(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    with safe_open(path, framework="np") as file:
        manifest = json.loads(file.metadata()["seethrough"], parse_constant=strict)
        return manifest, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def saved(trace: Trace, folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    path = folder / "one.safetensors"
    trace.save(path)
    return read(path)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_back_is_the_trace(
    open_kind: Callable[..., LLM], kind: str, tmp_path: Path
) -> None:
    trace = open_kind(kind).trace(TEXT, logprobs=2, prompt_logprobs=1, **SAMPLING)
    manifest, arrays = saved(trace, tmp_path)
    assert manifest == json.loads(json.dumps(trace.to_dict(), allow_nan=False))
    assert manifest["format"] == "seethrough-trace/1"
    assert len(manifest["arrays"]) == len(arrays) == len(trace.keys())
    for entry in manifest["arrays"]:
        value = arrays[entry["array"]]
        kept = trace.array(entry["stage"], entry["value"], layer=entry["layer"])
        assert np.array_equal(value, kept)
        assert (list(value.shape), str(value.dtype)) == (entry["shape"], entry["dtype"])
        assert value.shape[entry["token_axis"]] == len(entry["positions"])
        assert entry["stage"] in STAGE
        assert entry["derived"] == (entry["value"] in ("A", "probs"))


def test_the_manifest_tells_the_request(llm: LLM, tmp_path: Path) -> None:
    trace = llm.trace(TEXT, **SAMPLING)
    manifest, _ = saved(trace, tmp_path)
    request, sample = manifest["request"], trace.output.outputs[0]
    assert request["prompt"] == TEXT
    assert request["prompt_token_ids"] == trace.prompt_token_ids
    assert (request["token_ids"], request["text"]) == (sample.token_ids, sample.text)
    assert request["params"]["seed"] == 2**63
    assert request["params"]["origin"]["top_k"] == "request"
    assert manifest["prompt_tokens"] + manifest["output_tokens"] == trace.tokens
    assert [step["token_id"] for step in manifest["steps"]] == sample.token_ids
    assert [step["index"] for step in manifest["steps"]] == [0, 1, 2]
    for step in manifest["steps"]:
        assert set(step["ms"]) <= set(STAGE)
        assert step["sampling"]["u"] is not None
        assert [s["name"] for s in step["sampling"]["steps"]] == ["temperature", "top_k"]


@pytest.mark.parametrize("stage", ["S6.5", "S12", "S3", "S6.8", "S13"])
def test_a_filtered_trace_can_be_saved(llm: LLM, tmp_path: Path, stage: str) -> None:
    trace = llm.trace(TEXT, stages=[stage], heads=[1, 3], tokens=[1, 2, 3, 4], **SAMPLING)
    manifest, arrays = saved(trace, tmp_path)
    assert {entry["array"] for entry in manifest["arrays"]} == set(arrays)
    assert {name.rsplit(".layer")[0] for name in arrays} == {
        f"{s}.{name}"
        for s, name, _ in trace.keys()  # noqa: SIM118
    }
    for entry in manifest["arrays"]:
        assert entry["heads"] == [1, 3]
        assert entry["stage"] == stage


def test_a_trace_with_gaps_and_an_error_can_be_saved(
    open_kind: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_kind("llama", backend="reference")
    small = llm.trace(TEXT, byte_budget=20_000, **SAMPLING)
    manifest, arrays = saved(small, tmp_path)
    assert manifest["omitted"] == [o._asdict() for o in small.omitted]
    assert arrays
    weights = llm._engine.model.program.weights
    monkeypatch.setitem(weights, "head.weight", weights["head.weight"] * np.nan)
    broken, values = saved(llm.trace(TEXT, **SAMPLING), tmp_path)
    assert "nan" in broken["request"]["error"]
    assert np.isnan(values["S9.logits"]).all()


def test_a_saved_half_cache_stays_half(open_kind: Callable[..., LLM], tmp_path: Path) -> None:
    llm = open_kind("llama", kv_cache_dtype="f16")
    _, arrays = saved(llm.trace(TEXT, stages=["S6.8"], **SAMPLING), tmp_path)
    assert {array.dtype for array in arrays.values()} == {np.dtype("float16")}


def test_only_a_regular_file_is_written_over(llm: LLM, tmp_path: Path) -> None:
    """The library renames what it wrote: a pipe or a device would be gone."""
    trace = llm.trace(TEXT, stages=["S9"], **SAMPLING)
    pipe, folder, link = tmp_path / "pipe", tmp_path / "folder", tmp_path / "link"
    os.mkfifo(pipe)
    folder.mkdir()
    link.symlink_to(pipe)
    for path in (pipe, folder, link):
        with pytest.raises(TraceError, match="not a regular file"):
            trace.save(path)
    assert pipe.is_fifo()
    saved(trace, tmp_path)
    saved(trace, tmp_path)  # a regular file is written over
