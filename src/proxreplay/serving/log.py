"""The log: events in an SQLite database, in order, on disk before anybody is told.

meta       format and version of the folder, and the newest sequence
events     one row per event; its body is dropped when it is not needed any more
outcomes   what became of every event; can be made again by replaying
examples   which key belongs to which ids of the memory
deleted    ids of examples that were deleted, so that it can be proved
snapshots  what is known about snapshots beside their files
kept       inputs of predictions that wait for their labels, see `kept`
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from proxreplay.errors import CheckpointError
from proxreplay.serialization import from_bytes
from proxreplay.serving.database import Database
from proxreplay.serving.events import Event, Outcome

NAME = "events.sqlite3"


@dataclass(frozen=True)
class Row:
    """An event on its way into the log, or what is known of one that is there."""

    sequence: int  # its number, without gaps, from 1
    kind: str  # of the event
    time: float  # seconds since 1970; never smaller than that of the event before
    token: bytes | None  # see `Event`
    request: bytes | None  # digest of what was asked for, to know the same request again
    note: str | None  # see `Event`
    body: bytes | None  # that of the event by `to_bytes`; None if it was dropped
    # number of the kept input that goes when the event comes; None for none
    kept: int | None = None

    @property
    def digest(self) -> bytes:
        """Of everything that stays; the body has a checksum of its own."""
        token = "" if self.token is None else self.token.hex()
        return hashlib.sha256(
            f"{self.sequence}/{self.kind}/{self.time!r}/{token}".encode()
        ).digest()


class EventLog:
    """The events of a folder; every method may be called from any thread.

    Args:
        path: of the database, which is made if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = Database(path)
        self.last: int = self._query("SELECT max(sequence) FROM events")[0][0] or 0

    # --- writing ----------------------------------------------------------------------------------

    def append(self, rows: Sequence[Row]) -> None:
        """Write events in one transaction; they are on disk when this returns."""
        values = [
            (r.sequence, r.kind, r.time, r.token, r.request, r.note, r.body, r.digest) for r in rows
        ]
        with self.database.transaction() as run:
            run.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
            run.execute("UPDATE meta SET value = ? WHERE name = 'last'", (str(rows[-1].sequence),))
            gone = [(row.kept,) for row in rows if row.kept is not None]
            run.executemany("DELETE FROM kept WHERE number = ?", gone)
        self.last = rows[-1].sequence

    def note_outcomes(self, outcomes: Iterable[Outcome], keys: Iterable[tuple[str, int]]) -> None:
        """Write what became of events, and which key belongs to which id."""
        # the table has the fields of `Outcome` in their order
        rows = [
            [
                _pack(value) if isinstance(value, tuple) else value
                for value in vars(outcome).values()
            ]
            for outcome in outcomes
        ]
        with self.database.transaction() as run:
            marks = ",".join("?" * 10)
            run.executemany(f"INSERT OR REPLACE INTO outcomes VALUES ({marks})", rows)
            run.executemany("INSERT OR IGNORE INTO examples VALUES (?, ?)", keys)

    def note_snapshot(self, sequence: int, time: float, good: bool, ids: Sequence[int]) -> None:
        """Write what is known of a snapshot."""
        row = (sequence, time, good, _pack(ids))
        with self.database.transaction() as run:
            run.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?)", row)

    def drop_snapshots(self, sequences: Iterable[int]) -> None:
        """Forget about snapshots whose files are gone."""
        with self.database.transaction() as run:
            rows = [(sequence,) for sequence in sequences]
            run.executemany("DELETE FROM snapshots WHERE sequence = ?", rows)

    def drop_bodies(self, through: int) -> None:
        """Delete the data of events up to a sequence; that they happened stays known."""
        statement = "UPDATE events SET body = NULL WHERE sequence <= ? AND body IS NOT NULL"
        with self.database.transaction() as run:
            run.execute(statement, (through,))

    def drop_history(self, through: int) -> None:
        """Delete events up to a sequence, and what became of them."""
        with self.database.transaction() as run:
            run.execute("DELETE FROM events WHERE sequence <= ?", (through,))
            run.execute("DELETE FROM outcomes WHERE sequence <= ?", (through,))

    def drop_keys(self, alive: Sequence[int], since: int) -> None:
        """Delete keys of ids below ``since`` that are not alive."""
        with self.database.transaction() as run:
            run.execute("CREATE TEMP TABLE alive (id INTEGER PRIMARY KEY)")
            run.executemany("INSERT INTO alive VALUES (?)", [(i,) for i in alive])
            run.execute(
                "DELETE FROM examples WHERE id < ? AND id NOT IN (SELECT id FROM temp.alive)",
                (since,),
            )
            run.execute("DROP TABLE temp.alive")

    def scrub(self, through: int, ids: Sequence[int], note: str) -> None:
        """Delete what events up to a deletion hold, and the keys of ids, so that no byte is left.

        The ``note`` is what is kept of the deletion itself.
        """
        with self.database.transaction() as run:
            run.execute(
                "UPDATE events SET body = NULL, request = NULL, note = CASE kind "
                "WHEN 'rollback' THEN substr(note, 1, instr(note || ':', ':') - 1) "
                "WHEN 'stop' THEN 'the reason is deleted' ELSE note END WHERE sequence <= ?",
                (through,),
            )
            run.execute("UPDATE events SET note = ? WHERE sequence = ?", (note, through))
            run.execute(
                "UPDATE outcomes SET refused = 'deleted' "
                "WHERE sequence <= ? AND refused IS NOT NULL",
                (through,),
            )
            gone = [(int(i),) for i in ids]
            run.executemany("DELETE FROM examples WHERE id = ?", gone)
            run.executemany("INSERT OR IGNORE INTO deleted VALUES (?)", gone)
        self.database.checkpoint()

    # --- reading ----------------------------------------------------------------------------------

    def event(self, sequence: int) -> Event:
        """An event with its data; raises if that is missing or damaged."""
        found = self.row(sequence)
        if found is None or found.body is None:
            raise CheckpointError(
                f"{self.path}: the data of event {sequence} is not there any more; go back to a "
                "snapshot instead."
            )
        body = from_bytes(found.body, f"{self.path}, event {sequence}")
        return Event(found.kind, body, found.note, found.token)

    def row(self, sequence: int) -> Row | None:
        """What is known of an event, or None."""
        fields = "sequence, kind, time, token, request, note, body"
        found = self._query(f"SELECT {fields}, digest FROM events WHERE sequence = ?", sequence)
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
        found = self._query("SELECT sequence, request FROM events WHERE token = ?", token)
        return found[0] if found else None

    def kinds(self, kinds: Sequence[str]) -> list[tuple[int, str, float, str | None, bool]]:
        """Sequence, kind, time, note and whether there is a body, of all events of some kinds."""
        marks = ",".join("?" * len(kinds))
        return self._query(
            "SELECT sequence, kind, time, note, body IS NOT NULL FROM events "
            f"WHERE kind IN ({marks}) ORDER BY sequence",
            *kinds,
        )

    def outcomes(self, newest: int) -> list[Outcome]:
        """The newest outcomes of batches, oldest first."""
        rows = self._query(
            "SELECT * FROM outcomes WHERE kind IN ('learn', 'remember') "
            "ORDER BY sequence DESC LIMIT ?",
            newest,
        )
        return [_outcome(row) for row in reversed(rows)]

    def outcome(self, sequence: int) -> Outcome | None:
        """What became of one event."""
        rows = self._query("SELECT * FROM outcomes WHERE sequence = ?", sequence)
        return _outcome(rows[0]) if rows else None

    def ids_of(self, key: str) -> list[int]:
        """The ids of the examples that a key stands for."""
        return [i for (i,) in self._query("SELECT id FROM examples WHERE key = ?", key)]

    def deleted(self) -> list[int]:
        """The ids of all examples that were deleted."""
        return [i for (i,) in self._query("SELECT id FROM deleted")]

    def snapshots(self) -> dict[int, tuple[float, bool, tuple[int, ...]]]:
        """Time, whether it was good, and the ids in its memory, by sequence."""
        rows = self._query("SELECT * FROM snapshots ORDER BY sequence")
        return {s: (time, bool(good), _unpack(ids)) for s, time, good, ids in rows}

    def sizes(self) -> list[tuple[int, float, int]]:
        """Sequence, time and bytes of all bodies, newest first."""
        return self._query(
            "SELECT sequence, time, length(body) FROM events WHERE body IS NOT NULL "
            "ORDER BY sequence DESC"
        )

    def newest_time(self) -> float:
        """When the newest event happened; 0 if there is none."""
        found = self._query("SELECT time FROM events ORDER BY sequence DESC LIMIT 1")
        return float(found[0][0]) if found else 0.0

    def first_id_since(self, sequence: int) -> int | None:
        """The smallest id that an event after a sequence was given."""
        rows = self._query(
            "SELECT ids FROM outcomes WHERE sequence > ? AND length(ids) > 0 "
            "ORDER BY sequence LIMIT 1",
            sequence,
        )
        return _unpack(rows[0][0])[0] if rows else None

    def _query(self, statement: str, *values: Any) -> list[Any]:
        return self.database.query(statement, values)


def _pack(numbers: Sequence[int]) -> bytes:
    return np.asarray(numbers, dtype="<i8").tobytes()


def _unpack(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, dtype="<i8").tolist())


def _outcome(row: Sequence[Any]) -> Outcome:
    values: list[Any] = [_unpack(value) if isinstance(value, bytes) else value for value in row]
    found = Outcome(*values)
    return replace(found, diverged=bool(found.diverged), hits=tuple(map(bool, found.hits)))
