from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from seethrough.cli import doc
from seethrough.cli.doctor import _barrier, _path_and_why
from seethrough.cli.main import VERBS
from seethrough.cli.messages import MESSAGES, Speaker
from seethrough.kernels.cpu import path
from seethrough.kernels.cpu.path import best, needs, processor_flags
from seethrough.stages import STAGES

Seethrough = Callable[..., Any]
Start = Callable[..., subprocess.Popen[str]]
DOCS = Path(__file__).parent.parent.parent / "docs"


# ------------------------------------------------------------------ chat


def talk(process: Start, model: Path, lines: str, *flags: object) -> tuple[int, str, str]:
    words = ("chat", "--model", model, "--max-tokens", 4, "--seed", 1, *flags)
    running = process(*words, stdin=subprocess.PIPE)
    out, err = running.communicate(lines, timeout=60)
    return running.returncode, out, err


def test_chat_saves_what_was_said(process: Start, chat_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    lines = f"/system be brief\nhello\nand you\n/params temperature=0.5 top_k=3\n/save {path}\n"
    code, out, err = talk(process, chat_model, lines)
    assert code == 0, err
    saved = json.loads(path.read_text(encoding="utf-8"))
    roles = [message["role"] for message in saved["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert saved["params"] == {"temperature": 0.5, "top_k": 3}
    assert '"temperature": 0.5' in out
    for message in saved["messages"][2::2]:
        assert message["content"] in out


def test_chat_clear_and_drop(process: Start, chat_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    code, _, err = talk(process, chat_model, f"one\ntwo\n/drop\n/save {path}\n")
    assert code == 0, err
    first, answer = json.loads(path.read_text())["messages"]
    assert first == {"role": "user", "content": "one"}
    assert answer["role"] == "assistant"
    talk(process, chat_model, f"one\n/clear\n/save {path}\n/quit\nnever\n")
    assert json.loads(path.read_text())["messages"] == []


def test_chat_says_both_numbers_when_it_no_longer_fits(process: Start, chat_model: Path) -> None:
    code, _, err = talk(process, chat_model, "x" * 400 + "\nhello\n")
    assert code == 0
    assert "128" in err
    assert "400" in err or "tokens" in err
    assert "Traceback" not in err


def test_chat_survives_bad_commands(process: Start, chat_model: Path) -> None:
    lines = (
        "/nonsense\n/params top_p=7\n/params nope=1\n/save\n/save /no/such/dir/x\n/help\n\n/drop\n"
    )
    code, _, err = talk(process, chat_model, lines)
    assert code == 0
    assert "/nonsense" in err
    assert "top_p" in err
    assert "nope" in err
    assert "Traceback" not in err


# ------------------------------------------------------------------ tokenize


def test_tokenize_shows_pieces_and_round_trip(seethrough: Seethrough, chat_model: Path) -> None:
    ran = seethrough("tokenize", "the fox 你好", "--model", chat_model, "--json")
    body = ran.json
    assert bytes.fromhex("".join(body["bytes"])).decode() == "the fox 你好"
    assert body["round_trip_ok"]
    assert body["count"] == len(body["token_ids"]) == len(body["pieces"])
    table = seethrough("tokenize", "the fox 你好", "--model", chat_model)
    assert table.code == 0
    for token_id in body["token_ids"]:
        assert str(token_id) in table.out


def test_tokenize_chat_shows_the_rendered_prompt(seethrough: Seethrough, chat_model: Path) -> None:
    body = seethrough("tokenize", "hi", "--chat", "--model", chat_model, "--json").json
    assert body["text"] == "<|user|>hi<|end|><|assistant|>"
    assert body["pieces"][0] == "<|user|>"


def test_tokenize_reads_no_weights(
    seethrough: Seethrough, chat_model: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((chat_model / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"\x08")  # damaged: opening it would fail
    assert seethrough("tokenize", "hi", "--model", tmp_path).code == 0


# ------------------------------------------------------------------ trace


def test_trace_shows_every_stage_of_every_token(seethrough: Seethrough, chat_model: Path) -> None:
    words = ("--model", chat_model, "--top-k", 5, "--top-p", 0.9, "--temperature", 0.7, "--seed", 1)
    ran = seethrough("trace", "the fox", *words, "--max-tokens", 2, "--ignore-eos")
    assert ran.code == 0, ran.err
    first = ran.out.split("─── token 1")[0]
    for stage in STAGES:
        if stage.id != "S13":
            assert any(line.startswith(f"{stage.id} ") for line in first.splitlines()), stage.id
            assert stage.name.en in first
    assert ran.out.count("u = 0.") == 2
    for step in ("temperature", "top_k", "top_p"):
        assert ran.out.count(f"{step} (") == 2
    assert "314 → 5 candidates" in ran.out


def test_trace_matrix_is_the_one_of_the_file(
    seethrough: Seethrough, chat_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "t.safetensors"
    words = ("--model", chat_model, "--temperature", 0, "--max-tokens", 1, "--quiet")
    ran = seethrough("trace", "the fox", *words, "--out", path)
    assert ran.code == 0, ran.err
    with safe_open(path, "np") as file:
        manifest = json.loads(file.metadata()["seethrough"])
        weights = file.get_tensor("S6.5.A.layer1")[2]
    assert manifest["format"] == "seethrough-trace/1"
    shown = seethrough(
        "trace", "the fox", *words, "--stage", "S6.5", "--layer", 1, "--head", 2
    ).out.splitlines()
    numbers = np.array([[float(x) for x in line[18:].split()] for line in shown[2:]])
    np.testing.assert_allclose(numbers, weights, rtol=0.06, atol=1e-3)
    row = seethrough(
        "trace", "the fox", *words, "--stage", "S6.5", "--layer", 1, "--head", 2, "--token", 1
    ).out.splitlines()
    assert len(row) == 3


@pytest.mark.parametrize("stage", [stage.id for stage in STAGES])
def test_every_stage_can_be_asked_for(stage: str, seethrough: Seethrough, chat_model: Path) -> None:
    place = ["--layer", 1, "--head", 0] if stage.startswith("S6.") else []
    flat = stage in ("S6.1", "S6.6", "S6.7")
    words = ["--model", chat_model, "--stage", stage, *(place[:2] if flat else place)]
    if stage == "S6.8":
        words += ["--value", "kv_cache"]
    ran = seethrough("trace", "fox", *words, "--max-tokens", 2, "--ignore-eos", "--quiet")
    if stage == "S6.8":  # K and V together: three axes for one head
        assert ran.code == 2
        assert "[2, " in ran.err
    else:
        assert ran.code == 0, ran.err
        assert stage in ran.out


def test_trace_of_a_chat(seethrough: Seethrough, chat_model: Path) -> None:
    words = ("--model", chat_model, "--system", "be kind", "--json", "--max-tokens", 1)
    body = seethrough("trace", "hi", *words, "--quiet").json
    assert body["prompt_tokens"][0] == "<|system|>"
    assert body["request"]["prompt"].endswith("<|user|>hi<|end|><|assistant|>")


def test_trace_json_has_steps_and_arrays(seethrough: Seethrough, chat_model: Path) -> None:
    body = seethrough("trace", "fox", "--model", chat_model, "--seed", 2, "--json", "--quiet").json
    assert len(body["steps"]) == 3  # the default of --max-tokens here
    assert {a["stage"] for a in body["arrays"]} >= {"S4", "S6.1", "S6.4", "S6.5", "S9", "S11"}
    assert all(step["sampling"]["u"] is not None for step in body["steps"])


def test_trace_names_what_did_not_fit(seethrough: Seethrough, chat_model: Path) -> None:
    ran = seethrough("trace", "fox", "--model", chat_model, "--byte-budget", 3000, "--quiet")
    assert ran.code == 0
    assert "did not fit" in ran.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--stage", "S99"], "S99"),
        (["--stage", "S6.5"], "layer"),
        (["--stage", "S6.5", "--layer", "1"], "head"),
        (["--stage", "S6.5", "--layer", "9"], "no layer 9"),
        (["--stage", "S6.5", "--layer", "1", "--head", "44"], "no head 44"),
        (["--stage", "S6.1", "--value", "nope", "--layer", "1"], "nope"),
        (["--layer", "1"], "--stage"),
        (["--n", "2"], "one sample"),
        (["--out", "/no/such/dir/x"], "/no/such/dir/x"),
    ],
)
def test_trace_errors_say_what_there_is(
    words: list[str], says: str, seethrough: Seethrough, chat_model: Path
) -> None:
    ran = seethrough("trace", "fox", "--model", chat_model, "--quiet", *words)
    assert ran.code == 2
    assert says in ran.err
    assert "Traceback" not in ran.err


# ------------------------------------------------------------------ pull, models, doctor


def test_models_show_is_the_program(seethrough: Seethrough, chat_model: Path) -> None:
    ran = seethrough("models", "show", chat_model)
    assert ran.code == 0
    assert "layers 0–1" in ran.out
    assert ran.out.count("attend(") == 1
    assert "q.weight F32 [64, 64]" in ran.out
    assert "logits [1, 314]" in ran.out
    assert "Masked" not in ran.out or "S6.4" in ran.out
    assert "归一化与投影" in seethrough("models", "show", chat_model, "--lang", "zh").out


def test_models_and_doctor_on_an_empty_cache(seethrough: Seethrough, tmp_path: Path) -> None:
    listed = seethrough("models", "--cache-dir", tmp_path)
    assert listed.code == 0
    assert "seethrough pull" in listed.err
    sick = seethrough("doctor", "--cache-dir", tmp_path)
    assert sick.code == 1
    assert "seethrough pull" in sick.out


def test_doctor_and_models_with_the_default_model(
    seethrough: Seethrough, default_model: str
) -> None:
    assert seethrough("pull").code == 0
    body = seethrough("doctor", "--json").json
    assert body["problems"] == []
    assert body["packages"]["numpy"] == np.__version__
    assert any(model["name"] == default_model for model in body["models"])
    assert default_model in seethrough("models").out


def test_doctor_says_which_instructions_and_why(seethrough: Seethrough) -> None:
    body = seethrough("doctor", "--json").json
    chosen = best(processor_flags())
    assert body["cpu_path"].startswith(chosen)
    assert all(flag in body["cpu_path"] for flag in needs(chosen))
    value, unit = body["barrier"].split()
    assert 0 < float(value) < 1000
    assert unit == "µs"


def test_doctor_says_what_a_faster_path_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = frozenset({"avx2", "fma", "f16c", "avx512f"})
    monkeypatch.setattr(path, "processor_flags", lambda: old)
    assert _path_and_why(Speaker("en")) == (
        "avx2 (the processor has avx2, f16c, fma); avx512 lacks avx512_vnni, avx512bw, avx512vl"
    )
    assert "avx512 缺少 avx512_vnni" in _path_and_why(Speaker("zh"))
    monkeypatch.setattr(path, "processor_flags", frozenset)
    assert _path_and_why(Speaker("en")).startswith("portable; avx512 lacks ")


def test_doctor_says_when_kernels_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("seethrough.engine.load.kernel_dir", lambda: tmp_path / "file" / "kernels")
    shown, (problem,) = _barrier(Speaker("en"))
    assert shown.endswith("µs")  # it is measured all the same
    assert str(tmp_path) in problem


def test_pull_of_an_unknown_name(seethrough: Seethrough, tmp_path: Path) -> None:
    ran = seethrough("pull", "no-such-model", "--cache-dir", tmp_path)
    assert ran.code == 3
    assert "no-such-model" in ran.err


# ------------------------------------------------------------------ bench


def test_bench_figures(seethrough: Seethrough, default_model: str) -> None:
    words = ("--pp", 16, "--tg", 2, "--batch", 1, "--repeats", 1, "--depth", 4, "--quiet")
    ran = seethrough("bench", *words)
    assert ran.code == 0, ran.err
    first, *_, last = ran.out.splitlines()
    assert first.startswith("limits:")
    body = json.loads(last)
    assert body["pp"] == 16
    assert body["backend"] == "cpu"
    for name in ("pp_tok_s", "tg_tok_s", "batch_tok_s", "ttft_ms"):
        assert body[name] > 0
    assert body["limit"].keys() == {"read_gb_s", "gop_s", "tg_tok_s", "pp_tok_s"}
    assert body["tg_share"] == pytest.approx(body["tg_tok_s"] / body["limit"]["tg_tok_s"])
    assert seethrough("bench", "--pp", 0).code == 2


# ------------------------------------------------------------------ help and docs


def test_docs_are_what_the_parsers_say() -> None:
    for language, name in doc.FILES.items():
        assert (DOCS / name).read_text(encoding="utf-8") == doc.render(language), (
            "run: python -m seethrough.cli.doc"
        )


@pytest.mark.parametrize("language", ["en", "zh"])
def test_help_names_every_flag_and_variable(language: str, seethrough: Seethrough) -> None:
    for verb in VERBS:
        ran = seethrough(verb.name, "--help", "--lang", language)
        assert ran.code == 0
        for flag in verb.flags:
            assert f"--{flag.name}" in ran.out
            assert flag.variable in ran.out.replace("\n", "").replace(" ", "")
        assert "130" in ran.out


def test_every_message_is_said_in_both_languages() -> None:
    source = "".join(
        path.read_text(encoding="utf-8") for path in (Path(doc.__file__).parent).glob("*.py")
    )
    for key, text in MESSAGES.items():
        said = source.replace(f'"{key}": Text', "").replace("'", '"')
        assert f'"{key}"' in said, f"nobody says {key}"
        fields = [
            sorted(part.split("}")[0] for part in t.split("{")[1:]) for t in (text.en, text.zh)
        ]
        assert fields[0] == fields[1], key


def test_version(seethrough: Seethrough) -> None:
    from seethrough import __version__

    assert seethrough("--version").out.strip() == f"seethrough {__version__}"
