"""What the flight recorder costs: processor time per finished request, in memory and on disk.

    bench/recorder.py

The requests are made up, so that nothing but the recorder runs; the time is that of the process,
all threads and the system's part for the file included. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from seethrough.engine.fingerprint import Identity
from seethrough.engine.jobs import Job
from seethrough.engine.record_store import RecordStore
from seethrough.engine.recorder import Provenance, Recorder
from seethrough.engine.request import Request, Times
from seethrough.kv.pool import BlockTable
from seethrough.sampling.bans import prepare_bans
from seethrough.sampling.params import SamplingParams, resolve


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    parser.add_argument("--output", type=int, default=64, help="output tokens")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    found = {}
    for place in ("memory", "disk"):
        rounds = [_microseconds(asked, place == "disk") for _ in range(asked.rounds)]
        found[f"{place}_us"] = round(statistics.median(rounds), 2)
        print(
            f"{place}: {statistics.median(rounds):.1f} µs a request "
            f"({min(rounds):.1f}–{max(rounds):.1f}), {asked.prompt} + {asked.output} tokens"
        )
    print(json.dumps({**vars(asked), **found}))


def _microseconds(asked: argparse.Namespace, disk: bool) -> float:
    jobs = [_job(i, asked.prompt, asked.output) for i in range(asked.requests)]
    identity = Identity({}, "cpu", "avx512", "f16")
    provenance = Provenance(identity, "model", "/model.gguf", {"backend": "cpu"})
    assert provenance.origin  # once per engine, not per request
    with tempfile.TemporaryDirectory() as folder:
        store = RecordStore(Path(folder)) if disk else None
        recorder = Recorder(provenance, store=store)
        started = time.process_time()
        for job in jobs:
            recorder.finished(job)
        recorder.flush()
        seconds = time.process_time() - started
        assert recorder.problem is None
        recorder.close()
    return seconds / asked.requests * 1e6


def _job(number: int, prompt: int, output: int) -> Job:
    asked = SamplingParams(temperature=0.7, top_p=0.9, seed=number, max_tokens=output)
    params = resolve(asked, None, {}, lambda: 0)
    nothing: Any = None  # neither blocks nor text are looked at
    times = Times(1.0, 1.1, [1.2 + 0.01 * i for i in range(output)])
    job = Job(f"req-{number}", "a prompt " * (prompt // 2))
    job.requests.append(
        Request(
            request_id=job.request_id,
            prompt_ids=[(number * 7919 + i) % 49152 for i in range(prompt)],
            params=params,
            bans=prepare_bans(params, frozenset(), 49152, lambda _: []),
            end_ids=frozenset(),
            max_tokens=output,
            table=BlockTable(nothing),
            text=nothing,
            times=times,
            output_ids=[(number * 104729 + i) % 49152 for i in range(output)],
            finish_reason="length",
        )
    )
    return job


if __name__ == "__main__":
    main()
