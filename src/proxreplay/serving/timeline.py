"""A learner and its history: made again from a snapshot and events, changed, taken back."""

import hashlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from proxreplay.errors import (
    CheckpointError,
    DivergenceError,
    InputError,
    ProxreplayError,
    StorageError,
)
from proxreplay.replay.learner import Learner
from proxreplay.serialization import to_bytes
from proxreplay.serving import events
from proxreplay.serving.events import Event, Outcome
from proxreplay.serving.log import EventLog
from proxreplay.serving.snapshots import Snapshots

OUTCOMES_PER_WRITE = 50  # those not written yet are made again by replaying
log = logging.getLogger(__name__)


class Timeline:
    """A learner at one moment of its history; one thread at a time may use it.

    If ``prequential``, it predicts every batch before it is learned.
    """

    def __init__(
        self, learner: Learner, log: EventLog, snapshots: Snapshots, *, prequential: bool
    ) -> None:
        self.learner = learner
        self.log = log
        self.snapshots = snapshots
        self.applied = 0  # sequence of the newest event in the learner
        self.version = 0  # sequence of the newest snapshot or rollback behind it
        self.stopped: str | None = None  # why learning is refused
        self._prequential = prequential
        self._outcomes: list[Outcome] = []  # not written yet
        self._keys: list[tuple[str, int]] = []

    def restore(self, window: int) -> Iterator[Outcome]:
        """The newest intact snapshot and the events after it.

        Args:
            window: how many earlier outcomes to tell of, too; those before a rollback or resume do
                not count.
        """
        latest = max(self.snapshots.sequences(), default=0)
        if latest > self.log.last:
            raise CheckpointError(
                f"{self.log.path}: its newest event is {self.log.last}, but there is a snapshot of "
                f"event {latest}, so events are missing; restore both from one copy, or go on "
                f"without them: remove the snapshots after {self.log.last}."
            )
        base, state = self._newest_intact(self.log.last)
        self.learner.load_state_dict(state)
        self.applied = self.version = base
        anew = max((row[0] for row in self.log.kinds((events.ROLLBACK, events.RESUME))), default=0)
        for outcome in self.log.outcomes(window):
            if anew < outcome.sequence <= base:
                yield outcome
        threads = state["durable"].get("threads")
        if self.log.last > base and threads != torch.get_num_threads():
            log.warning(
                "%s was written with %s threads and is replayed with %d: the last bits may differ",
                *(self.log.path.parent, threads, torch.get_num_threads()),
            )
        for sequence in range(base + 1, self.log.last + 1):
            outcome = self.apply(sequence, self.log.event(sequence))
            self.note(outcome)
            yield outcome
        newest = self.log.kinds((events.STOP, events.RESUME, events.ROLLBACK))[-1:]
        self.stopped = next((note for _, kind, _, note, _ in newest if kind == events.STOP), None)

    def apply(self, sequence: int, event: Event) -> Outcome:
        """Change the learner; the same when an event is replayed."""
        if event.kind in (events.LEARN, events.REMEMBER):
            outcome = _learn_(self.learner, sequence, event, prequential=self._prequential)
            self._keys += zip(event.body.get("keys", ()), outcome.ids, strict=False)
        elif event.kind == events.FORGET:
            outcome = _forget_(self.learner, sequence, event)
        else:
            outcome = Outcome(sequence, event.kind)
            if event.kind == events.ROLLBACK:
                self._go_back(event.body["to"])
                self.version = sequence
            if event.kind != events.MARK:
                self.stopped = event.note if event.kind == events.STOP else None
        self.applied = sequence
        return outcome

    # --- going back -------------------------------------------------------------------------------

    def way_back(self, to: int) -> int:
        """The snapshot from which an earlier state can be made again; refused if there is none."""
        if isinstance(to, bool) or not isinstance(to, int) or not 0 <= to <= self.applied:
            raise InputError(
                f"rollback: to={to!r}; give the sequence of an event or snapshot, at most "
                f"{self.applied}."
            )
        try:
            base, _ = self._newest_intact(to)
            for sequence in range(base + 1, to + 1):
                # what it went back to may be gone
                if self.log.event(sequence).kind == events.ROLLBACK:
                    raise CheckpointError(f"event {sequence} went back itself")
        except CheckpointError as error:
            there = ", ".join(map(str, self.snapshots.sequences()))
            raise InputError(
                f"rollback: the state after event {to} is not there any more; there are snapshots "
                f"at {there}."
            ) from error
        return base

    def _go_back(self, to: int) -> None:
        """Make an earlier state again; ids of examples are not given out twice."""
        given = self.learner.memory.next_id
        base, state = self._newest_intact(to)
        self.learner.load_state_dict(state)
        for sequence in range(base + 1, to + 1):
            self.apply(sequence, self.log.event(sequence))
        self.learner.memory.skip_ids(given)

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

    # --- what became of events --------------------------------------------------------------------

    def outcome(self, sequence: int) -> Outcome:
        """What became of an event; only its sequence and kind if that is not known any more."""
        waiting = (outcome for outcome in self._outcomes if outcome.sequence == sequence)
        return next(waiting, None) or self.log.outcome(sequence) or Outcome(sequence, events.LEARN)

    def note(self, outcome: Outcome) -> None:
        """Take note of an outcome; it is written with some others, as soon as there is room."""
        self._outcomes.append(outcome)
        if len(self._outcomes) >= OUTCOMES_PER_WRITE:
            self.try_flush()

    def try_flush(self) -> None:
        """Write what is not written yet; what cannot be is made again by replaying."""
        try:
            self.flush()
        except StorageError as error:
            log.error("outcomes wait to be written: %s", error)

    def flush(self) -> None:
        """Write outcomes and keys that are not written yet."""
        if self._outcomes or self._keys:
            self.log.note_outcomes(self._outcomes, self._keys)
            self._outcomes, self._keys = [], []


def fingerprint(learner: Learner) -> str:
    """A digest of a learner's whole state: equal for learners that go on alike."""
    return hashlib.sha256(to_bytes(learner.state_dict())).hexdigest()


def _learn_(learner: Learner, sequence: int, event: Event, *, prequential: bool) -> Outcome:
    """Learn or remember a batch; what the learner refuses, it refuses each time."""
    inputs, labels = event.body["inputs"], event.body["labels"]
    change = learner.learn if event.kind == events.LEARN else learner.remember
    weights = {"sample_weight": event.body["weights"]} if "weights" in event.body else {}
    try:
        hits = _predicted(learner, inputs, labels) if prequential else ()
        learned = change(inputs, labels, **weights)
    except ProxreplayError as error:
        diverged = isinstance(error, DivergenceError)
        return Outcome(sequence, event.kind, refused=str(error), diverged=diverged)
    return Outcome(
        sequence,
        event.kind,
        loss=learned.loss if event.kind == events.LEARN else None,
        ids=learned.ids,
        classes=tuple(learner.intake.labels.find(labels).tolist()),
        hits=hits,
        refreshed=learned.refreshed,
    )


def _predicted(learner: Learner, inputs: Any, labels: Any) -> tuple[bool, ...]:
    """Whether each label is what the learner predicts now; empty while it knows no label."""
    known = learner.intake.labels
    if known.kind == "unknown" or not known.met:
        return ()
    truth = labels.tolist() if isinstance(labels, Tensor) else labels
    return tuple(a == b for a, b in zip(learner.predict(inputs).tolist(), truth, strict=True))


def _forget_(learner: Learner, sequence: int, event: Event) -> Outcome:
    """Delete examples from the memory of a learner."""
    body = dict(event.body)
    waiting = body.pop("waiting", 0)
    try:
        removed = learner.forget(**body)
    except ProxreplayError as error:
        return Outcome(sequence, event.kind, refused=str(error))
    return Outcome(sequence, event.kind, removed=removed + waiting)
