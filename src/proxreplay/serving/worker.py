"""The one who applies events: in order, on a thread of its own or on that of whoever waits."""

import logging
import threading
from collections.abc import Callable

import torch

from proxreplay.errors import CheckpointError, DivergenceError, InputError, StorageError
from proxreplay.options import GuardOptions
from proxreplay.serving import events
from proxreplay.serving.events import Event, Outcome
from proxreplay.serving.guards import Guard
from proxreplay.serving.keeping import Keeping
from proxreplay.serving.line import Line, Ticket
from proxreplay.serving.timeline import Timeline

log = logging.getLogger(__name__)


class Worker:
    """Applies what waits in a line, and does what follows: guard, snapshots, deletion from disk.

    The timeline is used with `applying` held; ``on_back`` is called when the learner was changed by
    more than learning.
    """

    def __init__(
        self,
        line: Line,
        timeline: Timeline,
        keeping: Keeping,
        guard: GuardOptions | None,
        on_back: Callable[[], None],
    ) -> None:
        self.applying = threading.RLock()  # the learner
        self.owed: str | None = None  # why a deletion is not complete on disk
        self.snapshot_failure: str | None = None
        self._line = line
        self._timeline = timeline
        self._keeping = keeping
        self._guard = None if guard is None else Guard(guard)
        self._on_back = on_back
        self._on_applied: Callable[[Outcome], None] = lambda outcome: None
        self._tripped = False
        self._thread: threading.Thread | None = None

    def restore(self) -> None:
        """Make the learner of the folder again, and complete what was interrupted."""
        if self._timeline.log.last == 0 and not self._timeline.snapshots.sequences():
            self.write_snapshot()
        else:
            window = 0 if self._guard is None else self._guard.options.window
            for outcome in self._timeline.restore(window):
                if self._guard is not None:
                    self._guard.observe(outcome)
        self.complete_deletions()
        deletions = self._timeline.log.kinds((events.FORGET, events.MARK))
        if deletions and deletions[-1][1] == events.FORGET:
            self._mark()
        self.drain()
        self._timeline.flush()

    def stop(self) -> None:
        """Return when the thread has ended; the line is closed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def start(self, on_applied: Callable[[Outcome], None]) -> None:
        """See `DurableLearner.start`."""
        threads = torch.get_num_threads()
        self._on_applied = on_applied

        def work() -> None:
            torch.set_num_threads(threads)
            while self._line.first(wait=True) is not None:
                self._apply_next()

        self._thread = threading.Thread(target=work, name="proxreplay-learner", daemon=True)
        self._thread.start()

    def finish(self, ticket: Ticket) -> Outcome:
        """Wait until an event is applied; apply it here if no thread does."""
        while self._thread is None and not ticket.applied.done():
            with self.applying:
                if not ticket.applied.done() and not self._apply_next():
                    break
        if self._thread is None and self._tripped and self._line.failure is None:
            self.drain()  # what the guard does
        outcome = ticket.applied.result()
        if outcome.refused is not None:
            raise (DivergenceError if outcome.diverged else InputError)(outcome.refused)
        return outcome

    def drain(self) -> None:
        """Return when every event that is on disk is applied."""
        while self._thread is None and self._apply_next():
            pass
        if self._thread is not None:
            self._line.wait_until_empty()
        self._line.check()

    def _apply_next(self) -> bool:
        """Apply the oldest event that waits; False if there is none, or it cannot be done."""
        with self.applying:
            ticket = self._line.first()
            if ticket is None:
                return False
            try:
                outcome = self._timeline.apply(ticket.sequence, ticket.event)
                self._timeline.note(outcome)
                self._after(ticket.event, outcome)
                self._on_applied(outcome)
            except BaseException as error:
                self._line.fail(f"event {ticket.sequence} could not be applied: {error!r}")
                log.critical("%s: %s", self._timeline.log.path.parent, self._line.failure)
                if not isinstance(error, Exception):
                    raise
                return False
            self._line.leave(ticket, outcome)
        return True

    def _after(self, event: Event, outcome: Outcome) -> None:
        """What follows a live event: deletion from disk, guard, snapshot."""
        learned = event.kind in (events.LEARN, events.REMEMBER)
        if event.kind == events.FORGET:
            self._try_deletions()
        if event.kind in (events.ROLLBACK, events.STOP):
            self._tripped = False
        if self._guard is not None and event.kind in (events.ROLLBACK, events.RESUME):
            self._guard.observe(outcome)
        elif self._guard is not None and learned and not self._tripped:
            reason = self._guard.judge(outcome, self._timeline.learner.labels)
            if reason is not None:
                self._trip(reason)
        if event.kind in (events.ROLLBACK, events.MARK) or self._keeping.due:
            self._try_snapshot()
        if event.kind in (events.ROLLBACK, events.FORGET):
            self._on_back()

    def _trip(self, reason: str) -> None:
        """Let the guard act, by an event of its own behind those that wait already."""
        assert self._guard is not None
        self._tripped = True
        good = [s.sequence for s in self._keeping.versions() if s.good]
        log.warning("%s: the guard acts: %s", self._timeline.log.path.parent, reason)
        event = Event(events.STOP, note=f"guard: {reason}")
        if self._guard.options.action == "rollback" and good:
            to = good[0]
            event = Event(events.ROLLBACK, {"to": to, "base": to}, f"to {to}: guard: {reason}")
        self._line.wait(self._line.put(event))

    # --- snapshots and deletions ------------------------------------------------------------------

    def _try_deletions(self) -> None:
        """Delete from disk; if that fails, it is owed and tried again at the next snapshot."""
        try:
            self.complete_deletions()
            self.owed = None
        except (CheckpointError, StorageError) as error:
            self.owed = str(error)
            log.error("a deletion is not complete on disk: %s", error)

    def _try_snapshot(self) -> None:
        """Write a snapshot; if that fails, learning goes on and the events are kept."""
        try:
            self.write_snapshot()
            if self.owed is not None:
                self._try_deletions()
        except (CheckpointError, StorageError) as error:
            self.snapshot_failure = str(error)
            log.error("no snapshot was written, the events are kept: %s", error)

    @property
    def _good(self) -> bool:
        content = self._guard is None or self._guard.content
        return content and not self._tripped and not self._timeline.stopped

    def write_snapshot(self) -> None:
        """Write a snapshot of the learner as it is now."""
        self._keeping.write_snapshot(self._line.now(), self._good)
        self.snapshot_failure = None

    def complete_deletions(self) -> None:
        """All data before a deletion goes: its state is written twice, in case one is damaged."""
        with self.applying:
            completed = self._keeping.complete_deletions(self._line.now(), self._good)
        if completed:
            self._mark()

    def _mark(self) -> None:
        self._line.wait(self._line.put(Event(events.MARK)))
