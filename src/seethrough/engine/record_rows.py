"""A recorded request as the values of one row, and back; what is read is checked, whoever wrote it.

A row holds of the parameters only what is not the engine's default: most fields are, and a row is
written for every request. The defaults of the time stand with the origin, which many rows share.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any, TypeVar

from seethrough.engine.fingerprint import Fingerprint
from seethrough.engine.recorder import Origin, Recorded, RecordedSample
from seethrough.errors import ParameterError, RecordError
from seethrough.sampling.params import EffectiveParams, SamplingParams, resolve

T = TypeVar("T")

_DEFAULTS = resolve(SamplingParams(), None, {}, lambda: 0)
_NAMES = tuple(_DEFAULTS.origin)
_get = attrgetter(*_NAMES)
_VALUES = _get(_DEFAULTS)
_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
_YEAR_10000 = 253_402_300_800  # seconds since 1970; no calendar here goes on
_REASONS = ("stop", "length", "abort", "error")


def to_row(recorded: Recorded, origin: int) -> tuple[Any, ...]:
    """Values of request_id, finished_at, origin, prompt, prompt_ids, body, times, output_ids,
    bytes.
    """
    prompt_ids = array("i", recorded.prompt_ids).tobytes()
    output_ids = b"".join([array("i", s.token_ids).tobytes() for s in recorded.samples])
    times = array("d", [t for sample in recorded.samples for t in sample.times]).tobytes()
    body, prompt = _body(recorded), recorded.prompt
    size = len(prompt_ids) + len(output_ids) + len(body) + len(times) + 4 * len(prompt or "")
    fixed = (recorded.request_id, recorded.finished_at, origin)
    return (*fixed, prompt, prompt_ids, body, times, output_ids, size)


def from_row(row: Sequence[Any]) -> Recorded:
    """A record from request_id, finished_at, prompt, prompt_ids, body, times, output_ids, and the
    text of its origin.

    Raises:
        RecordError: a value is missing, of the wrong type or out of range.
    """
    try:
        return _record(*row)
    except (ValueError, TypeError, KeyError, RecursionError, ParameterError) as error:
        why = f"{type(error).__name__}: {error}"
        shown = ascii(row[0])[:80]
        raise RecordError(f"the record of request {shown} is damaged: {why[:300]}") from None


def origin_text(origin: Origin) -> str:
    """The origin, with today's defaults, as JSON; equal origins have equal texts."""
    defaults = {k: v for k, v in _DEFAULTS.to_dict().items() if k not in ("origin", "seed")}
    return json.dumps(asdict(origin) | {"defaults": defaults}, sort_keys=True)


# ---------------------------------------------------------------------- writing


def _body(recorded: Recorded) -> str:
    params = recorded.params
    values = {n: v for n, v, d in zip(_NAMES, _get(params), _VALUES, strict=True) if v != d}
    values["seed"] = params.seed
    body = {
        "params": values,
        "origin": {name: who for name, who in params.origin.items() if who != "engine"},
        "max_tokens": recorded.max_tokens,
        "num_cached_tokens": recorded.num_cached_tokens,
        "samples": [
            (number, len(ids), reason, stop, error)
            for number, ids, reason, stop, error, _ in recorded.samples
        ],
    }
    return _encode(body)


# ---------------------------------------------------------------------- reading


def _record(
    request_id: Any,
    finished_at: Any,
    prompt: Any,
    prompt_ids: Any,
    body: Any,
    times: Any,
    output_ids: Any,
    origin: Any,
) -> Recorded:
    about, held = _of(json.loads(origin), dict), _of(json.loads(body), dict)
    who = dict.fromkeys(_NAMES, "engine") | _of(held["origin"], dict)
    params = _of(about["defaults"], dict) | _of(held["params"], dict) | {"origin": who}
    return Recorded(
        request_id=_of(request_id, str),
        finished_at=_date(finished_at),
        prompt=None if prompt is None else _of(prompt, str),
        prompt_ids=_ids(prompt_ids),
        params=EffectiveParams.from_dict(params),
        max_tokens=_count(held["max_tokens"]),
        num_cached_tokens=_count(held["num_cached_tokens"]),
        samples=_samples(_of(held["samples"], list), _times(times), _ids(output_ids)),
        origin=_origin(about),
    )


def _samples(
    given: list[Any], times: list[float], outputs: list[int]
) -> tuple[RecordedSample, ...]:
    samples: list[RecordedSample] = []
    start = 0
    for number, count, reason, stop_reason, error in given:
        stop = start + _count(count)
        if reason not in _REASONS:
            raise ValueError(f"{reason!r} is no reason to finish")
        if stop_reason is not None and not isinstance(stop_reason, (int, str)):
            raise TypeError("a stop reason is an id or a text")
        text = None if error is None else _of(error, str)
        arrival, started, first, last = times[4 * len(samples) : 4 * len(samples) + 4]
        ids, clock = outputs[start:stop], (arrival, started, first, last)
        samples.append(RecordedSample(_count(number), ids, reason, stop_reason, text, clock))
        start = stop
    if not samples or start != len(outputs):
        raise ValueError(f"{len(outputs)} output ids, but the samples have {start}")
    return tuple(samples)


def _origin(about: dict[str, Any]) -> Origin:
    print_of = _of(about["fingerprint"], dict)
    parts = _of(print_of["arithmetic"], dict)
    arithmetic = {_of(name, str): _of(value, str) for name, value in parts.items()}
    return Origin(
        model=_of(about["model"], str),
        path=_of(about["path"], str),
        settings=_of(about["settings"], dict),
        fingerprint=Fingerprint(_of(print_of["model"], str), arithmetic),
    )


def _ids(blob: Any) -> list[int]:
    ids = array("i", _of(blob, bytes)).tolist()
    if any(token_id < 0 for token_id in ids):
        raise ValueError("a token id is below 0")
    return ids


def _times(blob: Any) -> list[float]:
    return [_number(value) for value in array("d", _of(blob, bytes))]


def _of(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{kind.__name__} expected, not {type(value).__name__}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r:.40} is no finite number")
    return float(value)


def _date(value: Any) -> float:
    seconds = _number(value)
    if not 0 <= seconds < _YEAR_10000:
        raise ValueError(f"{seconds!r:.40} is no date")
    return seconds


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError(f"{value!r:.40} is no count")
    return value
