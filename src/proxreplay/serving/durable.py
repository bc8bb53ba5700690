"""A learner that survives: every change is an event on disk before it is applied."""

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor

from proxreplay.errors import (
    BusyError,
    CheckpointError,
    ConflictError,
    DivergenceError,
    InputError,
    StoppedError,
    StorageError,
)
from proxreplay.files import make_folder
from proxreplay.locking import locked
from proxreplay.options import DurableOptions, GuardOptions
from proxreplay.replay.learner import Learner
from proxreplay.serialization import to_bytes
from proxreplay.serving import budget, deletion
from proxreplay.serving.admission import Admission
from proxreplay.serving.applying import forget_, learn_
from proxreplay.serving.commits import GroupCommit
from proxreplay.serving.events import (
    FORGET,
    LEARN,
    MARK,
    REMEMBER,
    RESUME,
    ROLLBACK,
    STOP,
    Event,
    Outcome,
    keys_of,
    learning,
    request_of,
    token_of,
)
from proxreplay.serving.guards import Guard
from proxreplay.serving.log import NAME, EventLog, Row
from proxreplay.serving.snapshots import Snapshot, Snapshots

OUTCOMES_PER_WRITE = 50  # those not written yet are made again by replaying
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ticket:
    """An event on disk.

    Args:
        sequence: its place in history.
        repeated: whether its idempotency key was known already; nothing was added then.
        applied: what becomes of it.
        event: the event itself.
        nbytes: of its data.
        since: when it was put on disk, by the clock that never goes back.
    """

    sequence: int
    event: Event = field(repr=False)
    repeated: bool = False
    applied: "Future[Outcome]" = field(default_factory=Future, repr=False)
    nbytes: int = 0
    since: float = field(default_factory=time.monotonic)


class DurableLearner:
    """A learner whose every change is on disk before it is made.

    Opening the folder again gives the newest intact snapshot plus the events after it, and that is
    bit for bit the learner that was never stopped (on the same machine, with as many threads).
    One process may change a folder; others may follow its snapshots (`Follower`).

    Methods may be called from several threads. Without `start`, `learn` applies its event itself.

    Args:
        folder: is made if it is missing; otherwise its state takes the place of the learner's.
        learner: composed as the one that was saved; code is never taken from the folder.
        options: snapshots, budgets and limits.
        guard: what to watch, or None.
        clock: seconds since 1970.

    >>> import tempfile
    >>> from proxreplay.models import mlp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with DurableLearner(folder, Learner(mlp(2))) as durable:
    ...         outcome = durable.learn(torch.randn(4, 2), [0, 1, 0, 1], keys="customer 7")
    ...     with DurableLearner(folder, Learner(mlp(2))) as durable:
    ...         (outcome.sequence, durable.applied, len(durable.learner.memory))
    (1, 1, 4)
    """

    def __init__(
        self,
        folder: Path | str,
        learner: Learner,
        *,
        options: DurableOptions | None = None,
        guard: GuardOptions | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = Path(folder)
        self.learner = learner
        self.options = options or DurableOptions()
        self.guard = None if guard is None else Guard(guard)
        self.snapshots = Snapshots(self.folder)
        self.applied = 0  # sequence of the newest event in the learner
        self.version = 0  # sequence of the newest snapshot or rollback behind it
        self.stopped: str | None = None  # why learning is refused
        self.failure: str | None = None  # why nothing can be applied any more
        self.snapshot_failure: str | None = None
        self._clock = clock
        self._admitting = threading.RLock()  # the order in which batches are let in
        self._ordering = threading.Lock()  # the numbers of events
        self._applying = threading.RLock()  # the learner
        self._moved = threading.Condition()  # queue, applied, failure
        self._queue: deque[Ticket] = deque()
        self._queue_bytes = 0
        self._admission: Admission | None = None
        self._tickets: dict[int, Ticket] = {}  # not applied yet
        self._tokens: dict[bytes, tuple[Ticket, Any]] = {}  # not on disk yet
        self._outcomes: list[Outcome] = []  # not written yet
        self._keys: list[tuple[str, int]] = []
        self._owed: str | None = None  # why a deletion is not complete on disk
        self._tripped = False
        self._worker: threading.Thread | None = None
        self._on_applied: Callable[[Outcome], None] = lambda outcome: None
        self._closing = False
        self._held = ExitStack()
        try:
            self._hold()
            self._open()
        except BaseException:
            self._held.close()
            raise

    @classmethod
    def open(cls, folder: Path | str, *parts: Any, **further: Any) -> Self:
        """Open a folder without a learner at hand, as `Learner.load` would.

        Args:
            folder: that exists.
            parts: code of your own, see `Learner.load`.
            further: the same by name; ``options``, ``guard`` and ``clock`` are for this class.
        """
        own = {n: further.pop(n) for n in ("options", "guard", "clock") if n in further}
        return cls(folder, load_newest(Path(folder), *parts, **further), **own)

    # --- opening and closing ----------------------------------------------------------------------

    def _hold(self) -> None:
        try:
            refuse_foreign(self.folder)
            make_folder(self.folder)
            self._held.enter_context(locked(self.folder / "lock"))
            self.snapshots.prepare()
        except BlockingIOError:
            raise InputError(
                f"{self.folder}: another process learns in this folder; stop it, or follow it "
                "read-only (Follower, or proxreplay serve --read-only)."
            ) from None
        except OSError as error:
            raise StorageError(
                f"{self.folder}: cannot be written to ({error}); choose another folder, or follow "
                "this one read-only (Follower, or proxreplay serve --read-only)."
            ) from error

    def _open(self) -> None:
        if self.snapshots.sequences() and not (self.folder / NAME).exists():
            raise CheckpointError(
                f"{self.folder / NAME}: missing, but there are snapshots; restore it, or start a "
                "new folder from a snapshot (Learner.load), which is without the events after it."
            )
        self.log = EventLog(self.folder / NAME)
        self._held.callback(self.log.close)
        self._next = self.log.last + 1
        self._commits = GroupCommit(self._write, self._on_failure)
        if self.log.last == 0 and not self.snapshots.sequences():
            self._write_snapshot()
        else:
            self._restore()
        self._know_stop()
        self._complete_deletions()
        if [row[1] for row in self.log.kinds((FORGET, MARK))][-1:] == [FORGET]:
            self._mark()
        self._drain()
        self._flush()

    def _restore(self) -> None:
        """The newest intact snapshot and the events after it."""
        base, state = self._newest_intact(self.log.last)
        self.learner.load_state_dict(state)
        self.applied = self.version = base
        if self.guard is not None:
            went_back = max((row[0] for row in self.log.kinds((ROLLBACK,))), default=0)
            for outcome in self.log.outcomes(self.guard.options.window):
                if went_back < outcome.sequence <= base:
                    self.guard.observe(outcome)
        threads = state["durable"].get("threads")
        if self.log.last > base and threads != torch.get_num_threads():
            log.warning(
                "%s was written with %s threads and is replayed with %d: the last bits may differ",
                self.folder,
                threads,
                torch.get_num_threads(),
            )
        for row in self.log.rows(base + 1, self.log.last):
            outcome = self._apply(row.sequence, self._event(row))
            self._note(outcome)
            if self.guard is not None:
                self.guard.observe(outcome)

    def _newest_intact(self, through: int) -> tuple[int, dict[str, Any]]:
        problems = []
        for sequence in self.snapshots.sequences():
            if sequence <= through:
                try:
                    return sequence, self.snapshots.load(sequence)
                except CheckpointError as error:
                    log.warning("%s; an older snapshot is used", error)
                    problems.append(str(error))
        raise CheckpointError(
            f"{self.snapshots.folder}: no intact snapshot up to event {through} "
            f"({'; '.join(problems) or 'none at all'}); restore the folder from a copy."
        )

    def _know_stop(self) -> None:
        """Whether learning is stopped, by the newest event that says so."""
        newest = self.log.kinds((STOP, RESUME, ROLLBACK))[-1:]
        self.stopped = next((note for _, kind, _, note, _ in newest if kind == STOP), None)

    def close(self) -> None:
        """Finish what is being applied and let go of the folder; what waits stays on disk."""
        self._closing = True
        with self._moved:
            self._moved.notify_all()
        if self._worker is not None:
            self._worker.join()
            self._worker = None
        with self._admitting, self._applying, self._held:
            self._fail_waiting()
            if self.log.broken is None and self.failure is None:
                self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- changing ---------------------------------------------------------------------------------

    def learn(
        self,
        x: Any,
        y: Any,
        *,
        sample_weight: Any = None,
        keys: str | Sequence[str] | None = None,
        idempotency_key: str | None = None,
    ) -> Outcome:
        """Learn from a batch: it is on disk, then applied.

        Args:
            x: see `Learner.learn`.
            y: see `Learner.learn`.
            sample_weight: see `Learner.learn`.
            keys: by which the examples can be deleted; one each, or one for all.
            idempotency_key: a second call with the same key adds nothing.

        Raises:
            DivergenceError: a step was not finite; the event stays in the history and is refused
                again whenever it is replayed. Other errors: see `submit`.
        """
        further: dict[str, Any] = {"keys": keys, "idempotency_key": idempotency_key}
        return self._finish(self.submit(x, y, sample_weight=sample_weight, **further))

    def remember(
        self,
        x: Any,
        y: Any,
        *,
        sample_weight: Any = None,
        keys: str | Sequence[str] | None = None,
        idempotency_key: str | None = None,
    ) -> Outcome:
        """Put a batch into the memory without learning from it; see `learn`."""
        further: dict[str, Any] = {"keys": keys, "idempotency_key": idempotency_key}
        return self._finish(self.submit(x, y, sample_weight=sample_weight, train=False, **further))

    def submit(
        self,
        x: Any,
        y: Any,
        *,
        sample_weight: Any = None,
        keys: str | Sequence[str] | None = None,
        idempotency_key: str | None = None,
        train: bool = True,
        request: bytes | None = None,
    ) -> Ticket:
        """Put a batch on disk; it is applied after all that came before.

        Args:
            x: see `learn`.
            y: see `learn`.
            sample_weight: see `learn`.
            keys: see `learn`.
            idempotency_key: see `learn`.
            train: whether to learn from it, or only to remember it.
            request: digest of what the caller was asked for; None for that of the arguments.

        Raises:
            InputError: the learner would refuse it, or the idempotency key stands for another
                batch; nothing was changed.
            BusyError: too much is waiting; nothing was changed.
            StoppedError: learning is stopped; nothing was changed.
            StorageError: it could not be written; nothing was changed.
        """
        token = token_of(idempotency_key)
        if token is not None and request is None:
            request = request_of(x, y, sample_weight, keys, train)
        with self._admitting:
            known = self.repeated(idempotency_key, request)
            if known is None:
                self._check_able()
                event = self._admitted(x, y, sample_weight, keys, train, token)
                ticket, place = self._enqueue(event, request)
        if known is not None:
            return known
        self._commits.wait(place)
        return ticket

    def repeated(self, idempotency_key: str | None, request: bytes | None) -> Ticket | None:
        """The event that an idempotency key stands for; None if the key is new.

        Raises:
            InputError: the key stands for another request.
        """
        token = token_of(idempotency_key)
        if token is None:
            return None
        with self._ordering:
            waiting = self._tokens.get(token)
        if waiting is not None:
            self._commits.wait(waiting[1])
        found = self.log.by_token(token)
        if found is None:
            return None
        sequence, known = found
        if None not in (known, request) and known != request:
            raise ConflictError(
                f"idempotency_key={idempotency_key!r} was given with another batch (event "
                f"{sequence}); give every batch a key of its own."
            )
        with self._moved:
            ticket = self._tickets.get(sequence)
        if ticket is None:
            ticket = Ticket(sequence, Event(LEARN))
            ticket.applied.set_result(self.outcome(sequence))
        return Ticket(sequence, ticket.event, repeated=True, applied=ticket.applied)

    def outcome(self, sequence: int) -> Outcome:
        """What became of an event; only its sequence and kind if that is not known any more."""
        with self._applying:
            for outcome in self._outcomes:
                if outcome.sequence == sequence:
                    return outcome
        return self.log.outcome(sequence) or Outcome(sequence, LEARN)

    def forget(
        self, *, label: Any = None, ids: Iterable[int] | None = None, key: str | None = None
    ) -> Outcome:
        """Delete examples from the memory, from all kept snapshots and from all kept events.

        What the weights have learned stays in them (docs/replay.md). Data of earlier events is
        dropped, and with it the ways back to moments between snapshots.

        Args:
            label: all examples of that label.
            ids: single examples (`Outcome.ids`).
            key: all examples that were given this key.
        """
        with self._at_rest():
            with self._applying:
                self._flush()
            event = deletion.forgetting(self.learner, self.log, label, ids, key)
            outcome = self._commit(event)
        if self._owed is not None:
            raise StorageError(
                f"the examples are deleted from the memory, but not yet from the disk "
                f"({self._owed}); that is done with the next snapshot() that can be written."
            )
        return outcome

    def rollback(self, to: int | Snapshot, reason: str | None = None) -> Outcome:
        """Go back to an earlier state; history keeps everything, and this too.

        Examples learned since then are not in the memory any more. A stop ends.

        Args:
            to: a snapshot, or the sequence of an event of which the data is still there.
            reason: a word for the history.
        """
        sequence = to.sequence if isinstance(to, Snapshot) else to
        with self._at_rest():
            base = self._way_back(sequence)
            note = f"to {sequence}" + (f": {reason}" if reason else "")
            return self._commit(Event(ROLLBACK, {"to": sequence, "base": base}, note))

    def stop(self, reason: str) -> Outcome:
        """Refuse to learn until `resume` or `rollback`."""
        with self._at_rest():
            return self._commit(Event(STOP, note=reason))

    def resume(self) -> Outcome:
        """Learn again after a stop."""
        with self._at_rest():
            return self._commit(Event(RESUME))

    def snapshot(self) -> Snapshot:
        """Write a snapshot of the learner as it is now."""
        with self._applying:
            self._check_failure()
            self._write_snapshot()
            self._complete_deletions()
            self._owed = None
            return self.versions()[0]

    # --- looking ----------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Events on disk that are not applied yet."""
        return len(self._queue)

    @property
    def lag(self) -> float:
        """Seconds that the oldest event that waits is waiting."""
        with self._moved:
            return time.monotonic() - self._queue[0].since if self._queue else 0.0

    def versions(self) -> list[Snapshot]:
        """All snapshots, newest first."""
        known = self.log.snapshots()
        found = []
        for sequence in self.snapshots.sequences():
            when, good, _ = known.get(sequence, (0.0, False, ()))
            path, size = self.snapshots.path(sequence), self.snapshots.nbytes(sequence)
            found.append(Snapshot(sequence, path, size, when, good))
        return found

    def history(self) -> list[tuple[int, str, float, str | None, bool]]:
        """Every deletion, rollback, stop and resume: sequence, kind, time, note, data kept."""
        return self.log.kinds((FORGET, ROLLBACK, STOP, RESUME))

    def audit(self, key: str) -> list[str]:
        """Where examples with a key are to be found: empty after `forget(key=...)`.

        Reads the keys, the data of every kept event, the memory and every snapshot, and looks for
        all other examples that were ever deleted too.
        """
        with self._admitting, self._applying:
            self._flush()
            deleted = self.log.deleted()
            return deletion.findings(self.learner, self.log, self.snapshots, key, deleted)

    def fingerprint(self) -> str:
        """A digest of the learner's whole state: equal for learners that go on alike."""
        with self._applying:
            return hashlib.sha256(to_bytes(self.learner.state_dict())).hexdigest()

    def predict(self, x: Any) -> NDArray[Any]:
        """See `Learner.predict`."""
        return self.learner.predict(x)

    def predict_proba(self, x: Any) -> Tensor:
        """See `Learner.predict_proba`."""
        return self.learner.predict_proba(x)

    # --- the learner thread -----------------------------------------------------------------------

    def start(self, on_applied: Callable[[Outcome], None] = lambda outcome: None) -> None:
        """Apply events on a thread of their own from now on, until `close`.

        Args:
            on_applied: called on that thread after every event, before those who wait are told.
        """
        threads = torch.get_num_threads()
        self._on_applied = on_applied

        def work() -> None:
            torch.set_num_threads(threads)
            while True:
                with self._moved:
                    while not self._queue and not self._closing:
                        self._moved.wait()
                    if self._closing or self.failure is not None:
                        return
                if self._apply_next() is None:
                    return

        self._worker = threading.Thread(target=work, name="proxreplay-learner", daemon=True)
        self._worker.start()

    def _finish(self, ticket: Ticket) -> Outcome:
        """Wait until an event is applied; apply it here if no thread does."""
        while self._worker is None and not ticket.applied.done():
            with self._applying:
                if not ticket.applied.done() and self._apply_next() is None:
                    break
        if self._worker is None and self._tripped and self.failure is None:
            self._drain()  # what the guard does
        outcome = ticket.applied.result()
        if outcome.refused is not None:
            raise (DivergenceError if outcome.diverged else InputError)(outcome.refused)
        return outcome

    def _apply_next(self) -> Outcome | None:
        """Apply the oldest event that waits; None if that cannot be done any more."""
        with self._applying:
            ticket = self._queue[0]
            try:
                self._check_failure()
                outcome = self._apply(ticket.sequence, ticket.event)
                self._note(outcome)
                self._after(ticket.event, outcome)
                self._on_applied(outcome)
            except BaseException as error:
                self.failure = f"event {ticket.sequence} could not be applied: {error!r}"
                log.critical("%s: %s", self.folder, self.failure)
                self._fail_waiting()
                if not isinstance(error, Exception):
                    raise
                return None
            with self._moved:
                self._queue.popleft()
                self._queue_bytes -= ticket.nbytes
                self._tickets.pop(ticket.sequence, None)
                self._moved.notify_all()
        ticket.applied.set_result(outcome)
        return outcome

    def _fail_waiting(self) -> None:
        """Tell those who wait that nothing is applied any more; their events stay on disk."""
        with self._moved:
            for waiting in self._queue:
                if not waiting.applied.done():
                    waiting.applied.set_exception(StoppedError(self._stop_message()))
            self._moved.notify_all()

    def _apply(self, sequence: int, event: Event) -> Outcome:
        """Change the learner; the same when an event is replayed."""
        if event.kind in (LEARN, REMEMBER):
            outcome = learn_(self.learner, sequence, event, prequential=self.options.prequential)
            self._keys += zip(event.body.get("keys", ()), outcome.ids, strict=False)
        elif event.kind == FORGET:
            outcome = forget_(self.learner, sequence, event)
        else:
            outcome = Outcome(sequence, event.kind)
            if event.kind == ROLLBACK:
                self._go_back(event.body["to"])
                self.version = sequence
                if self.guard is not None:
                    self.guard.reset()
            if event.kind != MARK:
                self.stopped = event.note if event.kind == STOP else None
        self.applied = sequence
        return outcome

    def _after(self, event: Event, outcome: Outcome) -> None:
        """What follows a live event: deletion from disk, guard, snapshot."""
        if event.kind == FORGET:
            self._try_deletions()
        if event.kind in (ROLLBACK, STOP):
            self._tripped = False
        elif self.guard is not None and event.kind in (LEARN, REMEMBER) and not self._tripped:
            reason = self.guard.judge(outcome, self.learner.labels)
            if reason is not None:
                self._trip(reason)
        due = self.applied - self._newest_snapshot >= self.options.snapshot_every
        if event.kind in (ROLLBACK, MARK) or due:
            self._try_snapshot()
        if event.kind in (ROLLBACK, FORGET):
            self._admission = None

    def _trip(self, reason: str) -> None:
        """Let the guard act, by an event of its own behind those that wait already."""
        assert self.guard is not None
        self._tripped = True
        good = [snapshot for snapshot in self.versions() if snapshot.good]
        log.warning("%s: the guard acts: %s", self.folder, reason)
        event = Event(STOP, note=f"guard: {reason}")
        if self.guard.options.action == "rollback" and good:
            to = good[0].sequence
            event = Event(ROLLBACK, {"to": to, "base": to}, f"to {to}: guard: {reason}")
        _, place = self._enqueue(event, None)
        self._commits.wait(place)

    # --- going back -------------------------------------------------------------------------------

    def _way_back(self, to: int) -> int:
        """The snapshot from which an earlier state can be made again; refused if there is none."""
        if isinstance(to, bool) or not isinstance(to, int) or not 0 <= to <= self.applied:
            raise InputError(
                f"rollback: to={to!r}; give the sequence of an event or snapshot, at most "
                f"{self.applied}."
            )
        sequences = self.snapshots.sequences()
        try:
            base, _ = self._newest_intact(to)
            for row in self.log.rows(base + 1, to):
                self._event(row)
        except CheckpointError as error:
            raise InputError(
                f"rollback: the state after event {to} is not there any more ({error}); there are "
                f"snapshots at {', '.join(map(str, sequences))}."
            ) from error
        return base

    def _go_back(self, to: int) -> None:
        """Make an earlier state again; ids of examples are not given out twice."""
        given = self.learner.memory.next_id
        base, state = self._newest_intact(to)
        self.learner.load_state_dict(state)
        for row in self.log.rows(base + 1, to):
            self._apply(row.sequence, self._event(row))
        self.learner.memory.skip_ids(given)

    def _event(self, row: Row) -> Event:
        assert row.body is not None
        body = Event.body_from(row.body, f"{self.log.path}, event {row.sequence}")
        return Event(row.kind, body, row.note, row.token)

    # --- admitting and committing -----------------------------------------------------------------

    def _check_failure(self) -> None:
        if self.failure is not None or self._closing:
            raise StoppedError(self._stop_message())

    def _stop_message(self) -> str:
        return f"{self.folder}: {self.failure or 'it is closed'}. Open the folder again."

    def _check_able(self) -> None:
        self._check_failure()
        if self.stopped is not None:
            raise StoppedError(
                f"learning is stopped ({self.stopped}); look at it, then resume or roll back."
            )
        full = len(self._queue) >= self.options.queue_events
        if full or self._queue_bytes >= self.options.queue_bytes:
            raise BusyError(
                f"{len(self._queue)} events ({self._queue_bytes} bytes) wait to be learned; come "
                "back later."
            )

    def _admitted(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        keys: str | Sequence[str] | None,
        train: bool,
        token: bytes | None,
    ) -> Event:
        """The event of a batch that the learner will take."""
        if self._admission is None:
            self._drain()
            with self._applying:
                self._admission = Admission(self.learner)
        try:
            inputs, labels, weights = self._admission.admit(
                x, y, sample_weight, lambda n: keys_of(keys, n)
            )
        except InputError:
            raise
        except BaseException:
            self._admission = None
            raise
        event = learning(inputs, labels, weights, keys_of(keys, len(labels)), train=train)
        return Event(event.kind, event.body, token=token)

    def _enqueue(self, event: Event, request: bytes | None) -> tuple[Ticket, Any]:
        """Give an event its number and a place in the next write."""
        try:
            body = event.to_bytes()
        except BaseException:
            self._admission = None  # it counts on a batch that will not come
            raise
        with self._ordering:
            self._check_failure()
            sequence = self._next
            now = max(self._clock(), self._newest_time())
            row = Row(sequence, event.kind, now, event.token, request, event.note, body)
            ticket = Ticket(sequence, event, nbytes=len(body))
            place = self._commits.enqueue((row, ticket))
            self._next, self._time = sequence + 1, now
            if event.token is not None:
                self._tokens[event.token] = (ticket, place)
        return ticket, place

    def _newest_time(self) -> float:
        """The clock may go back; the time of events does not."""
        if not hasattr(self, "_time"):
            self._time = self.log.newest_time()
        return self._time

    def _write(self, items: Sequence[tuple[Row, Ticket]]) -> None:
        """Put events on disk and behind those that wait; one thread at a time is in here."""
        self.log.append([row for row, _ in items])
        with self._moved:
            for row, ticket in items:
                self._queue.append(ticket)
                self._queue_bytes += ticket.nbytes
                self._tickets[row.sequence] = ticket
            self._moved.notify_all()
        with self._ordering:
            for row, _ in items:
                if row.token is not None:
                    self._tokens.pop(row.token, None)
        if self.failure is not None:
            self._fail_waiting()

    def _on_failure(self) -> None:
        """Nothing that waits was written: numbers start again, and so does admission."""
        with self._ordering:
            self._next = self.log.last + 1
            self._tokens.clear()
        self._admission = None

    def _commit(self, event: Event) -> Outcome:
        ticket, place = self._enqueue(event, None)
        self._commits.wait(place)
        outcome = self._finish(ticket)
        self._drain()
        self._admission = None
        return outcome

    def _at_rest(self) -> ExitStack:
        """Hold admission, with everything applied that was let in before."""
        held = ExitStack()
        held.enter_context(self._admitting)
        try:
            self._check_failure()
            self._drain()
        except BaseException:
            held.close()
            raise
        return held

    def _drain(self) -> None:
        """Return when every event that is on disk is applied."""
        if self._worker is None:
            while self._queue and self._apply_next() is not None:
                pass
        with self._moved:
            while self._worker is not None and self._queue and self.failure is None:
                self._moved.wait()
        self._check_failure()

    # --- snapshots and budgets --------------------------------------------------------------------

    @property
    def _newest_snapshot(self) -> int:
        return max(self.snapshots.sequences(), default=0)

    def _note(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        if len(self._outcomes) >= OUTCOMES_PER_WRITE:
            self._flush()

    def _flush(self) -> None:
        """Write outcomes and keys that are not written yet."""
        if self._outcomes or self._keys:
            self.log.note_outcomes(self._outcomes, self._keys)
            self._outcomes, self._keys = [], []

    def _try_deletions(self) -> None:
        """Delete from disk; if that fails, it is owed and tried again at the next snapshot."""
        try:
            self._complete_deletions()
            self._owed = None
        except (CheckpointError, StorageError) as error:
            self._owed = str(error)
            log.error("a deletion is not complete on disk: %s", error)

    def _try_snapshot(self) -> None:
        """Write a snapshot; if that fails, learning goes on and the events are kept."""
        try:
            self._write_snapshot()
            if self._owed is not None:
                self._try_deletions()
        except (CheckpointError, StorageError) as error:
            self.snapshot_failure = str(error)
            log.error("no snapshot was written, the events are kept: %s", error)

    def _write_snapshot(self) -> None:
        self._flush()
        self.snapshots.save(self.learner, self.applied, torch.get_num_threads())
        ids = self.learner.memory.ids.tolist()
        now = max(self._clock(), self._newest_time())
        self.log.note_snapshot(self.applied, now, not self._tripped and not self.stopped, ids)
        self.version, self.snapshot_failure = self.applied, None
        self._keep_to_budget(now)

    def _keep_to_budget(self, now: float) -> None:
        """Drop snapshots, data of events and history that nobody needs."""
        known, sequences = self.log.snapshots(), self.snapshots.sequences()
        floor = sequences[:2][-1]
        for sequence, _, _, _, there in self.log.kinds((ROLLBACK,)):
            if sequence > floor and there:
                row = self.log.row(sequence)
                assert row is not None
                floor = min(floor, self._event(row).body["base"])
        kept = [
            budget.Kept(s, known[s][0] if s in known else 0.0, self.snapshots.nbytes(s))
            for s in sequences
        ]
        good = [s for s in sequences if s in known and known[s][1]][:1]
        bodies = [budget.Kept(*row) for row in self.log.sizes()]
        gone = budget.plan(kept, bodies, self.options, now=now, floor=floor, pinned=good)
        if gone.bodies_through:
            self.log.drop_bodies(gone.bodies_through)
        if gone.snapshots:
            self.snapshots.remove(list(gone.snapshots))
            self.log.drop_snapshots(gone.snapshots)
            self._drop_dead_keys()
        history = min(floor, self.log.last - self.options.keep_history)
        if history > 0:
            self.log.drop_history(history)

    def _drop_dead_keys(self) -> None:
        """Forget the keys of examples that are nowhere any more."""
        alive = set(self.learner.memory.ids.tolist())
        for _, _, ids in self.log.snapshots().values():
            alive.update(ids)
        oldest = min((sequence for sequence, _, _ in self.log.sizes()), default=self.applied + 1)
        since = self.log.first_id_since(oldest - 1)
        self.log.drop_keys(sorted(alive), self.learner.memory.next_id if since is None else since)

    def _complete_deletions(self) -> None:
        """Delete from disk what was forgotten; also what an earlier process did not come to."""
        owed = [row for row in self.log.kinds((FORGET,)) if row[4] and row[0] <= self.applied]
        if not owed:
            return
        with self._applying:
            self._write_snapshot()
            current = self.applied
            for sequence, *_ in owed:
                row = self.log.row(sequence)
                assert row is not None
                body = self._event(row).body
                threads = torch.get_num_threads()
                removed = deletion.rewrite_snapshots_(
                    self.learner, self.snapshots, self.log, current, body, threads
                )
                removed |= set(body.get("ids", ()))
                self.log.scrub(current, sorted(removed), f"{len(removed)} ids")
            self._drop_dead_keys()
            self.log.checkpoint()
        self._mark()

    def _mark(self) -> None:
        """All data before a deletion is gone: snapshot its state twice, in case one is damaged."""
        _, place = self._enqueue(Event(MARK), None)
        self._commits.wait(place)


def load_newest(folder: Path, *parts: Any, **further: Any) -> Learner:
    """The learner in the newest intact snapshot of a folder, see `Learner.load`."""
    snapshots = Snapshots(folder)
    problems = []
    for sequence in snapshots.sequences():
        try:
            return Learner.load(snapshots.path(sequence), *parts, **further)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(f"{folder}: no intact snapshot ({'; '.join(problems)}).")
    raise InputError(
        f"{folder}: no durable learner here; make one with DurableLearner(folder, learner), or "
        "proxreplay serve FOLDER --learner ..."
    )


def refuse_foreign(folder: Path) -> None:
    """Refuse a path that is something else than a durable learner, a new folder or an empty one."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is not a folder; choose another.")
    ours = {"lock", "snapshots", NAME, f"{NAME}-wal", f"{NAME}-shm", f"{NAME}-journal"}
    if folder.exists() and not (folder / NAME).exists():
        foreign = [p.name for p in folder.iterdir() if not p.name.startswith(".")]
        if set(foreign) - ours:
            raise InputError(f"{folder} is not empty and holds no durable learner; choose another.")
