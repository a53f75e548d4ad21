"""`seethrough replay`: a recorded request again: checked, shown at any stage, or done otherwise."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from seethrough.cli.loading import load_llm, report_errors
from seethrough.cli.messages import Speaker
from seethrough.cli.replay_view import print_side_by_side, verdict
from seethrough.cli.table import print_table
from seethrough.cli.terminal import print_json
from seethrough.cli.trace import check_selection, keep, selection, show
from seethrough.config import CPU_PATHS
from seethrough.errors import ParameterError, RecordError
from seethrough.sampling.params import SamplingParams

if TYPE_CHECKING:
    from seethrough.engine.record_store import RecordStore
    from seethrough.engine.recorder import Origin, Recorded
    from seethrough.llm import LLM

_MOST_LISTED = 256
_GLANCE = 48  # characters of a prompt
_SETTINGS = ("backend", "kv_cache_dtype", "max_model_len")


def run(arguments: argparse.Namespace, speaker: Speaker) -> int:
    """Find the record, load its model as it was loaded then, run it, and show what was asked."""
    from seethrough.engine.record_store import RecordStore

    if arguments.record is None:
        raise ParameterError("--record", "", speaker.text("replay_where"))
    check_selection(arguments)
    asked = SamplingParams.from_dict(dict(arguments.set or ()))
    store = RecordStore(arguments.record, read_only=True)
    try:
        if arguments.request == "list":
            return _list(store, arguments, speaker)
        recorded = _find(store, arguments.request or "last")
    finally:
        store.close()
    return _replay(_load(recorded, arguments, speaker), recorded, asked, arguments, speaker)


def _replay(
    llm: LLM,
    recorded: Recorded,
    asked: SamplingParams,
    arguments: argparse.Namespace,
    speaker: Speaker,
) -> int:
    forced = dict(arguments.force or ())
    otherwise = bool(arguments.set or arguments.force)
    looks = not arguments.check and (not otherwise or arguments.stage or arguments.out)
    seen = selection(arguments) if looks else {"stages": []}
    replay = llm.replay(recorded, asked, sample=arguments.sample or 0, forced=forced, **seen)
    failed = bool(arguments.check) and not replay.identical
    if arguments.json:
        print_json(replay.to_dict())
    elif arguments.check:
        print("\n".join(verdict(replay, llm.tokenizer, speaker)))
    else:
        if otherwise:
            print_side_by_side(replay, llm.tokenizer, speaker)
        elif not speaker.quiet:
            print("\n".join(verdict(replay, llm.tokenizer, speaker)), file=sys.stderr)
        if looks:
            show(replay.trace, arguments, speaker)
    keep(replay.trace, arguments, speaker)
    count = len(replay.output.token_ids)
    if any(index >= count for index in forced):
        speaker.complain("replay_not_forced", index=max(forced), count=count)
    if replay.sample.error is None:  # an error that was recorded is what a replay shall give
        failed |= bool(report_errors(replay.trace.output, speaker))
    return int(failed)


def _find(store: RecordStore, request_id: str) -> Recorded:
    found = store.get(request_id)
    if found is None:
        raise RecordError(f"no request {request_id!r} is recorded; `replay list` shows what is")
    return found


def _load(recorded: Recorded, arguments: argparse.Namespace, speaker: Speaker) -> LLM:
    """The recorded model with the recorded settings, where no flag says otherwise."""
    origin = recorded.origin
    if origin is not None:
        arguments.model = arguments.model or _model(origin, speaker)
        for name in _SETTINGS:
            if getattr(arguments, name) is None:
                setattr(arguments, name, origin.settings.get(name))
        if arguments.cpu_path is None:
            arguments.cpu_path = _possible(origin.settings.get("cpu_path"), speaker)
    arguments.record = None  # what is looked at here is not a request that was served
    return load_llm(arguments, speaker)


def _model(origin: Origin, speaker: Speaker) -> str:
    if os.path.exists(origin.path):
        return origin.path
    speaker.complain("replay_model_moved", path=origin.path, name=origin.model)
    return origin.model


def _possible(path: Any, speaker: Speaker) -> Any:
    """The recorded processor path; None, which chooses the best, where this processor lacks it."""
    if path not in CPU_PATHS:
        return path
    from seethrough.kernels.cpu.path import lacking, processor_flags

    missing = lacking(path, processor_flags())
    if not missing:
        return path
    speaker.complain("replay_path_lacks", path=path, flags=", ".join(missing))
    return None


def _list(store: RecordStore, arguments: argparse.Namespace, speaker: Speaker) -> int:
    """What is recorded, newest first."""
    lines = [_line(recorded) for recorded in store.newest(_MOST_LISTED)]
    if arguments.json:
        print_json(lines)
    elif not lines:
        speaker.complain("replay_none", path=arguments.record)
    else:
        rows = [[str(value) for value in line.values()] for line in lines]
        print_table(speaker.text("replay_list_columns").split("|"), rows)
    return 0


def _line(recorded: Recorded) -> dict[str, Any]:
    origin, prompt = recorded.origin, " ".join((recorded.prompt or "").split())
    return {
        "id": recorded.request_id,
        "finished": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(recorded.finished_at)),
        "model": "–" if origin is None else origin.model,
        "prompt_tokens": len(recorded.prompt_ids),
        "output_tokens": sum(len(sample.token_ids) for sample in recorded.samples),
        "finish_reason": ", ".join(sample.finish_reason for sample in recorded.samples),
        "prompt": prompt if len(prompt) <= _GLANCE else prompt[: _GLANCE - 1] + "…",
    }
