"""A learner that survives: every change is an event on disk before it is applied.

submit -> admission -> line (numbered, on disk, waiting) -> timeline (applied) -> guard
                                                              '-> keeping (snapshots, budgets)
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray
from torch import Tensor

from proxreplay.batch import length
from proxreplay.errors import ConflictError, InputError, StoppedError, StorageError
from proxreplay.options import DurableOptions, GuardOptions
from proxreplay.replay.learner import Learner
from proxreplay.serving import deletion, events
from proxreplay.serving.admission import Admission
from proxreplay.serving.events import Event, Keys, Outcome, request_of, token_of
from proxreplay.serving.folder import hold, load_newest
from proxreplay.serving.keeping import Keeping
from proxreplay.serving.kept import KeptInputs
from proxreplay.serving.line import Line, Ticket
from proxreplay.serving.log import NAME, EventLog
from proxreplay.serving.snapshots import Snapshot, Snapshots
from proxreplay.serving.timeline import Timeline, fingerprint
from proxreplay.serving.worker import Worker


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
    >>> import torch
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
        self.options = options = options or DurableOptions()
        self.snapshots = Snapshots(self.folder)
        self._admitting = threading.RLock()  # the order in which batches are let in
        self._admission: Admission | None = None
        with hold(self.folder) as held:
            self.log = EventLog(self.folder / NAME)
            held.callback(self.log.database.close)
            self.kept = KeptInputs(self.log.database, options.kept_inputs, options.kept_bytes)
            self._line = Line(self.log, clock, self._start_admission_again)
            self._timeline = Timeline(
                learner, self.log, self.snapshots, prequential=options.prequential
            )
            self._keeping = Keeping(self._timeline, options)
            self._worker = Worker(
                self._line, self._timeline, self._keeping, guard, self._start_admission_again
            )
            self._worker.restore()
            self._held = held.pop_all()

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

    def close(self) -> None:
        """Finish what is being applied and let go of the folder; what waits stays on disk."""
        self._line.close()
        self._worker.stop()
        with self._admitting, self._worker.applying, self._held:
            self._line.refuse()
            if self.log.database.broken is None and self.failure is None:
                self._timeline.try_flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- changing ---------------------------------------------------------------------------------

    def learn(
        self,
        x: Any,
        y: Any,
        *,
        sample_weight: Any = None,
        keys: Keys = None,
        idempotency_key: str | None = None,
        train: bool = True,
    ) -> Outcome:
        """Learn from a batch: it is on disk, then applied.

        Args:
            x: see `Learner.learn`.
            y: see `Learner.learn`.
            sample_weight: see `Learner.learn`.
            keys: by which the examples can be deleted; one each, or one for all.
            idempotency_key: a second call with the same key adds nothing.
            train: False only remembers the batch, as `Learner.remember` does.

        Raises:
            DivergenceError: a step was not finite; the event stays in the history and is refused
                again whenever it is replayed. Other errors: see `submit`.
        """
        further: dict[str, Any] = {"keys": keys, "idempotency_key": idempotency_key, "train": train}
        return self._worker.finish(self.submit(x, y, sample_weight=sample_weight, **further))

    def remember(self, x: Any, y: Any, **further: Any) -> Outcome:
        """Put a batch into the memory without learning from it; arguments as for `learn`."""
        return self.learn(x, y, train=False, **further)

    def submit(
        self,
        x: Any,
        y: Any,
        *,
        sample_weight: Any = None,
        keys: Keys = None,
        idempotency_key: str | None = None,
        train: bool = True,
        kept: str | None = None,
        request: bytes | None = None,
    ) -> Ticket:
        """Put a batch on disk; it is applied after all that came before.

        Arguments as for `learn`. ``kept`` is the id of inputs that are kept (see `keep`), instead
        of ``x``; ``request`` a digest of what the caller was asked for, None for that of the
        arguments.

        Raises:
            UnknownIdError: no input is kept under the id.
            InputError: the learner would refuse it, or the idempotency key stands for another
                batch; nothing was changed.
            BusyError: too much is waiting; nothing was changed.
            StoppedError: learning is stopped; nothing was changed.
            StorageError: it could not be written; nothing was changed.
        """
        token = token_of(idempotency_key)
        if token is not None and request is None:
            request = request_of(x, y, sample_weight, keys, train, kept)
        with ExitStack() as held:
            with self._admitting:
                known = self.repeated(idempotency_key, request)
                if known is not None:
                    return known
                self._check_able()
                number = None
                if kept is not None:
                    number, x = held.enter_context(self.kept.taken(kept))
                with self._judging() as admission:
                    event = admission.admit(x, y, sample_weight, keys, train=train, token=token)
                    place = self._line.put(event, request, number)
            return self._line.wait(place)

    def keep(self, identity: str, x: Any) -> None:
        """Keep inputs on disk until their labels arrive: ``submit(None, y, kept=identity)``.

        Args:
            identity: stands for the inputs; what it stood for before is replaced. They can be
                deleted by it (`forget`), and it is the key of what is learned from them.
            x: see `Learner.predict`.
        """
        self._line.check()
        self.kept.put(identity, self.learner.intake.check(x))

    def repeated(self, idempotency_key: str | None, request: bytes | None) -> Ticket | None:
        """The event that an idempotency key stands for; None if the key is new.

        Raises:
            InputError: the key stands for another request.
        """
        token = token_of(idempotency_key)
        if token is None:
            return None
        found = self._line.known(token)
        if found is None:
            return None
        ticket, sequence, known = found
        if None not in (known, request) and known != request:
            raise ConflictError(
                f"idempotency_key={idempotency_key!r} was given with another batch (event "
                f"{sequence}); give every batch a key of its own."
            )
        if ticket is None:
            ticket = Ticket(sequence, Event(events.LEARN))
            ticket.applied.set_result(self.outcome(sequence))
        return Ticket(sequence, ticket.event, repeated=True, applied=ticket.applied)

    def outcome(self, sequence: int) -> Outcome:
        """What became of an event; only its sequence and kind if that is not known any more."""
        with self._worker.applying:
            return self._timeline.outcome(sequence)

    def forget(
        self, *, label: Any = None, ids: Iterable[int] | None = None, key: str | None = None
    ) -> Outcome:
        """Delete examples from the memory, from all kept snapshots and from all kept events.

        What the weights have learned stays in them (docs/replay.md). Data of earlier events is
        dropped, and with it the ways back to moments between snapshots.

        Args:
            label: all examples of that label.
            ids: single examples (`Outcome.ids`).
            key: all examples that were given this key, and inputs that wait under it.
        """
        with self._at_rest(), ExitStack() as held:
            with self._worker.applying:
                self._timeline.flush()
            number, waiting = None, 0
            if key is not None and key in self.kept:
                number, inputs = held.enter_context(self.kept.taken(key))
                waiting = length(inputs)
            event = deletion.forgetting(self.learner, self.log, label, ids, key, waiting)
            outcome = self._commit(event, number)
        if self._worker.owed is not None:
            raise StorageError(
                f"the examples are deleted from the memory, but not yet from the disk "
                f"({self._worker.owed}); that is done with the next snapshot() that can be written."
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
            base = self._timeline.way_back(sequence)
            note = f"to {sequence}" + (f": {reason}" if reason else "")
            return self._commit(Event(events.ROLLBACK, {"to": sequence, "base": base}, note))

    def stop(self, reason: str) -> Outcome:
        """Refuse to learn until `resume` or `rollback`."""
        with self._at_rest():
            return self._commit(Event(events.STOP, note=reason))

    def resume(self) -> Outcome:
        """Learn again after a stop."""
        with self._at_rest():
            return self._commit(Event(events.RESUME))

    def snapshot(self) -> Snapshot:
        """Write a snapshot of the learner as it is now."""
        with self._worker.applying:
            self._line.check()
            self._worker.write_snapshot()
            self._worker.complete_deletions()
            self._worker.owed = None
            return self.versions()[0]

    # --- looking ----------------------------------------------------------------------------------

    @property
    def learner(self) -> Learner:
        """The learner itself; change it only through this class."""
        return self._timeline.learner

    @property
    def applied(self) -> int:
        """Sequence of the newest event in the learner."""
        return self._timeline.applied

    @property
    def version(self) -> int:
        """Sequence of the newest snapshot or rollback behind it."""
        return self._timeline.version

    @property
    def stopped(self) -> str | None:
        """Why learning is refused, until `resume` or `rollback`."""
        return self._timeline.stopped

    @property
    def failure(self) -> str | None:
        """Why nothing can be applied any more, until the folder is opened again."""
        return self._line.failure

    @property
    def snapshot_failure(self) -> str | None:
        """Why the newest snapshot could not be written."""
        return self._worker.snapshot_failure

    @property
    def waiting(self) -> int:
        """Events on disk that are not applied yet."""
        return len(self._line)

    @property
    def lag(self) -> float:
        """Seconds that the oldest event that waits is waiting."""
        return self._line.lag

    def __repr__(self) -> str:
        stopped = f", stopped: {self.stopped}" if self.stopped else ""
        events = f"event {self.applied} applied, {self.waiting} waiting, version {self.version}"
        return f"DurableLearner in {self.folder}: {events}{stopped}"

    def versions(self) -> list[Snapshot]:
        """All snapshots, newest first."""
        return self._keeping.versions()

    def history(self) -> list[tuple[int, str, float, str | None, bool]]:
        """Every deletion, rollback, stop and resume: sequence, kind, time, note, data kept."""
        return self.log.kinds((events.FORGET, events.ROLLBACK, events.STOP, events.RESUME))

    def audit(self, key: str) -> list[str]:
        """Where examples with a key are to be found: empty after `forget(key=...)`.

        Reads the keys, the inputs that wait, the data of every kept event, the memory and every
        snapshot, and looks for all other examples that were ever deleted too.
        """
        with self._admitting, self._worker.applying:
            self._timeline.flush()
            found = deletion.findings(self.learner, self.log, self.snapshots, key)
            return found + (["an input that waits for its labels"] if key in self.kept else [])

    def fingerprint(self) -> str:
        """A digest of the learner's whole state: equal for learners that go on alike."""
        with self._worker.applying:
            return fingerprint(self.learner)

    def predict(self, x: Any) -> NDArray[Any]:
        """See `Learner.predict`."""
        return self.learner.predict(x)

    def predict_proba(self, x: Any) -> Tensor:
        """See `Learner.predict_proba`."""
        return self.learner.predict_proba(x)

    def start(self, on_applied: Callable[[Outcome], None] = lambda outcome: None) -> None:
        """Apply events on a thread of their own from now on, until `close`.

        Args:
            on_applied: called on that thread after every event, before those who wait are told.
        """
        self._worker.start(on_applied)

    # --- admitting --------------------------------------------------------------------------------

    def _check_able(self) -> None:
        self._line.check()
        if self.stopped is not None:
            raise StoppedError(
                f"learning is stopped ({self.stopped}); look at it, then resume or roll back."
            )
        self._line.check_room(self.options)

    @contextmanager
    def _judging(self) -> Iterator[Admission]:
        """Admission as of all that waits; it starts again if a batch does not come after all."""
        if self._admission is None:
            self._worker.drain()
            with self._worker.applying:
                self._admission = Admission(self.learner)
        try:
            yield self._admission
        except InputError:  # refused before anything was noted
            raise
        except BaseException:
            self._start_admission_again()
            raise

    def _start_admission_again(self) -> None:
        """It counted on a batch that will not come, or on a learner that is another now."""
        self._admission = None

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Hold admission, with everything applied that was let in before."""
        with self._admitting:
            self._line.check()
            self._worker.drain()
            yield

    def _commit(self, event: Event, kept: int | None = None) -> Outcome:
        """Write an event and apply it; admission is held."""
        outcome = self._worker.finish(self._line.wait(self._line.put(event, kept=kept)))
        self._worker.drain()
        self._admission = None
        return outcome
