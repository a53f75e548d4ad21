"""The flight recorder: what it keeps reads back as it was; bounded, private, never in the way."""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from engine_forge import Models, Rig, prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from seethrough import LLM, SamplingParams
from seethrough.engine import recorder as recorder_module
from seethrough.engine.fingerprint import Fingerprint, Identity
from seethrough.engine.record_rows import from_row, origin_text, to_row
from seethrough.engine.record_store import FILE, RecordStore
from seethrough.engine.recorder import Origin, Recorded, RecordedSample
from seethrough.errors import ParameterError, RecordError, SeethroughError
from seethrough.sampling.params import EffectiveParams, resolve

ORIGIN = Origin("m", "/m.gguf", {"backend": "cpu"}, Fingerprint("abc", {"sources": "1"}))
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}


def record(number: int = 1, **more: Any) -> Recorded:
    params = resolve(SamplingParams(seed=number, max_tokens=9), None, {}, lambda: 0)
    sample = RecordedSample(0, [number, 7, 8], "length", None, None, (1.0, 2.0, 3.0, 4.0))
    whole = Recorded(f"req-{number}", 1e9 + number, "text", [1, 2], params, 9, 0, (sample,))
    return whole._replace(**more)


def plain(recorded: Recorded) -> Recorded:
    """As it reads back: lists for whatever sequences."""
    samples = tuple(s._replace(token_ids=list(s.token_ids)) for s in recorded.samples)
    return recorded._replace(prompt_ids=list(recorded.prompt_ids), samples=samples)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RecordStore]:
    opened = RecordStore(tmp_path / "records")
    yield opened
    opened.close()


@pytest.fixture
def db(store: RecordStore, tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """The file as anybody can read and write it, with one record in it."""
    store.write([record()], ORIGIN)
    connection = sqlite3.connect(tmp_path / "records" / FILE)
    yield connection
    connection.close()


# ------------------------------------------------------------------------------------ rows

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=9)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
SAMPLES = st.builds(
    RecordedSample,
    st.integers(0, 127),
    IDS,
    st.sampled_from(["stop", "length", "abort", "error"]),
    st.none() | st.integers(0, 2**31 - 1) | TEXTS,
    st.none() | TEXTS,
    st.tuples(FINITE, FINITE, FINITE, FINITE),
)
ASKED = st.builds(
    SamplingParams,
    temperature=st.none() | st.floats(0, 100),
    top_k=st.none() | st.integers(-1, 100),
    top_p=st.none() | st.floats(0, 1),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3),
    seed=st.integers(0, 2**64 - 1),
    n=st.none() | st.integers(1, 128),
    stop=st.none() | st.lists(TEXTS.filter(bool), max_size=3),
    stop_token_ids=st.none() | st.lists(st.integers(0, 99), max_size=3),
    logprobs=st.none() | st.integers(0, 20),
    ignore_eos=st.none() | st.booleans(),
    bad_words_ids=st.none()
    | st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=2), max_size=2),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=3),
)


@settings(max_examples=200, deadline=None)
@given(
    text=st.none() | TEXTS,
    ids=IDS,
    asked=ASKED,
    line=ASKED,
    samples=st.lists(SAMPLES, min_size=1, max_size=4),
    cached=st.integers(0, 10**6),
    when=st.floats(0, 2e11),
)
def test_a_row_reads_back_as_it_was(
    text: str | None,
    ids: list[int],
    asked: SamplingParams,
    line: SamplingParams,
    samples: list[RecordedSample],
    cached: int,
    when: float,
) -> None:
    params = resolve(asked, line, {"temperature": 0.6}, lambda: 0)
    whole = Recorded("req-1", when, text, ids, params, 77, cached, tuple(samples), ORIGIN)
    row = to_row(whole, 5)
    stored = [row[0], row[1], *row[3:8], origin_text(ORIGIN)]
    assert row[2] == 5
    assert from_row(stored) == plain(whole)


def test_a_row_without_its_defaults_means_what_it_meant_then() -> None:
    """Defaults of another version stand with the origin; today's do not matter."""
    row = to_row(record(), 1)
    about = json.loads(origin_text(ORIGIN))
    about["defaults"]["top_k"] = 40
    read = from_row([row[0], row[1], *row[3:8], json.dumps(about)])
    assert read.params.top_k == 40


def test_effective_parameters_come_back_or_are_refused() -> None:
    params = resolve(SamplingParams(stop=["a"], seed=2**64 - 1), None, {}, lambda: 0)
    assert EffectiveParams.from_dict(json.loads(json.dumps(params.to_dict()))) == params
    good = params.to_dict()
    for name in good:
        without = {k: v for k, v in good.items() if k != name}
        with pytest.raises(ParameterError):
            EffectiveParams.from_dict(without)
    for name, value in (
        ("temperature", -1),
        ("temperature", None),
        ("seed", None),
        ("n", 0),
        ("stop", [1]),
        ("origin", {}),
        ("origin", None),
        ("origin", dict.fromkeys(params.origin, "nobody")),
        ("other", 1),
    ):
        with pytest.raises(ParameterError):
            EffectiveParams.from_dict(good | {name: value})
    # A new field of the parameters must be recorded as well.
    assert {f.name for f in fields(EffectiveParams)} == set(good)


# ------------------------------------------------------------------------------------ the file


def test_the_file_holds_what_it_says(db: sqlite3.Connection) -> None:
    """Read with nothing but sqlite3."""
    row = db.execute("SELECT request_id, prompt, prompt_ids, output_ids FROM requests").fetchone()
    assert row[:2] == ("req-1", "text")
    assert array("i", row[2]).tolist() == [1, 2]
    assert array("i", row[3]).tolist() == [1, 7, 8]


def test_nobody_else_can_read_it(store: RecordStore, tmp_path: Path) -> None:
    store.write([record()], ORIGIN)
    folder = tmp_path / "records"
    assert folder.stat().st_mode & 0o777 == 0o700
    for path in folder.iterdir():  # those that SQLite puts beside it as well
        assert path.stat().st_mode & 0o077 == 0, path


def test_finding(store: RecordStore) -> None:
    assert store.get("last") is None
    store.write([record(1), record(2), record(3)], ORIGIN)
    for number in (1, 2, 3):
        assert store.get(f"req-{number}") == plain(record(number, origin=ORIGIN))
    newest = store.get("last")
    assert newest is not None
    assert newest.request_id == "req-3"
    assert [r.request_id for r in store.newest(2)] == ["req-3", "req-2"]
    assert store.get("req-") is None
    assert store.get("req-1' OR '1'='1") is None


def test_reading_changes_nothing(store: RecordStore, tmp_path: Path) -> None:
    """Also while another process has the file open for writing, and from a copy of it."""
    store.write([record(1)], ORIGIN)
    reader = RecordStore(tmp_path / "records", read_only=True)
    assert [r.request_id for r in reader.newest(5)] == ["req-1"]
    with pytest.raises(RecordError, match="readonly"):
        reader.write([record(2)], ORIGIN)
    store.write([record(3)], ORIGIN)
    assert [r.request_id for r in reader.newest(5)] == ["req-3", "req-1"]
    reader.close()
    store.close()
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / FILE).write_bytes((tmp_path / "records" / FILE).read_bytes())
    before = (copy / FILE).stat().st_mtime_ns
    again = RecordStore(copy, read_only=True)
    assert len(list(again.newest(5))) == 2
    again.close()
    assert (copy / FILE).stat().st_mtime_ns == before


def test_a_prompt_that_was_dropped_is_gone(tmp_path: Path) -> None:
    store = RecordStore(tmp_path, limit=1)
    store.write([record(1, prompt="a very private prompt")], ORIGIN)
    store.write([record(2, prompt="another")], ORIGIN)
    store.close()
    held = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"another" in held
    assert b"very private" not in held


def test_the_newest_stay(tmp_path: Path) -> None:
    store = RecordStore(tmp_path, limit=5)
    for number in range(1, 13):
        store.write([record(number)], ORIGIN)
    assert [r.request_id for r in store.newest(99)] == [f"req-{n}" for n in range(12, 7, -1)]
    store.write([record(number) for number in range(20, 40)], ORIGIN)
    assert [r.request_id for r in store.newest(99)] == [f"req-{n}" for n in range(39, 34, -1)]
    store.close()


def test_bytes_are_bounded(tmp_path: Path) -> None:
    store = RecordStore(tmp_path, max_bytes=100_000)
    for number in range(200):
        store.write([record(number, prompt_ids=list(range(1000)))], ORIGIN)
    kept = list(store.newest(999))
    assert 20 <= len(kept) <= 25  # 4 kB each
    assert [r.request_id for r in kept] == [f"req-{n}" for n in range(199, 199 - len(kept), -1)]
    # One that alone is too large is not kept either.
    store.write([record(500, prompt_ids=list(range(30_000)))], ORIGIN)
    assert list(store.newest(9)) == []
    store.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2_000_000


def test_origins_go_with_their_last_request(tmp_path: Path) -> None:
    store = RecordStore(tmp_path, limit=2)
    for number in range(6):
        origin = replace(ORIGIN, model=f"m{number // 2}")
        store.write([record(number)], origin)
    assert [r.origin and r.origin.model for r in store.newest(9)] == ["m2", "m2"]
    with sqlite3.connect(tmp_path / FILE) as db:
        assert db.execute("SELECT count(*) FROM origins").fetchone() == (1,)
    store.close()


def test_two_that_write_one_directory(tmp_path: Path) -> None:
    """Each in a process of its own; nothing is lost, and ids stay apart."""
    program = (
        "import sys\nfrom pathlib import Path\n"
        f"sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        "from test_recorder import *\n"
        "store = RecordStore(Path(sys.argv[1]), limit=1000)\n"
        "for i in range(60):\n"
        "    store.write([record(i, request_id=f'{sys.argv[2]}-{i}')], ORIGIN)\n"
        "store.close()\n"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path), name], stderr=-1)
        for name in ("a", "b")
    ]
    for process in both:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    store = RecordStore(tmp_path, read_only=True)
    ids = {r.request_id for r in store.newest(1000)}
    assert ids == {f"{name}-{i}" for name in "ab" for i in range(60)}
    store.close()


def test_a_process_that_is_killed_leaves_a_file_that_opens(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\n"
        f"sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        "from test_recorder import *\n"
        "store = RecordStore(Path(sys.argv[1]))\n"
        "for i in range(10**9):\n"
        "    store.write([record(i)], ORIGIN)\n"
        "    print(i, flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while (line := process.stdout.readline()) and int(line) < 20:
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    store = RecordStore(tmp_path)
    newest = store.get("last")
    assert newest is not None
    assert int(newest.request_id.removeprefix("req-")) >= 20
    store.write([record(10**6)], ORIGIN)
    store.close()


# ------------------------------------------------------------------------------------ strangers


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("prompt_ids", b"abc"),
        ("prompt_ids", "text"),
        ("prompt_ids", array("i", [-1]).tobytes()),
        ("output_ids", array("i", [1]).tobytes()),
        ("output_ids", array("i", [1] * 4).tobytes()),
        ("times", b""),
        ("times", array("d", [1, 2, 3, math.nan]).tobytes()),
        ("finished_at", math.inf),
        ("finished_at", "soon"),
        ("finished_at", -1.0),
        ("finished_at", 1e300),
        ("prompt", b"5"),
        ("request_id", b"\xff"),
        ("body", "{"),
        ("body", "[]"),
        ("body", "{}"),
        ("body", "[" * 100_000),
        ("origin", 99),
    ],
)
def test_damaged_rows_are_errors_that_say_so(
    store: RecordStore, db: sqlite3.Connection, column: str, value: Any
) -> None:
    with db:
        db.execute(f"UPDATE requests SET {column} = ?", [value])
    with pytest.raises(RecordError, match="is damaged"):
        store.get("last")
    with pytest.raises(RecordError, match="is damaged"):
        list(store.newest(5))


@pytest.mark.parametrize(
    "change",
    [
        {"params": {"temperature": -1}},
        {"params": {"no_such": 1}},
        {"params": []},
        {"origin": {"temperature": "nobody"}},
        {"max_tokens": -1},
        {"max_tokens": True},
        {"max_tokens": 2**40},
        {"num_cached_tokens": "1"},
        {"samples": []},
        {"samples": [[0, 3, "length", None]]},
        {"samples": [[0, 3, "because", None, None]]},
        {"samples": [[0, 3, "stop", [], None]]},
        {"samples": [[0, 3, "stop", None, 5]]},
        {"samples": [[0, 2, "stop", None, None]]},
    ],
)
def test_damaged_bodies_are_errors_that_say_so(
    store: RecordStore, db: sqlite3.Connection, change: dict[str, Any]
) -> None:
    (body,) = db.execute("SELECT body FROM requests").fetchone()
    with db:
        db.execute("UPDATE requests SET body = ?", [json.dumps(json.loads(body) | change)])
    with pytest.raises(RecordError, match="is damaged"):
        store.get("last")


def test_what_is_no_record_file(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no requests were recorded"):
        RecordStore(tmp_path, read_only=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot be recorded"):
        RecordStore(tmp_path / "file" / "below")
    with pytest.raises(RecordError, match="cannot be recorded"):
        RecordStore(tmp_path / "file")
    other = tmp_path / "other"
    other.mkdir()
    (other / FILE).write_bytes(b"no database at all, but long enough to be looked at " * 20)
    with pytest.raises(RecordError, match="not a database"):
        RecordStore(other)


def test_the_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("CREATE TABLE requests (a)")
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(RecordError, match="another program"):
        RecordStore(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT count(*) FROM c"


@pytest.mark.parametrize(
    "script",
    [
        "CREATE VIEW more AS SELECT 1",
        "CREATE TABLE more (a)",
        "CREATE INDEX more ON requests (prompt)",
        f"CREATE TRIGGER more AFTER INSERT ON requests BEGIN SELECT ({ENDLESS}); END",
        "CREATE TRIGGER requests AFTER INSERT ON origins BEGIN DELETE FROM requests; END",
        f"ALTER TABLE requests RENAME TO r; CREATE VIEW requests AS SELECT *, ({ENDLESS}) FROM r",
        "DROP TABLE origins; CREATE VIEW origins AS SELECT 1 AS id, '{}' AS body",
        "ALTER TABLE requests ADD COLUMN more AS (prompt || prompt)",
    ],
)
@pytest.mark.parametrize("read_only", [True, False])
def test_nothing_in_the_file_is_run(
    store: RecordStore, db: sqlite3.Connection, tmp_path: Path, script: str, read_only: bool
) -> None:
    """Neither for its reader nor for who would go on writing it."""
    db.executescript(script)
    with pytest.raises(RecordError, match="something else than records"):
        RecordStore(tmp_path / "records", read_only=read_only)


def test_a_newer_format_is_refused(store: RecordStore, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "records" / FILE) as db:
        db.execute("PRAGMA user_version = 2")
    with pytest.raises(RecordError, match="format 2, this version reads 1"):
        RecordStore(tmp_path / "records")


# ------------------------------------------------------------------------------------ the engine


def test_what_was_served_is_kept(models: Models, llama_dir: Path, tmp_path: Path) -> None:
    llm = LLM(llama_dir, threads=1, max_model_len=96, record=tmp_path)
    outputs = llm.generate(["the dog", "fox"], n=2, seed=3, temperature=1, max_tokens=6)
    ids = [output.request_id for output in outputs]
    for get in (llm.recorder.get, _from_file(llm, tmp_path)):
        for output in outputs:
            found = get(output.request_id)
            assert found.prompt == output.prompt
            assert list(found.prompt_ids) == output.prompt_token_ids
            assert found.params == output.params
            assert [
                (s.number, list(s.token_ids), s.finish_reason, s.stop_reason) for s in found.samples
            ] == [(o.index, o.token_ids, o.finish_reason, o.stop_reason) for o in output.outputs]
            assert abs(found.finished_at - time.time()) < 60
            assert found.origin is not None
            assert found.origin.path == str(llama_dir)
            assert found.origin.settings["kv_cache_dtype"] == "f32"
        assert get("last").request_id in ids
    assert len(set(ids)) == 2


def _from_file(llm: LLM, folder: Path) -> Any:
    llm.recorder.flush()
    return RecordStore(folder, read_only=True).get


def test_all_ways_to_end_are_kept(says: Any, rig: Rig) -> None:
    llm = says("ab", "<|end|>", nan_after=ord("N"))
    stopped = llm.generate(prompt(1), temperature=0)[0]
    broken = llm.generate(prompt(ord("N")), temperature=0)[0]
    with llm.stream(prompt(1), temperature=0) as stream:
        next(stream)
    aborted = stream.output()
    never = llm.stream(prompt(1), temperature=0)
    never.close()
    found = [llm.recorder.get(o.request_id).sample(0) for o in (stopped, broken, aborted)]
    assert [sample.finish_reason for sample in found] == ["stop", "error", "abort"]
    assert found[0].stop_reason == rig.id("<|end|>")
    assert "nan" in (found[1].error or "")
    assert list(found[2].token_ids) == [ord("a")]
    with pytest.raises(RecordError, match="recorded"):  # it never ran
        llm.recorder.get(never.output().request_id)


def test_a_trace_is_no_request_that_was_served(llm: LLM) -> None:
    before = llm.recorder.get("last") if len(llm.recorder) else None
    trace = llm.trace("dog", max_tokens=1)
    with pytest.raises(RecordError):
        llm.recorder.get(trace.output.request_id)
    assert (llm.recorder.get("last") if len(llm.recorder) else None) == before


def test_memory_keeps_the_last(llama_dir: Path) -> None:
    llm = LLM(llama_dir, threads=1, max_model_len=96, record_limit=3)
    outputs = llm.generate(["dog"] * 8, **GREEDY)
    assert len(llm.recorder) == 3
    with pytest.raises(RecordError, match="3 of this engine are in memory"):
        llm.recorder.get(outputs[0].request_id)
    none = LLM(llama_dir, threads=1, max_model_len=96, record_limit=0)
    none.generate("dog", **GREEDY)
    assert len(none.recorder) == 0
    tight = LLM(llama_dir, threads=1, max_model_len=96, record_bytes=10_000)
    tight.generate(["dog"] * 20, **GREEDY)
    assert 1 <= len(tight.recorder) <= 4


@pytest.mark.parametrize("setting", ["record_limit", "record_bytes"])
@pytest.mark.parametrize("value", [-1, 1.5, True, "9"])
def test_bounds_that_are_none(llama_dir: Path, setting: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=setting):
        LLM(llama_dir, **{setting: value})


def test_a_record_without_a_place_or_room(llama_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="record="):
        LLM(llama_dir, record="")
    with pytest.raises(ParameterError, match="record_limit"):
        LLM(llama_dir, record=tmp_path, record_limit=0)


def test_records_that_cannot_be_written_disturb_no_request(
    llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(llama_dir, threads=1, max_model_len=96, record=tmp_path)
    monkeypatch.setattr(recorder_module, "WRITE_AFTER", 1)
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("DROP TABLE requests")
    output = llm.generate("dog", **GREEDY)[0]
    assert output.outputs[0].finish_reason == "length"
    llm.recorder.flush()
    assert "no such table" in (llm.recorder.problem or "")
    assert llm.recorder.get("last").request_id == output.request_id  # memory has it


def test_a_store_that_makes_wait_holds_up_no_request(
    llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else has locked the file, or a large model is hashed for the first record."""
    llm = LLM(llama_dir, threads=1, max_model_len=96, record=tmp_path)
    monkeypatch.setattr(recorder_module, "WRITE_AFTER", 1)
    free, entered, write = Event(), Event(), RecordStore.write

    def slow(*given: Any) -> None:
        entered.set()
        assert free.wait(60)
        write(*given)

    monkeypatch.setattr(RecordStore, "write", slow)
    first = llm.generate("dog", **GREEDY)[0]
    assert entered.wait(60)
    more = llm.generate(["fox"] * 5, **GREEDY)
    assert not free.is_set()
    free.set()
    llm.recorder.flush()
    assert llm.recorder.problem is None
    kept = {found.request_id for found in RecordStore(tmp_path, read_only=True).newest(9)}
    assert kept == {output.request_id for output in (first, *more)}


def test_rows_keep_their_order_whoever_writes_them(
    llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(llama_dir, threads=1, max_model_len=96, record=tmp_path)
    monkeypatch.setattr(recorder_module, "WRITE_AFTER", 2)
    done = Event()

    def flush() -> None:
        while not done.is_set():
            llm.recorder.flush()

    others = [Thread(target=flush) for _ in range(2)]
    for other in others:
        other.start()
    outputs = llm.generate(["dog"] * 150, temperature=1, max_tokens=1)
    done.set()
    for other in others:
        other.join()
    llm.recorder.flush()
    assert llm.recorder.problem is None
    found = list(RecordStore(tmp_path, read_only=True).newest(500))
    assert {r.request_id for r in found} == {output.request_id for output in outputs}
    times = [r.finished_at for r in found]
    assert times == sorted(times, reverse=True)


# Text that no file can hold, wherever a caller could put it.
LONE = "a\ud800"
NO_TEXT: dict[str, dict[str, Any]] = {
    "prompt": {"prompts": LONE},
    "text beside ids": {"prompts": {"prompt": LONE, "prompt_token_ids": [1, 2]}},
    "stop": {"prompts": "a", "stop": LONE},
    "bad_words": {"prompts": "a", "bad_words": [LONE]},
}


@pytest.mark.parametrize("request_", NO_TEXT.values(), ids=NO_TEXT)
def test_what_no_file_can_hold_is_refused_before_it_runs(
    request_: dict[str, Any], llama_dir: Path, tmp_path: Path
) -> None:
    llm = LLM(llama_dir, record=tmp_path / "records")
    with pytest.raises(SeethroughError, match="lone surrogate"):
        llm.generate(**request_, **GREEDY)
    llm.generate("a", **GREEDY)
    llm.rest()
    assert llm.recorder.problem is None
    assert len(llm.recorder) == 1


def test_what_is_pending_is_written_when_the_program_ends(llama_dir: Path, tmp_path: Path) -> None:
    program = (
        "from seethrough import LLM\n"
        f"llm = LLM({str(llama_dir)!r}, threads=1, max_model_len=96, record={str(tmp_path)!r})\n"
        "print(llm.generate('dog', max_tokens=2)[0].request_id)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=90
    )
    assert ran.returncode == 0, ran.stderr
    store = RecordStore(tmp_path, read_only=True)
    newest = store.get("last")
    assert newest is not None
    assert newest.request_id == ran.stdout.strip()
    store.close()


def test_nothing_is_done_per_token(llama_dir: Path) -> None:
    """Calls into the recorder's modules, counted: as many for 1 token as for 80."""
    llm = LLM(llama_dir, threads=1, max_model_len=128)
    names = ("recorder.py", "record_rows.py", "record_store.py", "fingerprint.py")
    counts: list[int] = []

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and os.path.basename(frame.f_code.co_filename) in names:
            counts[-1] += 1

    for length in (1, 80):
        counts.append(0)
        sys.setprofile(count)
        try:
            llm.generate("dog", temperature=0, max_tokens=length, ignore_eos=True)
        finally:
            sys.setprofile(None)
    assert counts[0] == counts[1] > 0


# ------------------------------------------------------------------------------------ fingerprints


def identity(path: Path, hashes: Path) -> Identity:
    found = path.stat()
    return Identity({path: (found.st_size, found.st_mtime_ns)}, "cpu", "avx512", "f16", hashes)


def test_a_fingerprint_names_the_part_that_changed() -> None:
    one = Fingerprint("a", {"sources": "1", "cpu_path": "avx512"})
    assert one.changed(one) == []
    assert one.changed(Fingerprint("b", one.arithmetic)) == ["model"]
    assert one.changed(Fingerprint("a", {"sources": "2", "backend": "cpu"})) == [
        "backend",
        "cpu_path",
        "sources",
    ]


def test_the_model_part_is_its_content(tmp_path: Path) -> None:
    path, hashes = tmp_path / "m.gguf", tmp_path / "hashes.json"
    path.write_bytes(b"weights")
    first = identity(path, hashes).fingerprint()
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "m.gguf").write_bytes(b"weights")
    assert identity(other / "m.gguf", hashes).fingerprint() == first
    path.write_bytes(b"weighty")
    os.utime(path, ns=(1, 1))
    assert identity(path, hashes).fingerprint().changed(first) == ["model"]


def test_a_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, hashes = tmp_path / "m.gguf", tmp_path / "hashes.json"
    path.write_bytes(b"weights")
    first = identity(path, hashes).fingerprint()
    with monkeypatch.context() as patch:
        patch.setattr("seethrough.engine.fingerprint._file_hash", lambda _: 1 / 0)
        assert identity(path, hashes).fingerprint() == first
    for damage in ("", "[]", "{", json.dumps({str(path): [1, 2]}), "[" * 99_999):
        hashes.write_text(damage)
        assert identity(path, hashes).fingerprint() == first
    hashes.unlink()
    hashes.mkdir()  # nothing can be kept there
    assert identity(path, hashes).fingerprint() == first


def test_a_file_that_was_changed_while_it_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"weights")
    loaded = identity(path, tmp_path / "hashes.json")
    path.write_bytes(b"other weights")
    assert loaded.fingerprint().model == "m.gguf was changed after it was loaded"


def test_every_file_that_decides_counts(llama_dir: Path, tmp_path: Path) -> None:
    import shutil

    def model_part(folder: Path) -> str:
        llm = LLM(folder, threads=1, max_model_len=32)
        return llm.recorder.provenance.origin.fingerprint.model

    copy = tmp_path / "copy"
    shutil.copytree(llama_dir, copy)
    assert model_part(copy) == model_part(llama_dir)
    (copy / "generation_config.json").write_text('{"temperature": 0.5}')
    assert model_part(copy) != model_part(llama_dir)


def test_a_start_reads_no_model_twice(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never on the way to the first token: only a record that is written or read asks for it."""
    monkeypatch.setattr("seethrough.engine.fingerprint.Identity.fingerprint", lambda _: 1 / 0)
    llm = LLM(llama_dir, threads=1, max_model_len=32)
    assert llm.generate("dog", max_tokens=2)[0].finished
    with pytest.raises(ZeroDivisionError):
        llm.recorder.get("last")
