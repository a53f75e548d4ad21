"""Recorded requests in a directory: one SQLite file, bounded, that several processes may share.

Knows SQL; what stands in a row is `record_rows`'s. A file may come from a stranger: nothing in it
is run, and every value is checked when it is read.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from seethrough.engine.record_rows import from_row, origin_text, to_row
from seethrough.engine.recorder import DEFAULT_BYTES, DEFAULT_REQUESTS, Origin, Recorded
from seethrough.errors import RecordError

FILE = "requests.sqlite3"
_APPLICATION = 0x53545246  # in the file's header: whose it is
_VERSION = 1
_BUSY_MS = 5000
_PAGE = 32768  # several rows each: half the calls to the system of the usual 4096
_MOST_BYTES = 1 << 28  # of any value that is read
_TABLES = {
    "origins": "CREATE TABLE origins (id INTEGER PRIMARY KEY, body TEXT NOT NULL UNIQUE)",
    "requests": """CREATE TABLE requests (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    request_id TEXT NOT NULL,
    finished_at REAL NOT NULL,
    origin INTEGER NOT NULL REFERENCES origins (id),
    prompt TEXT,
    prompt_ids BLOB NOT NULL,
    body TEXT NOT NULL,
    times BLOB NOT NULL,
    output_ids BLOB NOT NULL,
    bytes INTEGER NOT NULL
)""",
}
_COLUMNS = "request_id, finished_at, prompt, prompt_ids, body, times, output_ids"
_SELECT = f"SELECT {_COLUMNS}, (SELECT body FROM origins WHERE id = origin) FROM requests"


class RecordStore:
    """The records of a directory.

    Args:
        limit: most requests that stay.
        max_bytes: most bytes that their values take.
        read_only: nothing is made or changed; it may lie where nobody can write.

    Raises:
        RecordError: the directory or file cannot be used; the message says why.
    """

    def __init__(
        self,
        directory: Path,
        *,
        limit: int = DEFAULT_REQUESTS,
        max_bytes: int = DEFAULT_BYTES,
        read_only: bool = False,
    ) -> None:
        self._path = directory / FILE
        self._limit = limit
        self._max_bytes = max_bytes
        self._origin: tuple[Origin, str] | None = None  # the last one, with its text
        if read_only:
            if not self._path.is_file():
                raise RecordError(f"no requests were recorded in {directory}: it has no {FILE}")
            self._db = _open_read_only(self._path)
            return
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Prompts are private: nobody else may read the file, nor those that SQLite puts beside.
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            raise RecordError(f"requests cannot be recorded in {directory}: {error}") from None
        self._db = _open(self._path)

    def write(self, requests: Sequence[Recorded], origin: Origin) -> None:
        """Add requests of one origin, oldest first, and drop what exceeds the bounds; all or none.

        Raises:
            RecordError: it cannot be written (locked, full, read-only).
        """
        with _said(self._path), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            number = self._number(origin)
            self._db.executemany(
                "INSERT INTO requests (request_id, finished_at, origin, prompt, prompt_ids, body,"
                " times, output_ids, bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [to_row(recorded, number) for recorded in requests],
            )
            self._drop()

    def get(self, request_id: str) -> Recorded | None:
        """The record of this id, or the newest for `last`; None where there is none.

        Raises:
            RecordError: it is damaged.
        """
        newest = f"{_SELECT} ORDER BY id DESC LIMIT 1"
        with _said(self._path):
            if request_id == "last":
                row = self._db.execute(newest).fetchone()
            else:
                row = self._db.execute(f"{_SELECT} WHERE request_id = ?", [request_id]).fetchone()
        return None if row is None else from_row(row)

    def newest(self, count: int) -> Iterator[Recorded]:
        """The newest ones, newest first, one at a time: each may be long.

        Raises:
            RecordError: one is damaged.
        """
        with _said(self._path):
            yield from map(
                from_row, self._db.execute(f"{_SELECT} ORDER BY id DESC LIMIT ?", [count])
            )

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def _number(self, origin: Origin) -> int:
        """Its row. Looked up for every write: another process may have dropped it with its last."""
        if self._origin is None or self._origin[0] is not origin:
            self._origin = origin, origin_text(origin)
        body = self._origin[1]
        self._db.execute("INSERT OR IGNORE INTO origins (body) VALUES (?)", [body])
        (found,) = self._db.execute("SELECT id FROM origins WHERE body = ?", [body]).fetchone()
        return int(found)

    def _drop(self) -> None:
        self._db.execute(
            "DELETE FROM requests WHERE id <= (SELECT id FROM requests ORDER BY id DESC"
            " LIMIT 1 OFFSET ?)",
            [self._limit],
        )
        self._db.execute(
            "DELETE FROM requests WHERE id <= (SELECT id FROM (SELECT id, sum(bytes) OVER"
            " (ORDER BY id DESC) AS total FROM requests) WHERE total > ? ORDER BY id DESC LIMIT 1)",
            [self._max_bytes],
        )
        self._db.execute("DELETE FROM origins WHERE id NOT IN (SELECT origin FROM requests)")


# ---------------------------------------------------------------------- the file


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    # Statements outside a transaction stand for themselves; `write` opens its own.
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?{mode}",
        timeout=_BUSY_MS / 1e3,
        isolation_level=None,
        check_same_thread=False,
        uri=True,
    )
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_BYTES)
    db.execute("PRAGMA trusted_schema = OFF")
    return db


def _open_read_only(path: Path) -> sqlite3.Connection:
    with _said(path):
        db = _connect(path, "mode=ro")
        try:
            db.execute("SELECT count(*) FROM sqlite_master")
        except sqlite3.OperationalError:
            # Where nothing can be written SQLite has no place for its own index of the log. Then
            # nobody else writes either.
            db.close()
            db = _connect(path, "immutable=1")
        try:
            _check(db, path)
        except BaseException:
            db.close()
            raise
        return db


def _open(path: Path) -> sqlite3.Connection:
    with _said(path):
        db = _connect(path, "mode=rw")
        try:
            db.execute(f"PRAGMA page_size = {_PAGE}")  # of a new file
            with db:
                db.execute("BEGIN IMMEDIATE")
                _make(db)
                _check(db, path)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA secure_delete = FAST")  # a prompt that was dropped is gone
            # A crash of the machine may lose the last requests, never the file.
            db.execute("PRAGMA synchronous = NORMAL")
        except BaseException:
            db.close()
            raise
        return db


def _make(db: sqlite3.Connection) -> None:
    """The tables of a file that is new."""
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if (*_marks(db), tables) == (0, 0, 0):
        for statement in _TABLES.values():
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {_APPLICATION}")
        db.execute(f"PRAGMA user_version = {_VERSION}")


def _marks(db: sqlite3.Connection) -> tuple[int, int]:
    """Whose file it is, and its format."""
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    return application, version


def _check(db: sqlite3.Connection, path: Path) -> None:
    application, version = _marks(db)
    if application != _APPLICATION:
        raise RecordError(f"{path} is the database of another program; choose another directory")
    if version != _VERSION:
        raise RecordError(
            f"{path} has records of format {version}, this version reads {_VERSION}; use the "
            "version that wrote it, or another directory"
        )
    # A view or a trigger of a stranger's would run with our statements, and need not end.
    query = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
    schema = [row for row in db.execute(query) if row[0] != "sqlite_sequence"]
    if schema != sorted(_TABLES.items()):
        names = ", ".join(name for name, _ in schema)
        raise RecordError(f"{path} holds something else than records: {names[:200]}")


@contextmanager
def _said(path: Path) -> Iterator[None]:
    """What SQLite complains of, as an error that names the file."""
    try:
        yield
    except sqlite3.Error as error:
        raise RecordError(f"{path}: {error}") from None
