"""An SQLite database whose changes are on disk when they return, and whose errors name a way out.

WAL mode with ``synchronous=FULL``: a transaction that has returned is on disk.
``secure_delete`` overwrites what is deleted, and `checkpoint` empties the write-ahead log.
"""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from proxreplay.errors import CheckpointError, StorageError
from proxreplay.files import sync_folder

FORMAT, VERSION = "proxreplay-serving", "2"
_TEMPORARY = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY)
_UNWRITABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)
_KEPT = "CREATE TABLE kept (number INTEGER PRIMARY KEY, id TEXT NOT NULL, body BLOB NOT NULL);"
_TABLES = f"""
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE events (
    sequence INTEGER PRIMARY KEY, kind TEXT NOT NULL, time REAL NOT NULL, token BLOB,
    request BLOB, note TEXT, body BLOB, digest BLOB NOT NULL);
CREATE UNIQUE INDEX events_by_token ON events (token) WHERE token IS NOT NULL;
CREATE INDEX events_by_kind ON events (kind);
CREATE INDEX events_with_body ON events (sequence) WHERE body IS NOT NULL;
CREATE TABLE outcomes (
    sequence INTEGER PRIMARY KEY, kind TEXT NOT NULL, loss REAL, ids BLOB NOT NULL,
    removed INTEGER NOT NULL, refused TEXT, diverged INTEGER NOT NULL, classes BLOB NOT NULL,
    hits BLOB NOT NULL, refreshed INTEGER);
CREATE TABLE examples (key TEXT NOT NULL, id INTEGER NOT NULL, PRIMARY KEY (key, id)) WITHOUT ROWID;
CREATE TABLE deleted (id INTEGER PRIMARY KEY);
CREATE TABLE snapshots (
    sequence INTEGER PRIMARY KEY, time REAL NOT NULL, good INTEGER NOT NULL, ids BLOB NOT NULL);
{_KEPT}
"""
_UPGRADES = {"1": _KEPT}  # from a version to the next


class Database:
    """The tables of a folder; every method may be called from any thread.

    Args:
        path: of the file, which is made if it is missing.

    Raises:
        CheckpointError: it is damaged, or was written by another version.
        StorageError: it cannot be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.broken: str | None = None  # why nothing can be written any more
        self._lock = threading.RLock()
        with self._naming():
            self.connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._open()
            except BaseException:
                self.connection.close()
                raise

    def _open(self) -> None:
        run = self.connection.execute
        (mode,) = run("PRAGMA journal_mode=WAL").fetchone()
        if mode != "wal":
            raise StorageError(
                f"{self.path}: the write-ahead log cannot be switched on here (it is {mode}); "
                "choose a folder on a local disk that can be written to."
            )
        for pragma in ("synchronous=FULL", "secure_delete=ON", "trusted_schema=OFF"):
            run(f"PRAGMA {pragma}").fetchall()
        run("PRAGMA cell_size_check=ON").fetchall()
        if not run("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            with self.transaction():
                for statement in _TABLES.split(";"):
                    run(statement)
                facts = {"format": FORMAT, "version": VERSION, "last": "0"}
                self.connection.executemany("INSERT INTO meta VALUES (?, ?)", facts.items())
            sync_folder(self.path.parent)
        self._check()
        self.checkpoint()  # what a killed process deleted may still be in the write-ahead log

    def _check(self) -> None:
        found = self.connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        meta = dict(self.query("SELECT name, value FROM meta"))
        if meta.get("format") == FORMAT and meta.get("version") in _UPGRADES:
            with self.transaction() as run:
                run.execute(_UPGRADES[meta["version"]])
                run.execute("UPDATE meta SET value = ? WHERE name = 'version'", (VERSION,))
        elif (meta.get("format"), meta.get("version")) != (FORMAT, VERSION):
            raise CheckpointError(
                f"{self.path}: format {meta.get('format')!r} version {meta.get('version')!r}, but "
                f"this proxreplay reads {FORMAT!r} version {VERSION!r}; use the one that wrote it."
            )
        newest = self.query("SELECT max(sequence) FROM events")[0][0] or 0
        if str(newest) != (last := meta.get("last")):
            raise sqlite3.DatabaseError(f"its newest event is {newest} instead of {last}")

    def close(self) -> None:
        """Close it; the write-ahead log goes into it."""
        with self._lock, self._naming():
            self.connection.close()

    def checkpoint(self) -> None:
        """Move everything from the write-ahead log into the database, and empty the log."""
        busy, _, _ = self.query("PRAGMA wal_checkpoint(TRUNCATE)")[0]
        if busy:
            raise StorageError(
                f"{self.path}: another process reads it, so deleted data may be left in "
                f"{self.path.name}-wal; close that process and try again."
            )

    def query(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """All rows of one statement."""
        with self._lock, self._naming():
            return self.connection.execute(statement, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All changes inside, or none; they are on disk when this ends.

        Raises:
            StorageError: nothing was written. If the disk is full, it may work later.
        """
        with self._lock, self._naming():
            if self.broken is not None:
                raise StorageError(self.broken)
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield self.connection
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Errors of SQLite become errors that name the file and the way out."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in _TEMPORARY:
                raise StorageError(
                    f"{self.path}: {error}; nothing was written. Make room on the disk and try "
                    "again."
                ) from error
            if code in _UNWRITABLE:
                raise StorageError(
                    f"{self.path}: {error}; give a folder that can be written to, or follow it "
                    "read-only."
                ) from error
            if code == sqlite3.SQLITE_IOERR:  # what is on disk is unknown until it is opened again
                self.broken = f"{self.path}: {error}; open the folder again when the disk is well."
                raise StorageError(self.broken) from error
            raise CheckpointError(
                f"{self.path}: damaged ({error}); restore the folder from a copy, or start a new "
                "one from its newest snapshot (Learner.load), which is without the events after it."
            ) from error
