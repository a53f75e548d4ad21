from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from gguf import GGUFReader, dequantize

from seethrough import LLM

BENCH = Path(__file__).parents[2] / "bench"
FAKE = """
import sys
sys.path.insert(0, {runners!r})
from serve import Step, main

class Fake:
    def __init__(self, setup):
        if setup.threads == 7:
            raise RuntimeError("no seven threads here")
        self.about = {{"version": "fake 1", "build": setup.dtype}}
    def tg(self, prompt, n):
        print("noise on standard output")
        return n / 100
    def pp(self, prompt):
        if len(prompt) == 13:
            sys.exit("thirteen is too many")
        return len(prompt) / 1000
    def batch(self, prompts, n):
        raise ValueError("one request at a time")

class Steps(Fake):
    def add(self, name, prompt, n):
        self.long = len(prompt) == 9
    def step(self):
        return Step([0, 1, 2] if self.long else [0, 1], 11 if self.long else 2)
    def drop(self):
        pass

main(lambda setup: (Steps if setup.dtype == "steps" else Fake)(setup))
"""


def bench(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.fixture(autouse=True)
def _bench_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.syspath_prepend(str(BENCH / "runners"))


# ---------------------------------------------------------------------- command line, arithmetic


def test_the_command_line_has_defaults_and_names_what_it_does_not_know(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parse = bench("peers").parse
    asked = parse(["--peers", "llama.cpp", "llama.cpp@other.gguf", "--work", "tg", "pp"])
    assert (asked.rounds, asked.batch, asked.batch_in, asked.batch_out) == (5, [16], 128, 64)
    assert parse(["--batch", "16", "64"]).batch == [16, 64]
    assert (asked.beside, asked.beside_prompt) == (8, 4000)
    assert asked.peers == ["llama.cpp", "llama.cpp@other.gguf"]
    for wrong in (["--peers", "ollama"], ["--rounds", "0"], ["--work", "magic"]):
        with pytest.raises(SystemExit):
            parse(wrong)
    assert "unknown peer 'ollama'" in capsys.readouterr().err


def test_ratios_are_of_medians_and_of_the_runs_of_one_round() -> None:
    found = bench("work").pair([1.0, 2.0, 4.0], [3.0, 3.0, 2.0])
    assert (found.ratio, found.low, found.high) == (1.5, 0.5, 3.0)
    with pytest.raises(ValueError, match="shorter"):
        bench("work").pair([1.0, 2.0], [1.0])


def test_workloads_beyond_the_context_become_what_just_fits_once() -> None:
    choose = bench("work").choose
    works = choose(
        ["tg", "pp", "batch", "beside", "start"],
        context=1000,
        tg=100,
        depths=[128, 4096, 8192],
        pp=[512, 4096],
        batch=([16, 64], 128, 64),
        beside=(3, 4000),
    )
    assert [work.name for work in works] == [
        "tg100 at depth 128",
        "tg100 at depth 899",
        "pp512",
        "pp998",
        "batch 16 (128 in, 64 out)",
        "batch 64 (128 in, 64 out)",
        "3 decode beside a prompt of 998",
        "start to first token of 8",
    ]
    assert max(work.length for work in works) == 1000
    with pytest.raises(ValueError, match="does not fit"):
        choose(["tg"], context=64, tg=100, depths=[16], pp=[], batch=([1], 1, 1))


def test_a_runner_is_told_the_sizes_of_the_largest_workload(tmp_path: Path) -> None:
    peers, work = bench("peers"), bench("work")
    file = tmp_path / "model.gguf"
    file.touch()
    works = [work.Workload("batch", 128, 64, requests) for requests in (16, 64)]
    told = peers._command("seethrough", file, peers.parse([]), works)
    assert {"--context=193", "--requests=64", "--request-tokens=193", "--beside=0"} <= set(told)
    works.append(work.Workload("beside", 4000, 1, 8))
    told = peers._command("seethrough", file, peers.parse([]), works)
    assert {"--context=4002", "--requests=64", "--beside=8", "--beside-tokens=545"} <= set(told)


def test_a_long_prompt_comes_to_short_ones() -> None:
    work = bench("work").Workload("beside", 100, 1, 3)
    ask = work.ask(1, 50)
    assert ask == work.ask(1, 50) != work.ask(2, 50)
    assert np.array(ask["prompts"]).shape == (3, 32)
    assert (len(ask["prompt"]), ask["n"], work.length) == (100, 116, 149)
    assert work.figure(0.5) == "0.500 s"


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).exponential(1, 37).tolist()
    for percent in (0, 50, 99, 100):
        wanted = np.percentile(values, percent)
        assert bench("serve").percentile(values, percent) == pytest.approx(wanted)
    assert bench("serve").percentile([7.0], 99) == 7.0


class Scripted:
    """An engine of two requests whose steps are a list: rows, seconds, and whose tokens come."""

    def __init__(self, serve: ModuleType, monkeypatch: pytest.MonkeyPatch, steps: str) -> None:
        self.now, self.added, self.dropped = 0.0, [], False
        self._serve, self._steps = serve, iter(steps.split())
        monkeypatch.setattr(serve, "perf_counter", lambda: self.now)

    def add(self, name: int, prompt: list[int], n: int) -> None:
        self.added.append((name, len(prompt), n))
        self.now += 0.001

    def step(self) -> object:
        rows, seconds, names = next(self._steps).split(":")
        self.now += int(seconds)
        return self._serve.Step([int(name) for name in names], int(rows))

    def drop(self) -> None:
        self.dropped = True


START = "2:1:01 2:1:01 2:1:01 2:1:01 "


def test_times_between_tokens_end_with_the_first_token_of_the_long_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve = bench("serve")
    engine = Scripted(serve, monkeypatch, START + "12:3:01 12:5:01 7:2:201 never")
    told = serve.beside(engine, [[1], [2]], 9, [3] * 30)
    assert engine.added == [(0, 1, 9), (1, 1, 9), (2, 30, 1)]
    assert engine.dropped
    assert told["seconds"] == pytest.approx(10.001)  # from before it is added
    gaps = told["inter_token_ms"]
    assert (gaps["p50"], gaps["count"]) == (pytest.approx(3001), 6)
    assert gaps["max"] == pytest.approx(5000)
    assert told["step_ms"] == {"rows": 12, "p50": pytest.approx(4000), "count": 2}


def test_who_pauses_until_the_long_prompt_is_done_waits_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve = bench("serve")
    engine = Scripted(serve, monkeypatch, START + "10:3: 10:5:2 1:1:0 1:1:01 never")
    told = serve.beside(engine, [[1], [2]], 9, [3] * 20)
    assert told["seconds"] == pytest.approx(8.001)
    assert told["inter_token_ms"]["count"] == 2
    assert told["inter_token_ms"]["max"] == pytest.approx(10001)
    assert told["inter_token_ms"]["p50"] == pytest.approx(9501)


def test_requests_that_end_too_early_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = bench("serve")
    engine = Scripted(serve, monkeypatch, START + "3:1:01 never")
    with pytest.raises(RuntimeError, match="all its 5 tokens"):
        serve.beside(engine, [[1], [2]], 5, [3] * 20)
    assert engine.dropped


def test_ours_gives_every_request_a_token_in_each_step(tmp_path: Path) -> None:
    """And computes the prompt in the steps that its own threshold allows."""
    synthetic, serve = bench("synthetic"), bench("serve")
    file = tmp_path / "tiny.gguf"
    synthetic.write_random(synthetic.Shape(2, 256, 4, 2, 64, 512, 384, 1024, False), "q4_0", file)
    work = bench("work").Workload("beside", 700, 1, 3)
    setup = serve.Setup(
        str(file), 1, work.length, 1, 256, "bf16", work.requests, work.decoding_length
    )
    engine = bench("run_seethrough").Seethrough(setup)
    rows, step = [], engine.step

    def noted() -> object:
        done = step()
        rows.append((done.rows, sorted(done.tokens)))
        return done

    engine.step = noted
    told = serve._answer(engine, work.ask(1, 300))
    state = engine.llm.state
    assert (state.running, state.waiting, state.blocks_held) == (0, 0, 0)
    assert state.counted.preemptions == 0
    assert rows[0] == (96, [0, 1, 2])
    assert rows[1:4] == [(3, [0, 1, 2])] * 3
    beside = rows[4:]
    assert [names for _, names in beside] == [[0, 1, 2]] * (len(beside) - 1) + [[0, 1, 2, 3]]
    assert sum(count for count, _ in beside) == 700 + 3 * len(beside)
    assert told["inter_token_ms"]["count"] == 3 * len(beside)
    assert told["step_ms"]["rows"] == max(count for count, _ in beside)
    assert 0 < told["inter_token_ms"]["p50"] <= told["inter_token_ms"]["max"]
    assert told["inter_token_ms"]["max"] < told["seconds"] * 1e3


def test_all_engines_of_a_round_get_the_same_ids_and_rounds_differ() -> None:
    work = bench("work").Workload("batch", 5, 3, 2)
    first = work.ask(1, 50)
    assert first == work.ask(1, 50) != work.ask(2, 50)
    assert np.array(first["prompts"]).shape == (2, 5)
    assert np.array(first["prompts"]).max() < 50
    assert work.figure(0.5) == "12.0 tok/s"
    assert bench("work").Workload("start", 8).figure(0.5) == "0.500 s"


# ---------------------------------------------------------------------- engines as processes


def command(folder: Path, threads: int = 1) -> list[str]:
    runner = folder / "fake.py"
    runner.write_text(FAKE.format(runners=str(BENCH / "runners")))
    sizes = {"threads": threads, "context": 64, "requests": 2, "request-tokens": 8}
    return [
        sys.executable,
        str(runner),
        "--model=none",
        *(f"--{name}={value}" for name, value in sizes.items()),
    ]


def test_a_comparison_measures_each_engine_and_reports_what_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers, work = bench("peers"), bench("work")
    start = command(tmp_path)
    engines = [
        peers.Engine(label, name, start, tmp_path / f"{label}.log")
        for label, name in (("seethrough", "seethrough"), ("vllm", "vllm"))
    ]
    broken = peers.Engine("openvino", "openvino", command(tmp_path, 7), tmp_path / "o.log")
    session = peers.Session(threads=1, timeout=60, rounds=2, vocab=50)
    try:
        failed = peers._start_all([*engines, broken], session)
        assert failed == {"openvino": "RuntimeError: no seven threads here"}
        decode = peers._measure(engines, work.Workload("tg", 4, 10), session)
        batch = peers._measure(engines, work.Workload("batch", 4, 2, 2), session)
        refused = peers._measure(engines, work.Workload("beside", 9, 1, 2), session)
        begin = peers._measure(engines, work.Workload("start", 8), session)
    finally:
        for engine in engines:
            engine.child.stop()
    assert decode.seconds == {"seethrough": [0.1, 0.1], "vllm": [0.1, 0.1]}
    assert batch.seconds == {}
    assert batch.failed["vllm"] == "ValueError: one request at a time"
    assert refused.failed["vllm"] == "ValueError: no request can join while others run"
    assert all(0 < seconds < 60 for seconds in begin.seconds["vllm"])
    shown = capsys.readouterr().out
    assert "100.0 tok/s   ours is 1.00 × (1.00 … 1.00)" in shown
    assert "failed: ValueError" in shown
    assert json.loads(json.dumps(peers._result_json(decode)))["ours_over_peer"]["vllm"] == {
        "ratio": 1.0,
        "low": 1.0,
        "high": 1.0,
    }


def test_times_between_tokens_are_compared_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers, work = bench("peers"), bench("work")
    engines = [
        peers.Engine(name, name, [*command(tmp_path), "--dtype=steps"], tmp_path / f"{name}.log")
        for name in ("seethrough", "vllm")
    ]
    session = peers.Session(threads=1, timeout=60, rounds=3, vocab=50)
    try:
        assert peers._start_all(engines, session) == {}
        result = peers._measure(engines, work.Workload("beside", 9, 1, 2), session)
    finally:
        for engine in engines:
            engine.child.stop()
    runs = result.figures["inter_token_ms"]
    assert [run["count"] for run in runs["vllm"]] == [2, 2, 2]
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].startswith("2 decode beside a prompt of 9")
    assert [line.count("from token to token: p50 ") for line in shown[2:]] == [0, 1, 0, 1]
    assert [line.count(" ×)") for line in shown[2:]] == [0, 0, 0, 3]
    assert "a step of 11 rows" in shown[3]
    told = json.loads(json.dumps(peers._result_json(result)))
    assert set(told["inter_token_ours_over_peer"]) == {"vllm"}
    ours, theirs = (np.median([run["p99"] for run in runs[n]]) for n in ("seethrough", "vllm"))
    found = told["inter_token_ours_over_peer"]["vllm"]["p99"]
    assert found["ratio"] == pytest.approx(theirs / ours)
    assert found["low"] <= found["high"]
    assert told["figures_median"]["inter_token_ms"]["vllm"]["p99"] == pytest.approx(theirs)
    assert told["figures"]["step_ms"]["vllm"][0]["rows"] == 11


def test_an_engine_that_dies_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    child = bench("child").Child(
        [sys.executable, "-c", "raise SystemExit('no such processor')"], tmp_path / "log", 1, 60
    )
    with pytest.raises(bench("child").EngineError, match="code 1: no such processor"):
        child.wait_ready()
    child.stop()


def test_an_engine_that_dies_at_work_is_reported_then_and_later(tmp_path: Path) -> None:
    peers, work = bench("peers"), bench("work")
    engine = peers.Engine("vllm", "vllm", command(tmp_path), tmp_path / "log")
    session = peers.Session(threads=1, timeout=60, rounds=1, vocab=50)
    assert peers._start_all([engine], session) == {}
    first = peers._measure([engine], work.Workload("pp", 13), session)
    later = peers._measure([engine], work.Workload("pp", 8), session)
    engine.child.stop()
    assert "ended with code 1: thirteen is too many" in first.failed["vllm"]
    assert "ended earlier with code 1" in later.failed["vllm"]


def test_a_peer_that_is_not_installed_is_named_with_the_command(tmp_path: Path) -> None:
    peers, work = bench("peers"), bench("work")
    model = tmp_path / "model.gguf"
    model.touch()
    asked = peers.parse(["--peers", "llama.cpp", "--peers-dir", str(tmp_path)])
    engines, unavailable = peers._prepare(asked, model, [work.Workload("pp", 8)])
    assert [engine.label for engine in engines] == ["seethrough"]
    assert "bench/peers.py --install llama.cpp" in unavailable["llama.cpp"]


# ---------------------------------------------------------------------- files to measure with


@pytest.mark.parametrize("kind", ["q4_0", "q5_0", "q8_0", "q4_k", "q6_k"])
def test_random_blocks_are_weights_of_a_sane_size(kind: str) -> None:
    blocks = bench("blocks")
    raw = blocks.random_blocks(kind, 64, 1024, np.random.default_rng(0))
    values = dequantize(raw, blocks.GGUF_TYPES[kind].number) * np.sqrt(1024)
    assert values.shape == (64, 1024)
    assert abs(values.mean()) < 0.15
    assert 0.9 < values.std() < 1.1


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["q4_0", "q4_k"])
def test_a_synthetic_file_runs(kind: str, tied: bool, tmp_path: Path) -> None:
    synthetic = bench("synthetic")
    shape = synthetic.Shape(2, 256, 4, 2, 64, 512, 384, 128, tied)
    file = tmp_path / "tiny.gguf"
    synthetic.write_random(shape, kind, file)
    assert run(file) == run(file)


def test_rows_that_are_no_multiple_of_256_fall_back_as_llama_cpp_does() -> None:
    synthetic = bench("synthetic")
    kinds = {m.name: m.kind for m in synthetic.plan(synthetic.SHAPES["135m"], "q4_k")}
    assert kinds["token_embd.weight"] == "q8_0"
    assert kinds["blk.5.attn_q.weight"] == "q5_0"
    assert kinds["blk.0.ffn_down.weight"] == "q6_k"
    large = [m.kind for m in synthetic.plan(synthetic.SHAPES["8b"], "q4_k") if "ffn_down" in m.name]
    assert large.count("q6_k") == 16


def test_requantizing_keeps_the_model_and_changes_the_type(tmp_path: Path) -> None:
    synthetic = bench("synthetic")
    source, out = tmp_path / "source.gguf", tmp_path / "out.gguf"
    shape = synthetic.Shape(1, 256, 4, 2, 64, 512, 384, 128, True)
    synthetic.write_random(shape, "q4_k", source)
    synthetic.requantize(source, "q4_0", out)
    before, after = GGUFReader(source), GGUFReader(out)
    assert after.fields.keys() == before.fields.keys()
    kinds = {tensor.name: tensor.tensor_type.name for tensor in after.tensors}
    assert kinds["blk.0.attn_q.weight"] == "Q4_0"
    assert kinds["token_embd.weight"] == "Q6_K"
    assert len(run(out)) == 4


def test_an_unpacked_file_is_the_same_model(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    synthetic, folder = bench("synthetic"), bench("folder")
    file = tmp_path / "tiny.gguf"
    synthetic.write_random(synthetic.Shape(2, 256, 4, 2, 64, 512, 384, 128, False), "q4_0", file)
    place = folder.unpacked(file, tmp_path)
    assert folder.unpacked(file, tmp_path) == place
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits[0, -1].numpy()
    llm = LLM(str(file), max_model_len=64, backend="reference")
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, temperature=0, max_tokens=1, logprobs=5)
    theirs = logits - np.logaddexp.reduce(logits)
    (ours,) = output.outputs[0].logprobs or []
    assert len(ours) >= 5
    for token, entry in ours.items():
        assert entry.logprob == pytest.approx(theirs[token], abs=0.05)


PROMPT = [5, 9, 70, 33, 120, 8]


def run(file: Path) -> list[int]:
    llm = LLM(str(file), max_model_len=64, backend="reference")
    (output,) = llm.generate(
        {"prompt_token_ids": PROMPT}, temperature=0, ignore_eos=True, max_tokens=4, logprobs=1
    )
    scores = [entry.logprob for each in output.outputs[0].logprobs or [] for entry in each.values()]
    assert np.isfinite(scores).all()
    return output.outputs[0].token_ids
