"""The flight recorder: the last requests that were served, as little as replays them to the bit.

Nothing is noted while a request runs. When it is finished, what it was and what it gave is kept as
it lies there; rows are made and written later, many at a time.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any, NamedTuple, Protocol

from seethrough.engine.fingerprint import Fingerprint, Identity
from seethrough.engine.jobs import Job
from seethrough.engine.load import Loaded
from seethrough.engine.request import FinishReason, Request
from seethrough.errors import RecordError
from seethrough.sampling.params import EffectiveParams

DEFAULT_REQUESTS = 256
DEFAULT_BYTES = 64 * 1024 * 1024
WRITE_AFTER = 128  # requests
WRITE_EVERY = 1.0  # seconds, where requests still come
_ID_BYTES = 36  # of a Python integer in a list


@dataclass(frozen=True, slots=True)
class Origin:
    """What a request ran on. `settings` are those of the engine that can matter for its bits."""

    model: str
    path: str
    settings: Mapping[str, Any]
    fingerprint: Fingerprint


class RecordedSample(NamedTuple):
    """What one sample gave.

    Attributes:
        number: its index among the request's samples.
        error: the message of the error that ended it.
        times: seconds on a clock of its own, when the prompt arrived, was first computed, and gave
            its first and its last token; 0 is never.
    """

    number: int
    token_ids: Sequence[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    error: str | None
    times: tuple[float, float, float, float]


class Recorded(NamedTuple):
    """One finished request.

    Attributes:
        finished_at: seconds since 1970.
        max_tokens: the output limit as it was decided.
        origin: what it ran on; None until somebody asks, since hashing a model takes a while.
    """

    request_id: str
    finished_at: float
    prompt: str | None
    prompt_ids: Sequence[int]
    params: EffectiveParams
    max_tokens: int
    num_cached_tokens: int
    samples: tuple[RecordedSample, ...]
    origin: Origin | None = None

    def sample(self, index: int) -> RecordedSample:
        """The sample of this index.

        Raises:
            RecordError: there is none.
        """
        for sample in self.samples:
            if sample.number == index:
                return sample
        known = ", ".join(str(sample.number) for sample in self.samples)
        raise RecordError(f"request {self.request_id} has no sample {index}; it has {known}")

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        ids = len(self.prompt_ids) + sum([len(sample.token_ids) for sample in self.samples])
        return 2000 + _ID_BYTES * ids + 4 * len(self.prompt or "")


class Store(Protocol):
    """Where records outlive the process."""

    def write(self, requests: Sequence[Recorded], origin: Origin) -> None:
        """Add requests of one origin, oldest first, and drop what exceeds the bounds."""
        ...

    def get(self, request_id: str) -> Recorded | None:
        """The record of this id, or the newest for `last`."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...


class Provenance:
    """The origin of an engine's requests; its fingerprint is taken when it is first asked for."""

    def __init__(
        self, identity: Identity, model: str, path: str, settings: Mapping[str, Any]
    ) -> None:
        self._identity = identity
        self._about = model, path, settings
        self._origin: Origin | None = None

    @classmethod
    def of(cls, loaded: Loaded, model: str) -> Provenance:
        """What requests of a loaded model run on; `model` is what the caller named it."""
        report, files = loaded.report, loaded.files
        settings = {
            "backend": report.backend,
            "cpu_path": report.cpu_path,
            "kv_cache_dtype": report.kv_dtype,
            "max_model_len": report.max_model_len,
        }
        identity = Identity.of(
            files,
            backend=report.backend,
            cpu_path=report.cpu_path,
            kv_dtype=report.kv_dtype,
        )
        path = files.weights[0] if files.format == "gguf" else files.root
        return cls(identity, model, str(path.resolve()), settings)

    @property
    def origin(self) -> Origin:
        """See the class.

        Raises:
            OSError: a model file cannot be read any more.
        """
        if self._origin is None:
            self._origin = Origin(*self._about, self._identity.fingerprint())
        return self._origin


class Recorder:
    """Keeps the last finished requests in memory, and in a store if there is one.

    Args:
        limit: most requests that are kept in memory; 0 keeps none.
        max_bytes: most bytes that they may take there.
    """

    def __init__(
        self,
        provenance: Provenance,
        *,
        limit: int = DEFAULT_REQUESTS,
        max_bytes: int = DEFAULT_BYTES,
        store: Store | None = None,
    ) -> None:
        self.provenance = provenance
        self._limit = limit
        self._max_bytes = max_bytes
        self._kept: deque[Recorded] = deque()
        self._bytes = 0
        self._writer = None if store is None else _Writer(store, provenance)
        if self._writer is not None:
            # Also when nobody closes it: at the latest when the interpreter ends.
            self._end = weakref.finalize(self, self._writer.close)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def stores(self) -> bool:
        """Whether records outlive the process."""
        return self._writer is not None

    @property
    def problem(self) -> str | None:
        """Why requests could not be written; None where all were."""
        return None if self._writer is None else self._writer.problem

    def finished(self, job: Job) -> None:
        """Keep a request that has ended; it is not to change any more."""
        finished = _finished(job)
        if self._writer is not None:
            self._writer.add(finished)
        self._kept.append(finished)
        self._bytes += finished.nbytes
        while self._kept and (len(self._kept) > self._limit or self._bytes > self._max_bytes):
            self._bytes -= self._kept.popleft().nbytes

    def get(self, request_id: str) -> Recorded:
        """The record of a request, from memory or the store; `last` is the newest of this engine.

        Raises:
            RecordError: there is none.
        """
        for finished in reversed(self._kept):
            if request_id in ("last", finished.request_id):
                return finished._replace(origin=self.provenance.origin)
        if self._writer is not None:
            found = self._writer.get(request_id)
            if found is not None:
                return found
        raise RecordError(
            f"no request {request_id!r} is recorded; {len(self._kept)} of this engine are in memory"
        )

    def flush(self) -> None:
        """Write what is not written yet."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write the rest, and let go of the store; safe to call twice."""
        if self._writer is not None:
            self._end()


class _Writer:
    """Gathers finished requests and writes many at a time; any thread may call it.

    The thread that adds never waits: a store may be locked by somebody else for seconds, and the
    first write reads the whole model for its fingerprint.
    """

    def __init__(self, store: Store, provenance: Provenance) -> None:
        self._store = store
        self._provenance = provenance
        self._pending: deque[Recorded] = deque()
        self._written_at = time.monotonic()
        self._writing = Lock()  # held by whoever uses the store
        self._thread: Thread | None = None
        self.problem: str | None = None

    def add(self, finished: Recorded) -> None:
        """Keep one for later; start to write where enough have come, or time has passed."""
        self._pending.append(finished)
        now = time.monotonic()
        if len(self._pending) < WRITE_AFTER and now - self._written_at <= WRITE_EVERY:
            return
        if self._thread is None or not self._thread.is_alive():
            self._written_at = now
            self._thread = Thread(target=self.flush, name="seethrough-recorder")
            self._thread.start()

    def flush(self) -> None:
        """Write what is there; returns when it is written."""
        with self._writing:
            self._write()

    def get(self, request_id: str) -> Recorded | None:
        """What the store has, once all is written."""
        with self._writing:
            self._write()
            return self._store.get(request_id)

    def close(self) -> None:
        """Write what is there, and let go of the store."""
        with self._writing:
            self._write()
            self._store.close()

    def _write(self) -> None:
        pending = [self._pending.popleft() for _ in range(len(self._pending))]
        if not pending:
            return
        try:
            self._store.write(pending, self._provenance.origin)
        except (RecordError, OSError) as error:  # the user is told, the requests go on
            self.problem = str(error)


def _finished(job: Job) -> Recorded:
    first = job.requests[0]
    return Recorded(
        job.request_id,
        time.time(),
        job.prompt,
        first.prompt_ids,
        first.params,
        first.max_tokens,
        first.num_cached_tokens,
        tuple([_sample(request) for request in job.requests]),
    )


def _sample(request: Request) -> RecordedSample:
    times, error = request.times, request.error
    first, last = (times.tokens[0], times.tokens[-1]) if times.tokens else (0.0, 0.0)
    return RecordedSample(
        request.sample_index,
        request.output_ids,
        request.finish_reason or "abort",
        request.stop_reason,
        None if error is None else str(error),
        (times.arrival, times.first_scheduled, first, last),
    )
