"""Events between admission and the learner: numbered, written together, waiting in order."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from proxreplay.errors import BusyError, StoppedError
from proxreplay.options import DurableOptions
from proxreplay.serialization import to_bytes
from proxreplay.serving.commits import GroupCommit
from proxreplay.serving.events import Event, Outcome
from proxreplay.serving.log import EventLog, Row


@dataclass(frozen=True)
class Ticket:
    """An event on disk."""

    sequence: int  # its place in history
    event: Event = field(repr=False)  # the event itself
    repeated: bool = False  # whether its idempotency key was known already; nothing was added then
    applied: "Future[Outcome]" = field(default_factory=Future, repr=False)  # what becomes of it
    nbytes: int = 0  # of its data
    # when it was put on disk, by the clock that never goes back
    since: float = field(default_factory=time.monotonic)


class Line:
    """A queue on disk; every method may be called from any thread.

    ``on_failure`` is called when events that have a number could not be written.
    """

    def __init__(
        self, log: EventLog, clock: Callable[[], float], on_failure: Callable[[], None]
    ) -> None:
        self.failure: str | None = None  # why nothing can be applied any more
        self.closed = False
        self._log = log
        self._clock = clock
        self._on_failure = on_failure
        self._ordering = threading.Lock()  # numbers, times and tokens
        self._moved = threading.Condition()  # queue, failure
        self._queue: deque[Ticket] = deque()
        self._nbytes = 0
        self._tickets: dict[int, Ticket] = {}  # not applied yet
        self._tokens: dict[bytes, Any] = {}  # not on disk yet
        self._next = log.last + 1
        self._time = log.newest_time()
        self._commits = GroupCommit(self._write, self._not_written)

    # --- joining ----------------------------------------------------------------------------------

    def put(self, event: Event, request: bytes | None = None, kept: int | None = None) -> Any:
        """Give an event its number and a place in the next write; see `wait` and `Row`."""
        body = to_bytes(event.body)
        with self._ordering:
            self.check()
            sequence, self._time = self._next, self.now()
            facts = (event.token, request, event.note, body, kept)
            row = Row(sequence, event.kind, self._time, *facts)
            place = self._commits.enqueue((row, Ticket(sequence, event, nbytes=len(body))))
            self._next = sequence + 1
            if event.token is not None:
                self._tokens[event.token] = place
        return place

    def wait(self, place: Any) -> Ticket:
        """Return when an event is on disk; raise if it could not be written."""
        self._commits.wait(place)
        ticket: Ticket = place.item[1]
        return ticket

    def now(self) -> float:
        """The clock may go back; the time of events does not."""
        return max(self._clock(), self._time)

    def known(self, token: bytes) -> tuple[Ticket | None, int, bytes | None] | None:
        """Ticket (None if it is applied), sequence and request of a token; None for a new one."""
        with self._ordering:
            place = self._tokens.get(token)
        if place is not None:
            self.wait(place)
        found = self._log.by_token(token)
        if found is None:
            return None
        with self._moved:
            return self._tickets.get(found[0]), *found

    def _write(self, items: Sequence[tuple[Row, Ticket]]) -> None:
        """Put events on disk and behind those that wait; one thread at a time is in here."""
        self._log.append([row for row, _ in items])
        with self._moved:
            for row, ticket in items:
                self._queue.append(ticket)
                self._nbytes += ticket.nbytes
                self._tickets[row.sequence] = ticket
            self._moved.notify_all()
        with self._ordering:
            for row, _ in items:
                if row.token is not None:
                    self._tokens.pop(row.token, None)
        if self.failure is not None:
            self.refuse()

    def _not_written(self) -> None:
        """Nothing that waits was written: numbers start again."""
        with self._ordering:
            self._next = self._log.last + 1
            self._tokens.clear()
        self._on_failure()

    # --- waiting ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def lag(self) -> float:
        """Seconds that the oldest event is waiting."""
        with self._moved:
            return time.monotonic() - self._queue[0].since if self._queue else 0.0

    def check_room(self, options: DurableOptions) -> None:
        """Refuse if too much is waiting."""
        if len(self._queue) >= options.queue_events or self._nbytes >= options.queue_bytes:
            raise BusyError(
                f"{len(self._queue)} events ({self._nbytes} bytes) wait to be learned; come back "
                "later."
            )

    def check(self) -> None:
        """Refuse if nothing is applied any more."""
        if self.failure is not None or self.closed:
            raise self._stopped()

    def _stopped(self) -> StoppedError:
        folder = self._log.path.parent
        return StoppedError(f"{folder}: {self.failure or 'it is closed'}. Open the folder again.")

    # --- leaving ----------------------------------------------------------------------------------

    def first(self, *, wait: bool = False) -> Ticket | None:
        """The oldest event that waits, or waits for one to come.

        None if there is none, or nothing is applied any more.
        """
        with self._moved:
            while wait and not self._queue and not self.closed:
                self._moved.wait()
            able = self._queue and self.failure is None and not self.closed
            return self._queue[0] if able else None

    def leave(self, ticket: Ticket, outcome: Outcome) -> None:
        """The oldest event is applied."""
        with self._moved:
            assert self._queue.popleft() is ticket
            self._nbytes -= ticket.nbytes
            del self._tickets[ticket.sequence]
            self._moved.notify_all()
        ticket.applied.set_result(outcome)

    def wait_until_empty(self) -> None:
        """Return when somebody has applied everything, or cannot any more."""
        with self._moved:
            while self._queue and self.failure is None and not self.closed:
                self._moved.wait()

    def fail(self, reason: str) -> None:
        """Nothing is applied any more; events stay on disk."""
        self.failure = reason
        self.refuse()

    def close(self) -> None:
        """Nothing is let in and nothing is applied any more."""
        with self._moved:
            self.closed = True
            self._moved.notify_all()

    def refuse(self) -> None:
        """Tell those who wait that their event is not applied in this process."""
        with self._moved:
            for waiting in self._queue:
                if not waiting.applied.done():
                    waiting.applied.set_exception(self._stopped())
            self._moved.notify_all()
