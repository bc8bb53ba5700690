"""The log: events in an SQLite database, in order, on disk before anybody is told.

    meta       format and version of the folder, and the newest sequence
    events     one row per event; its body is dropped when it is not needed any more
    outcomes   what became of every event; can be made again by replaying
    examples   which key belongs to which ids of the memory
    deleted    ids of examples that were deleted, so that it can be proved
    snapshots  what is known about snapshots beside their files

WAL mode with ``synchronous=FULL``: a transaction that has returned is on disk.
``secure_delete`` overwrites what is deleted, and `scrub` empties the write-ahead log.
"""

import hashlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from proxreplay.errors import CheckpointError, StorageError
from proxreplay.files import sync_folder
from proxreplay.serving.events import Outcome

NAME = "events.sqlite3"
FORMAT, VERSION = "proxreplay-serving", "1"
_TEMPORARY = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY)
_TABLES = """
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
"""


@dataclass(frozen=True)
class Row:
    """An event on its way into the log, or what is known of one that is there.

    Args:
        sequence: its number, without gaps, from 1.
        kind: of the event.
        time: seconds since 1970; never smaller than that of the event before.
        token: see `Event`.
        request: digest of what was asked for, to know the same request again.
        note: see `Event`.
        body: see `Event.to_bytes`; None if it was dropped.
    """

    sequence: int
    kind: str
    time: float
    token: bytes | None
    request: bytes | None
    note: str | None
    body: bytes | None

    @property
    def digest(self) -> bytes:
        """Of everything that stays; the body has a checksum of its own."""
        token = "" if self.token is None else self.token.hex()
        return hashlib.sha256(
            f"{self.sequence}/{self.kind}/{self.time!r}/{token}".encode()
        ).digest()


class EventLog:
    """The database of a folder; every method may be called from any thread.

    Args:
        path: of the database, which is made if it is missing.

    Raises:
        CheckpointError: it is damaged, or was written by another version.
        StorageError: it cannot be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self.broken: str | None = None  # why nothing can be written any more
        with self._naming():
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._open()
            except BaseException:
                self._connection.close()
                raise

    def _open(self) -> None:
        run = self._connection.execute
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
            with self._transaction():
                for statement in _TABLES.split(";"):
                    run(statement)
                facts = {"format": FORMAT, "version": VERSION, "last": "0"}
                self._connection.executemany("INSERT INTO meta VALUES (?, ?)", facts.items())
            sync_folder(self.path.parent)
        self._check()
        self.checkpoint()  # what a killed process deleted may still be in the write-ahead log

    def _check(self) -> None:
        run = self._connection.execute
        found = run("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        meta = dict(run("SELECT name, value FROM meta").fetchall())
        if (meta.get("format"), meta.get("version")) != (FORMAT, VERSION):
            raise CheckpointError(
                f"{self.path}: format {meta.get('format')!r} version {meta.get('version')!r}, but "
                f"this proxreplay reads {FORMAT!r} version {VERSION!r}; use the one that wrote it."
            )
        newest = run("SELECT max(sequence) FROM events").fetchone()[0] or 0
        self.last = int(meta["last"])
        if newest != self.last and not (newest == 0 and self.last == 0):
            raise sqlite3.DatabaseError(f"its newest event is {newest} instead of {self.last}")

    def close(self) -> None:
        """Close the database; the write-ahead log goes into it."""
        with self._lock, self._naming():
            self._connection.close()

    # --- writing ----------------------------------------------------------------------------------

    def append(self, rows: Sequence[Row]) -> None:
        """Write events in one transaction; they are on disk when this returns.

        Raises:
            StorageError: nothing was written. If the disk is full, it may work later.
        """
        with self._lock, self._naming():
            with self._transaction():
                self._connection.executemany(
                    "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    [
                        (r.sequence, r.kind, r.time, r.token, r.request, r.note, r.body, r.digest)
                        for r in rows
                    ],
                )
                self._set_last(rows[-1].sequence)
            self.last = rows[-1].sequence

    def note_outcomes(self, outcomes: Iterable[Outcome], keys: Iterable[tuple[str, int]]) -> None:
        """Write what became of events, and which key belongs to which id."""
        with self._lock, self._naming(), self._transaction():
            self._connection.executemany(
                "INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        *(o.sequence, o.kind, o.loss, _pack(o.ids), o.removed, o.refused),
                        *(o.diverged, _pack(o.classes), _pack(o.hits), o.refreshed),
                    )
                    for o in outcomes
                ],
            )
            self._connection.executemany("INSERT OR IGNORE INTO examples VALUES (?, ?)", keys)

    def note_snapshot(self, sequence: int, time: float, good: bool, ids: Sequence[int]) -> None:
        """Write what is known of a snapshot."""
        row = (sequence, time, good, _pack(ids))
        self._change("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?)", row)

    def drop_snapshots(self, sequences: Iterable[int]) -> None:
        """Forget about snapshots whose files are gone."""
        with self._lock, self._naming(), self._transaction():
            rows = [(sequence,) for sequence in sequences]
            self._connection.executemany("DELETE FROM snapshots WHERE sequence = ?", rows)

    def drop_bodies(self, through: int) -> None:
        """Delete the data of events up to a sequence; that they happened stays known."""
        self._change(
            "UPDATE events SET body = NULL WHERE sequence <= ? AND body IS NOT NULL", (through,)
        )

    def drop_history(self, through: int) -> None:
        """Delete events up to a sequence, and what became of them."""
        with self._lock, self._naming(), self._transaction():
            self._connection.execute("DELETE FROM events WHERE sequence <= ?", (through,))
            self._connection.execute("DELETE FROM outcomes WHERE sequence <= ?", (through,))

    def drop_keys(self, alive: Sequence[int], since: int) -> None:
        """Delete keys of ids below ``since`` that are not alive."""
        with self._lock, self._naming(), self._transaction():
            run = self._connection.execute
            run("CREATE TEMP TABLE alive (id INTEGER PRIMARY KEY)")
            self._connection.executemany("INSERT INTO alive VALUES (?)", [(i,) for i in alive])
            run(
                "DELETE FROM examples WHERE id < ? AND id NOT IN (SELECT id FROM temp.alive)",
                (since,),
            )
            run("DROP TABLE temp.alive")

    def scrub(self, through: int, ids: Sequence[int], note: str) -> None:
        """Delete what events up to a deletion hold, and the keys of ids, so that no byte is left.

        Args:
            through: the sequence of the deletion.
            ids: of the deleted examples.
            note: what is kept of the deletion itself.
        """
        with self._lock, self._naming():
            with self._transaction():
                run = self._connection.execute
                run(
                    "UPDATE events SET body = NULL, request = NULL, note = NULL "
                    "WHERE sequence <= ?",
                    (through,),
                )
                run("UPDATE events SET note = ? WHERE sequence = ?", (note, through))
                run(
                    "UPDATE outcomes SET refused = 'deleted' "
                    "WHERE sequence <= ? AND refused IS NOT NULL",
                    (through,),
                )
                gone = [(int(i),) for i in ids]
                self._connection.executemany("DELETE FROM examples WHERE id = ?", gone)
                self._connection.executemany("INSERT OR IGNORE INTO deleted VALUES (?)", gone)
            self.checkpoint()

    def checkpoint(self) -> None:
        """Move everything from the write-ahead log into the database, and empty the log."""
        with self._lock, self._naming():
            busy, _, _ = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if busy:
                raise StorageError(
                    f"{self.path}: another process reads it, so deleted data may be left in "
                    f"{self.path.name}-wal; close that process and try again."
                )

    # --- reading ----------------------------------------------------------------------------------

    def rows(self, first: int, last: int) -> Iterator[Row]:
        """Events with their bodies, in order; raises if one is missing or damaged."""
        for sequence in range(first, last + 1):
            found = self.row(sequence)
            if found is None or found.body is None:
                raise CheckpointError(
                    f"{self.path}: the data of event {sequence} is not there any more; go back to "
                    "a snapshot instead."
                )
            yield found

    def row(self, sequence: int) -> Row | None:
        """An event, or None."""
        fields = "sequence, kind, time, token, request, note, body"
        found = self._query(f"SELECT {fields}, digest FROM events WHERE sequence = ?", (sequence,))
        if not found:
            return None
        row = Row(*found[0][:-1])
        if row.digest != found[0][-1]:
            raise CheckpointError(
                f"{self.path}: event {sequence} is damaged; restore the folder from a copy, or "
                "start a new one from its newest snapshot (Learner.load)."
            )
        return row

    def by_token(self, token: bytes) -> tuple[int, bytes | None] | None:
        """The sequence and the request that an idempotency key stands for."""
        found = self._query("SELECT sequence, request FROM events WHERE token = ?", (token,))
        return found[0] if found else None

    def kinds(self, kinds: Sequence[str]) -> list[tuple[int, str, float, str | None, bool]]:
        """Sequence, kind, time, note and whether there is a body, of all events of some kinds."""
        marks = ",".join("?" * len(kinds))
        return self._query(
            "SELECT sequence, kind, time, note, body IS NOT NULL FROM events "
            f"WHERE kind IN ({marks}) ORDER BY sequence",
            tuple(kinds),
        )

    def outcomes(self, newest: int) -> list[Outcome]:
        """The newest outcomes of batches, oldest first."""
        rows = self._query(
            "SELECT * FROM outcomes WHERE kind IN ('learn', 'remember') "
            "ORDER BY sequence DESC LIMIT ?",
            (newest,),
        )
        return [_outcome(row) for row in reversed(rows)]

    def outcome(self, sequence: int) -> Outcome | None:
        """What became of one event."""
        rows = self._query("SELECT * FROM outcomes WHERE sequence = ?", (sequence,))
        return _outcome(rows[0]) if rows else None

    def ids_of(self, key: str) -> list[int]:
        """The ids of the examples that a key stands for."""
        return [i for (i,) in self._query("SELECT id FROM examples WHERE key = ?", (key,))]

    def deleted(self) -> list[int]:
        """The ids of all examples that were deleted."""
        return [i for (i,) in self._query("SELECT id FROM deleted", ())]

    def snapshots(self) -> dict[int, tuple[float, bool, tuple[int, ...]]]:
        """Time, whether it was good, and the ids in its memory, by sequence."""
        rows = self._query("SELECT * FROM snapshots ORDER BY sequence", ())
        return {s: (time, bool(good), _unpack(ids)) for s, time, good, ids in rows}

    def sizes(self) -> list[tuple[int, float, int]]:
        """Sequence, time and bytes of all bodies, newest first."""
        return self._query(
            "SELECT sequence, time, length(body) FROM events WHERE body IS NOT NULL "
            "ORDER BY sequence DESC",
            (),
        )

    def newest_time(self) -> float:
        """When the newest event happened; 0 if there is none."""
        found = self._query("SELECT time FROM events ORDER BY sequence DESC LIMIT 1", ())
        return float(found[0][0]) if found else 0.0

    def first_id_since(self, sequence: int) -> int | None:
        """The smallest id that an event after a sequence was given."""
        rows = self._query(
            "SELECT ids FROM outcomes WHERE sequence > ? AND length(ids) > 0 "
            "ORDER BY sequence LIMIT 1",
            (sequence,),
        )
        return _unpack(rows[0][0])[0] if rows else None

    # --- inside -----------------------------------------------------------------------------------

    def _query(self, statement: str, values: tuple[Any, ...]) -> list[Any]:
        with self._lock, self._naming():
            return self._connection.execute(statement, values).fetchall()

    def _change(self, statement: str, values: tuple[Any, ...]) -> None:
        with self._lock, self._naming(), self._transaction():
            self._connection.execute(statement, values)

    def _set_last(self, last: int) -> None:
        self._connection.execute("UPDATE meta SET value = ? WHERE name = 'last'", (str(last),))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        if self.broken is not None:
            raise StorageError(self.broken)
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
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
            if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
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


def _pack(numbers: Sequence[int]) -> bytes:
    return np.asarray(numbers, dtype="<i8").tobytes()


def _unpack(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, dtype="<i8").tolist())


def _outcome(row: Sequence[Any]) -> Outcome:
    sequence, kind, loss, ids, removed, refused, diverged, classes, hits, refreshed = row
    seen = tuple(bool(hit) for hit in _unpack(hits))
    return Outcome(
        *(sequence, kind, loss, _unpack(ids), removed, refused, bool(diverged)),
        *(_unpack(classes), seen, refreshed),
    )
