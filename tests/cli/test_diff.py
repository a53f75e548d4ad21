"""`seethrough diff` as a user meets it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

Seethrough = Any


@pytest.fixture
def changed(chat_model: Path, tmp_path: Path) -> Path:
    """The model with the MLP of its second layer changed."""
    folder = tmp_path / "changed"
    shutil.copytree(chat_model, folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name] * np.float32(1.01)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_model_against_itself(seethrough: Seethrough, chat_model: Path) -> None:
    ran = seethrough("diff", "", ",threads=1", "hello dog", "--model", chat_model, "--check")
    assert ran.code == 0
    assert "identical to the bit" in ran.out
    assert "S6.7" in ran.out


def test_where_two_models_part(seethrough: Seethrough, chat_model: Path, changed: Path) -> None:
    words = ("diff", chat_model, changed, "hello dog", "--max-tokens", 2, "--seed", 1)
    ran = seethrough(*words)
    assert ran.code == 0
    assert "they part at S6.7 mlp_out of layer 1" in ran.out
    assert "no relative error is above" in ran.out or "above a relative error" in ran.out
    assert seethrough(*words, "--check").code == 1
    body = seethrough(*words, "--json").json
    assert body["parting"]["stage"] == "S6.7"
    assert body["parting"]["layer"] == 1
    assert body["identical"] is False
    assert len(body["positions"]) > 3
    tight = seethrough(*words, "--json", "--tolerance", 0.5).json
    assert tight["parting_above_tolerance"] is None
    one = seethrough(*words, "--layer", 1, "--stage", "S6.7")
    assert "mlp_out" in one.out
    assert "S6.5" not in one.out
    chinese = seethrough(*words, "--lang", "zh")
    assert "开始不同之处：第 1 层的 S6.7 mlp_out" in chinese.out


def test_two_ways_to_run_one(seethrough: Seethrough, chat_model: Path) -> None:
    words = ("diff", "", ",backend=reference,kv_cache_dtype=f32", "hello", "--model", chat_model)
    ran = seethrough(*words, "--temperature", 0)
    assert ran.code == 0
    assert "backend cpu" in ran.err
    assert "backend reference" in ran.err
    other = seethrough(
        *("diff", ",temperature=0.5", ",temperature=1.5", "hello", "--model", chat_model),
        *("--seed", 1, "--json"),
    ).json
    assert other["parting"]["stage"] == "S10"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("",), "two are compared"),
        (("", ""), "prompt"),
        (("", ",no_such=1", "a"), "no such setting"),
        (("", ",threads", "a"), "NAME=VALUE"),
        (("", ",=1", "a"), "NAME=VALUE"),
        (("", ",,", "a"), "NAME=VALUE"),
        (("", ",threads=1e400", "a"), "threads"),
        (("", ",threads=99999999999999999999", "a"), "threads"),
        (("", ",temperature=-1", "a"), "temperature"),
        (("", ",temperature=NaN", "a"), "temperature"),
        (("", "", "a", "--tolerance", "-1"), "tolerance"),
        (("", "", "a", "--tolerance", "nan"), "tolerance"),
        (("", "", "a", "--stage", "S99"), "no stage"),
        (("", "", "a", "--n", "2"), "one sample"),
    ],
)
def test_wrong_usage(
    seethrough: Seethrough, chat_model: Path, words: tuple[str, ...], said: str
) -> None:
    ran = seethrough("diff", *words, "--model", chat_model)
    assert ran.code == 2
    assert said in ran.err
    assert "Traceback" not in ran.err


def test_a_side_that_is_not_there(seethrough: Seethrough, chat_model: Path) -> None:
    ran = seethrough("diff", chat_model, "no-such-model", "a")
    assert ran.code == 3
    assert "no-such-model" in ran.err


def test_json_is_one_line_of_finite_numbers(seethrough: Seethrough, chat_model: Path) -> None:
    ran = seethrough(
        *("diff", "", ",top_k=2", "hello", "--model", chat_model, "--seed", 1, "--json")
    )

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(ran.out, parse_constant=refuse)
