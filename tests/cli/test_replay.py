"""`seethrough replay` as a user meets it: what was recorded is checked, shown, and changed."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from array import array
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from seethrough.engine.record_store import FILE

Seethrough = Any
DRAWN = ("--temperature", 1.2, "--seed", 5, "--max-tokens", 8, "--ignore-eos")


@pytest.fixture
def recorded(seethrough: Seethrough, chat_model: Path, tmp_path: Path) -> Path:
    """A directory with one request of `run`."""
    ran = seethrough("run", "hello", "--model", chat_model, "--record", tmp_path, *DRAWN)
    assert ran.code == 0
    assert "recorded as req-" in ran.err
    return tmp_path


def test_recorded_and_checked(seethrough: Seethrough, recorded: Path) -> None:
    ran = seethrough("replay", "--check", "--record", recorded)
    assert (ran.code, ran.out) == (0, "identical\n")
    listed = seethrough("replay", "list", "--record", recorded, "--json").json
    assert len(listed) == 1
    by_id = seethrough("replay", listed[0]["id"], "--check", "--record", recorded)
    assert (by_id.code, by_id.out) == (0, "identical\n")
    assert (listed[0]["output_tokens"], listed[0]["prompt"]) == (8, "hello")


def test_the_list(seethrough: Seethrough, chat_model: Path, recorded: Path) -> None:
    long = "the quick brown fox\njumps " * 9
    seethrough("run", long, "--model", chat_model, "--record", recorded, "--max-tokens", 1)
    ran = seethrough("replay", "list", "--record", recorded)
    lines = ran.out.splitlines()
    assert len(lines) == 3
    assert lines[0].split() == ["id", "finished", "model", "prompt", "output", "ended", "text"]
    assert lines[1].endswith("…")  # the newest first, on one line
    assert lines[2].endswith("hello")
    chinese = seethrough("replay", "list", "--record", recorded, "--lang", "zh")
    assert "编号" in chinese.out


def test_any_stage_of_any_token(seethrough: Seethrough, recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.safetensors"
    ran = seethrough(
        *("replay", "last", "--record", recorded, "--stage", "S6.5"),
        *("--layer", 1, "--head", 0, "--out", out),
    )
    assert ran.code == 0
    assert ran.out.startswith("S6.5 A [")
    assert "identical" in ran.err
    assert load_file(out)
    whole = seethrough("replay", "last", "--record", recorded)
    assert "S10" in whole.out
    assert "S12" in whole.out
    as_json = seethrough("replay", "last", "--record", recorded, "--stages", "S9", "--json").json
    assert as_json["identical"] is True
    assert as_json["trace"]["arrays"][0]["stage"] == "S9"


def test_what_if(seethrough: Seethrough, recorded: Path) -> None:
    was = seethrough("replay", "--record", recorded, "--json", "--stages", "S9").json
    ids = was["recorded"]["token_ids"]
    forced = (ids[3] + 1) % 200
    ran = seethrough("replay", "--record", recorded, "--force", f"3={forced}")
    assert ran.code == 0
    assert "they part at output token 3" in ran.out
    lines = [line.split()[:2] for line in ran.out.splitlines()]
    assert ["1", str(ids[1])] in lines
    assert ["3", str(ids[3])] in lines
    told = seethrough("replay", "--record", recorded, "--force", f"3={forced}", "--json").json
    assert told["trace"]["request"]["token_ids"][:4] == [*ids[:3], forced]
    cold = seethrough("replay", "--record", recorded, "--set", "temperature=0", "--json").json
    assert cold["trace"]["request"]["params"]["temperature"] == 0
    same = seethrough("replay", "--record", recorded, "--set", "seed=5")
    assert "they do not part" in same.out
    dashed = seethrough("replay", "--record", recorded, "--set", "max-tokens=2", "--json").json
    assert dashed["trace"]["request"]["token_ids"] == ids[:2]


def tamper(folder: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(folder / FILE) as db:
        db.execute(statement, values)


def test_a_check_that_fails_says_where_and_why(seethrough: Seethrough, recorded: Path) -> None:
    """As if the engine had changed since then: a token differs, and so does a part."""
    (body,) = sqlite3.connect(recorded / FILE).execute("SELECT body FROM origins").fetchone()
    about = json.loads(body)
    about["fingerprint"]["arithmetic"]["sources"] = "older"
    tamper(recorded, "UPDATE origins SET body = ?", json.dumps(about))
    still = seethrough("replay", "--check", "--record", recorded)
    assert (still.code, still.out) == (0, "identical\n")
    (blob,) = sqlite3.connect(recorded / FILE).execute("SELECT output_ids FROM requests").fetchone()
    changed = bytearray(blob)
    changed[4 * 2] ^= 1
    tamper(recorded, "UPDATE requests SET output_ids = ?", bytes(changed))
    ran = seethrough("replay", "--check", "--record", recorded)
    assert ran.code == 1
    assert "output token 2 differs: it was " in ran.out
    assert "changed since then: sources" in ran.out
    told = seethrough("replay", "--check", "--json", "--record", recorded)
    assert (told.code, told.json["first_difference"]) == (1, 2)
    chinese = seethrough("replay", "--check", "--record", recorded, "--lang", "zh")
    assert "第 2 个输出 token 不同" in chinese.out


def test_settings_are_those_of_the_record(
    seethrough: Seethrough, chat_model: Path, tmp_path: Path
) -> None:
    how = ("--kv-cache-dtype", "f16", "--max-model-len", 64, "--backend", "reference")
    seethrough("run", "hello", "--model", chat_model, "--record", tmp_path, *DRAWN, *how)
    ran = seethrough("replay", "--check", "--record", tmp_path)
    assert ran.code == 0
    for part in ("context 64 of", "f16", "backend reference"):
        assert part in ran.err
    other = seethrough("replay", "--check", "--record", tmp_path, "--kv-cache-dtype", "f32")
    assert "f32" in other.err


def test_a_model_that_was_moved(
    seethrough: Seethrough, chat_model: Path, recorded: Path, tmp_path: Path
) -> None:
    (body,) = sqlite3.connect(recorded / FILE).execute("SELECT body FROM origins").fetchone()
    about = json.loads(body) | {"path": "/nowhere/model", "model": str(chat_model)}
    tamper(recorded, "UPDATE origins SET body = ?", json.dumps(about))
    ran = seethrough("replay", "--check", "--record", recorded)
    assert (ran.code, ran.out) == (0, "identical\n")
    assert "/nowhere/model is gone" in ran.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("replay",), 2, "--record DIR"),
        (("replay", "--record", "no/such"), 2, "no requests were recorded"),
        (("replay", "req-none", "--record", "HERE"), 2, "'req-none'"),
        (("replay", "--record", "HERE", "--sample", "4"), 2, "no sample 4"),
        (("replay", "--record", "HERE", "--layer", "1"), 2, "needs --stage"),
        (("replay", "--record", "HERE", "--set", "temperature"), 2, "NAME=VALUE"),
        (("replay", "--record", "HERE", "--set", "no_such=1"), 2, "no such sampling parameter"),
        (("replay", "--record", "HERE", "--set", "temperature=-1"), 2, "temperature"),
        (("replay", "--record", "HERE", "--set", "n=2"), 2, "one sample"),
        (("replay", "--record", "HERE", "--set", "max_tokens=2", "--force", "2=1"), 2, "0 to 1"),
        (("replay", "--record", "HERE", "--force=-1=1"), 2, "0 to 7"),
        (("replay", "--record", "HERE", "--force", "8=1"), 2, "0 to 7"),
        (("replay", "--record", "HERE", "--force", "5"), 2, "POSITION=ID"),
        (("replay", "--record", "HERE", "--force", "a=b"), 2, "whole number"),
        (("replay", "--record", "HERE", "--force", "0=99999999"), 2, "forced"),
        (("replay", "--record", "HERE", "--stage", "S99"), 2, "no stage"),
        (
            ("replay", "--record", "HERE", "--token", "99", "--stage", "S6.5", "--layer", "0"),
            2,
            "of the positions 99; 0 to ",
        ),
    ],
)
def test_wrong_usage(
    seethrough: Seethrough, recorded: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    ran = seethrough(*(str(recorded) if word == "HERE" else word for word in words))
    assert ran.code == code
    assert said in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    "name",
    [
        *("which", "self", "sample", "stages", "layers", "heads", "tokens", "byte_budget"),
        *("forced", "params", "sampling", "prompt", "model"),
    ],
)
def test_only_sampling_is_set(seethrough: Seethrough, recorded: Path, name: str) -> None:
    ran = seethrough("replay", "--record", recorded, "--set", f"{name}=1")
    assert ran.code == 2
    assert f"{name}=1: no such sampling parameter" in ran.err


def test_what_could_not_be_forced_is_said(
    seethrough: Seethrough, chat_model: Path, tmp_path: Path
) -> None:
    words = ("run", "hello", "--model", chat_model, "--temperature", 0, "--max-tokens", 8)
    seethrough(*words, "--record", tmp_path)
    end = 0  # ends the text
    ran = seethrough("replay", "--record", tmp_path, "--force", f"1={end}", "--force", "5=7")
    assert ran.code == 0
    assert "output token 5 was not forced: the output ended after 2 tokens" in ran.err
    chinese = seethrough(
        *("replay", "--record", tmp_path, "--force", f"1={end}", "--force", "5=7", "--lang", "zh")
    )
    assert "第 5 个输出 token 未能强制" in chinese.err
    within = seethrough("replay", "--record", tmp_path, "--force", f"1={end}")
    assert "forced" not in within.err


def test_chat_records_every_turn(
    seethrough: Seethrough, process: Any, chat_model: Path, tmp_path: Path
) -> None:
    words = ("chat", "--model", chat_model, "--record", tmp_path, *DRAWN)
    _, said = process(*words, stdin=subprocess.PIPE).communicate("hello\ndog\n", timeout=120)
    assert said.count("recorded as req-") == 2
    assert len(seethrough("replay", "list", "--record", tmp_path, "--json").json) == 2
    assert seethrough("replay", "--check", "--record", tmp_path).out == "identical\n"


def test_bounds_and_the_variable(
    seethrough: Seethrough, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEETHROUGH_RECORD", str(tmp_path))
    for _ in range(4):
        seethrough("run", "a", "--model", chat_model, "--max-tokens", 1, "--record-limit", 2)
    assert len(seethrough("replay", "list", "--json").json) == 2


def test_nothing_is_recorded_unless_asked(
    seethrough: Seethrough, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = seethrough("run", "a", "--model", chat_model, "--max-tokens", 1)
    assert "recorded" not in ran.err
    assert list(tmp_path.iterdir()) == []


def _edit(folder: Path, change: str, *values: Any) -> None:
    with sqlite3.connect(folder / FILE) as db:
        db.execute(change, values)
    db.close()


ESCAPES = "\x1b]0;mine\x07\x1b[2J\x9b1m\u202egnp.\n\ta"


@pytest.mark.parametrize("column", ["prompt", "request_id"])
def test_a_strangers_text_moves_no_cursor(
    seethrough: Seethrough, recorded: Path, column: str
) -> None:
    _edit(recorded, f"UPDATE requests SET {column} = ?", ESCAPES)
    ran = seethrough("replay", "list", "--record", recorded)
    assert ran.code == 0
    assert len(ran.out.splitlines()) == 2
    assert "\\x1b]0;mine\\x07\\x1b[2J\\x9b1m\\u202egnp." in ran.out
    assert not set("\x1b\x07\x9b\u202e") & set(ran.out)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("path", "/" + "a" * 5000, "is gone"),
        ("path", "/a\0b", "is gone"),
        ("path", "/dev/null", "/dev/null"),
        ("path", "/", "error"),
        ("model", "\x1b[2J", "\\x1b[2J"),
    ],
)
def test_a_strangers_origin_is_an_error_that_says_so(
    seethrough: Seethrough, recorded: Path, name: str, value: str, said: str
) -> None:
    moved = {"path": "/gone.gguf", "model": "gone"}
    for key, changed in (moved | {name: value}).items():
        _edit(recorded, f"UPDATE origins SET body = json_set(body, '$.{key}', ?)", changed)
    ran = seethrough("replay", "--record", recorded)
    assert ran.code in (2, 3)
    assert said in ran.err
    assert "\x1b" not in ran.err


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("backend", "gpu"),
        ("backend", ["cpu"]),
        ("cpu_path", {"a": 1}),
        ("cpu_path", "sse"),
        ("kv_cache_dtype", 5),
        ("max_model_len", 10**9),
        ("max_model_len", "64"),
        ("max_model_len", -1),
    ],
)
def test_a_strangers_settings_are_checked(
    seethrough: Seethrough, recorded: Path, setting: str, value: Any
) -> None:
    change = f"UPDATE origins SET body = json_set(body, '$.settings.{setting}', json(?))"
    _edit(recorded, change, json.dumps(value))
    ran = seethrough("replay", "--record", recorded)
    assert ran.code == 2
    assert setting in ran.err


def test_ids_that_the_model_does_not_have(seethrough: Seethrough, recorded: Path) -> None:
    ids = array("i", [2**31 - 1] * 8).tobytes()
    _edit(recorded, "UPDATE requests SET output_ids = ?", ids)
    for words in (("--check",), (), ("--set", "temperature=0"), ("--json",)):
        ran = seethrough("replay", "--record", recorded, *words)
        assert ran.code == (1 if "--check" in words else 0), (words, ran.err)
        assert "Traceback" not in ran.err
    _edit(recorded, "UPDATE requests SET prompt_ids = ?", ids)
    assert seethrough("replay", "--record", recorded).code == 2


def test_an_empty_name_is_no_directory(
    seethrough: Seethrough,
    chat_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("run", "a", "--model", chat_model, "--max-tokens", 1)
    assert seethrough(*words, "--record", "").code == 2
    monkeypatch.setenv("SEETHROUGH_RECORD", "")
    assert seethrough(*words).code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_used(
    seethrough: Seethrough, chat_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    ran = seethrough("run", "a", "--model", chat_model, "--record", tmp_path / "file")
    assert ran.code == 2
    assert "cannot be recorded" in ran.err
