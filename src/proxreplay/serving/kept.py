"""Inputs of predictions, on disk until their labels arrive or until there is no room."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from proxreplay.batch import Inputs
from proxreplay.errors import InputError, ProxreplayError
from proxreplay.serialization import from_bytes, to_bytes
from proxreplay.serving.commits import GroupCommit
from proxreplay.serving.database import Database
from proxreplay.serving.events import word


class UnknownIdError(ProxreplayError):
    """No input is kept under an id."""


class KeptInputs:
    """Inputs under ids; the oldest make room for new ones.

    They leave in the transaction of the event that they go into (`Row.kept`), so that they are
    learned once, whenever the process is killed.
    """

    def __init__(self, database: Database, most: int, most_bytes: int) -> None:
        self._database = database
        self._most, self._most_bytes = most, most_bytes
        self._commits = GroupCommit(self._write, lambda: None)
        self._lock = threading.Lock()
        rows = database.query("SELECT number, id, length(body) FROM kept ORDER BY number")
        self._places = {identity: (number, size) for number, identity, size in rows}
        self._nbytes = sum(size for _, _, size in rows)
        self._taken: set[int] = set()  # by events that are not on disk yet
        self._next = rows[-1][0] + 1 if rows else 1

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, identity: str) -> bool:
        return identity in self._places

    def put(self, identity: str, inputs: Inputs) -> None:
        """Keep inputs: on disk when this returns. What was under the same id is replaced."""
        body = to_bytes({"inputs": inputs})
        if len(body) > self._most_bytes:
            raise InputError(
                f"id={identity!r}: inputs of {len(body)} bytes, but {self._most_bytes} are kept at "
                "most; send them with the labels."
            )
        self._commits.wait(self._commits.enqueue((word("id", identity), body)))

    @contextmanager
    def taken(self, identity: str) -> Iterator[tuple[int, Any]]:
        """Number and inputs of an id for one event; they are gone if the event gets on disk."""
        with self._lock:
            number, size = self._places.get(identity, (0, 0))
            found = self._database.query("SELECT body FROM kept WHERE number = ?", (number,))
            if not found or number in self._taken:
                raise UnknownIdError(
                    f"no input is kept under the id {identity!r}: it was never predicted, is "
                    "learned already, or had to make room. Send the inputs with the labels."
                )
            self._taken.add(number)
        try:
            body = from_bytes(found[0][0], f"{self._database.path}, id {identity!r}")
            yield number, body["inputs"]
            with self._lock:
                if self._places.get(identity) == (number, size):
                    del self._places[identity]
                    self._nbytes -= size
        finally:
            self._taken.discard(number)

    def _write(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Put inputs on disk, and remove what they replace; one thread at a time is in here."""
        with self._lock:
            new = {}
            for number, (identity, body) in enumerate(items, start=self._next):
                new[identity] = (number, identity, body)
            gone = {i: self._places[i] for i in new if i in self._places}
            count = len(self._places) - len(gone) + len(new)
            total = self._nbytes + sum(len(body) for _, _, body in new.values())
            total -= sum(size for _, size in gone.values())
            for identity, place in self._places.items():
                if count <= self._most and total <= self._most_bytes:
                    break
                if identity not in gone:
                    gone[identity] = place
                    count, total = count - 1, total - place[1]
            with self._database.transaction() as run:
                numbers = [(number,) for number, _ in gone.values()]
                run.executemany("DELETE FROM kept WHERE number = ?", numbers)
                run.executemany("INSERT INTO kept VALUES (?, ?, ?)", new.values())
            for identity in gone:
                del self._places[identity]
            for number, identity, body in new.values():
                self._places[identity] = (number, len(body))
            self._nbytes, self._next = total, self._next + len(items)
