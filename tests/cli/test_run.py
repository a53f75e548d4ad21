from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seethrough.cli.options import SAMPLING
from seethrough.sampling.params import SamplingParams

Seethrough = Callable[..., Any]
Start = Callable[..., subprocess.Popen[str]]

KEYS = {
    "id",
    "prompt",
    "prompt_token_ids",
    "token_ids",
    "text",
    "finish_reason",
    "stop_reason",
    "logprobs",
    "params",
    "metrics",
}
METRICS = {
    *("load_ms", "ttft_ms", "tpot_ms", "queue_ms", "prefill_ms", "decode_ms"),
    *("prompt_tokens", "completion_tokens", "num_cached_tokens", "preemptions"),
}


def test_streams_the_text_that_json_reports(seethrough: Seethrough, chat_model: Path) -> None:
    words = ("run", "hello", "--model", chat_model, "--max-tokens", 8, "--seed", 3)
    plain, asked = seethrough(*words), seethrough(*words, "--json")
    assert plain.code == asked.code == 0
    body = asked.json
    assert body.keys() >= KEYS
    assert body["metrics"].keys() == METRICS
    assert plain.out == body["text"] + "\n"
    assert body["metrics"]["completion_tokens"] == len(body["token_ids"])
    assert "length" in plain.err or "stop" in plain.err


def test_loading_says_what_is_needed_there_and_chosen(
    seethrough: Seethrough, chat_model: Path
) -> None:
    ran = seethrough("run", "a", "--model", chat_model, "--max-tokens", 1)
    for word in ("weights", "memory", "context 128", "KV pool", "threads", "TTFT"):
        assert word in ran.err
    quiet = seethrough("run", "a", "--model", chat_model, "--max-tokens", 1, "--quiet")
    assert quiet.err == ""


# One value per flag that differs from the default; a flag without an entry fails the test below.
VALUES: dict[str, tuple[list[object], object]] = {
    "temperature": ([0.5], 0.5),
    "top_k": ([7], 7),
    "top_p": ([0.5], 0.5),
    "min_p": ([0.1], 0.1),
    "typical_p": ([0.5], 0.5),
    "repetition_penalty": ([1.5], 1.5),
    "presence_penalty": ([0.5], 0.5),
    "frequency_penalty": ([0.5], 0.5),
    "logit_bias": (["5=1.5"], {"5": 1.5}),
    "seed": ([11], 11),
    "n": ([2], 2),
    "max_tokens": ([2], 2),
    "min_tokens": ([1], 1),
    "stop": (["xyz"], ["xyz"]),
    "stop_token_ids": (["9,10"], [9, 10]),
    "include_stop_str_in_output": ([], True),
    "ignore_eos": ([], True),
    "skip_special_tokens": (None, False),  # type: ignore[dict-item]
    "logprobs": ([2], 2),
    "prompt_logprobs": ([1], 1),
    "logprobs_mode": (["raw_logits"], "raw_logits"),
    "bad_words": (["fox"], ["fox"]),
    "bad_words_ids": (["5,6"], [[5, 6]]),
    "allowed_token_ids": (["5-8"], [5, 6, 7, 8]),
}


def test_every_sampling_parameter_has_a_flag() -> None:
    names = set(SamplingParams.__dataclass_fields__)
    assert {flag.dest for flag in SAMPLING} == names == set(VALUES)


@pytest.mark.parametrize("name", sorted(VALUES))
@pytest.mark.parametrize("way", ["flag", "environment"])
def test_sampling_flag_reaches_the_request(
    name: str,
    way: str,
    seethrough: Seethrough,
    chat_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, expected = VALUES[name]
    words: list[object] = ["run", "hello", "--model", chat_model, "--json", "--quiet"]
    if name != "max_tokens":
        words += ["--max-tokens", 3]
    flag = name.replace("_", "-")
    if way == "environment":
        value = "0" if given is None else str(given[0]) if given else "1"
        monkeypatch.setenv(f"SEETHROUGH_{name.upper()}", value)
    else:
        words += [f"--no-{flag}"] if given is None else [f"--{flag}", *given]
    body = seethrough(*words).json
    assert body["params"][name] == expected
    assert body["params"]["origin"][name] == "command line"


def test_flag_wins_over_environment(
    seethrough: Seethrough, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEETHROUGH_SEED", "5")
    monkeypatch.setenv("SEETHROUGH_MODEL", str(chat_model))
    monkeypatch.setenv("SEETHROUGH_MAX_TOKENS", "2")
    body = seethrough("run", "hi", "--seed", 6, "--json").json
    assert body["params"]["seed"] == 6
    assert body["params"]["max_tokens"] == 2


def test_bad_environment_value_names_the_variable(
    seethrough: Seethrough, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEETHROUGH_TOP_K", "many")
    ran = seethrough("run", "hi")
    assert ran.code == 2
    assert "SEETHROUGH_TOP_K" in ran.err


@pytest.mark.parametrize("setting", ["max-model-len", "block-size", "num-kv-blocks", "threads"])
def test_engine_setting_is_used(setting: str, seethrough: Seethrough, chat_model: Path) -> None:
    value = {"max-model-len": 48, "block-size": 32, "num-kv-blocks": 9, "threads": 1}[setting]
    ran = seethrough("run", "a", "--model", chat_model, f"--{setting}", value, "--max-tokens", 1)
    shown = {
        "max-model-len": "context 48 of 128",
        "block-size": "blocks of 32",
        "num-kv-blocks": "(9 blocks",
        "threads": "1 threads",
    }[setting]
    assert ran.code == 0
    assert shown in ran.err


def test_system_message_goes_through_the_template(seethrough: Seethrough, chat_model: Path) -> None:
    words = ("--model", chat_model, "--json", "--max-tokens", 1)
    body = seethrough("run", "hi", "--system", "be kind", *words).json
    assert body["prompt"] == "<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>"


def test_prompt_from_file_and_standard_input(
    seethrough: Seethrough, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--model", chat_model, "--json", "--max-tokens", 1)
    (tmp_path / "p.txt").write_text("the fox\n", encoding="utf-8")
    assert seethrough("run", "--file", tmp_path / "p.txt", *words).json["prompt"] == "the fox\n"
    stdin = SimpleNamespace(buffer=io.BytesIO("狐狸".encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    assert seethrough("run", "-", *words).json["prompt"] == "狐狸"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["run"], 2, "give a prompt"),
        (["run", "a", "--file", "b"], 2, "not both"),
        (["run", "--file", "/no/such/file"], 2, "cannot be read"),
        (["run", "a", "--temperature", "-1"], 2, "temperature"),
        (["run", "a", "--top-p", "2"], 2, "top_p"),
        (["run", "a", "--max-tokens", "5000"], 2, "128"),
        (["run", "", "--max-tokens", "1"], 2, "prompt"),
        (["run", "a", "--nonsense"], 2, "--nonsense"),
        (["run", "a", "--stop-token-ids", "100000"], 2, "stop_token_ids"),
        (["run", "a", "--model", "/no/such/model"], 3, "/no/such/model"),
        (["run", "a", "--model", "no-such-name"], 3, "no-such-name"),
        (
            ["run", "a", "--num-kv-blocks", "1", "--max-model-len", "64", "--max-tokens", "40"],
            1,
            "blocks",
        ),
        (["run", "a", "--max-model-len", "100000"], 3, "128"),
        ([], 2, ""),
    ],
)
def test_exit_codes(
    words: list[str],
    code: int,
    says: str,
    seethrough: Seethrough,
    chat_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SEETHROUGH_MODEL", str(chat_model))
    ran = seethrough(*words)
    assert ran.code == code, ran.err
    assert says in ran.err
    assert "Traceback" not in ran.err


def test_a_request_that_fails_ends_with_1(seethrough: Seethrough, chat_model: Path) -> None:
    words = ("--model", chat_model, "--allowed-token-ids", "5", "--bad-words-ids", "5")
    ran = seethrough("run", "a", *words, "--max-tokens", 2)
    assert ran.code == 1
    assert "no token is left" in ran.err


def test_logprobs_are_shown_and_coloured(seethrough: Seethrough, chat_model: Path) -> None:
    words = ("run", "a", "--model", chat_model, "--max-tokens", 3, "--logprobs", 2, "--seed", 1)
    plain = seethrough(*words)
    assert plain.out.count("%") >= 6  # three times the two best, and the chosen one
    assert "\033[" not in plain.out
    colored = seethrough(*words, "--color", "always")
    assert "\033[38;5;" in colored.out


def test_samples_are_all_printed(seethrough: Seethrough, chat_model: Path) -> None:
    ran = seethrough("run", "a", "--model", chat_model, "--max-tokens", 3, "--n", 3, "--seed", 1)
    assert "[sample 1]" in ran.out
    assert "[sample 2]" in ran.out


def test_chinese(seethrough: Seethrough, chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("run", "a", "--model", chat_model, "--max-tokens", 1)
    assert "线程" in seethrough(*words, "--lang", "zh").err
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert "线程" in seethrough(*words).err
    assert "线程" not in seethrough(*words, "--lang", "en").err
    assert "错误" in seethrough("run", "a", "--model", "/no/such").err


def test_interrupt_keeps_the_text_and_exits_130(process: Start, chat_model: Path) -> None:
    words = ("run", "hello", "--model", chat_model, "--ignore-eos", "--seed", 1)
    running = process(*words, "--max-num-batched-tokens", 64)
    assert running.stdout is not None
    first = running.stdout.read(3)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=30)
    assert running.returncode == 130, err
    assert "Traceback" not in err
    assert "abort" in err or "length" in err
    assert (first + out).endswith("\n")


def test_interrupt_with_json_is_one_object(process: Start, default_model: str) -> None:
    running = process("run", "Once upon a time", "--ignore-eos", "--json", "--max-tokens", 4000)
    assert running.stderr is not None
    while "context" not in running.stderr.readline():
        pass
    time.sleep(1)  # the request is running by now
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert json.loads(out)["finish_reason"] == "abort"


def test_closed_pipe_is_no_error(process: Start, chat_model: Path) -> None:
    running = process("run", "hello", "--model", chat_model, "--ignore-eos", "--seed", 1)
    assert running.stdout is not None
    running.stdout.read(1)
    running.stdout.close()
    assert running.stderr is not None
    err = running.stderr.read()
    assert running.wait(timeout=30) == 0, err
    assert "Traceback" not in err
    assert "Exception ignored" not in err


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_full_disk_is_said_in_one_line(
    plain_environment: None, chat_model: Path, more: tuple[str, ...]
) -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("no /dev/full: the device that is always full")
    words = ("run", "hello", "--model", str(chat_model), "--max-tokens", "2", "--quiet", *more)
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "seethrough", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ran.returncode == 1
    (line,) = ran.stderr.splitlines()
    assert line.startswith("seethrough: error: ")
    assert "space" in line


def test_an_output_that_cannot_say_it_all(
    process: Start, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    words = ("tokenize", "猫é", "--model", chat_model)
    out, err = process(*words).communicate(timeout=60)
    assert "\\xe7" in out, err  # the piece of a byte
    out, err = process(*words, "--json").communicate(timeout=60)
    assert json.loads(out)["text"] == "猫é", err
    run = ("run", "猫é", "--max-tokens", 1, "--model", chat_model, "--json")
    out, err = process(*run).communicate(timeout=60)
    assert json.loads(out)["prompt"] == "猫é", err
