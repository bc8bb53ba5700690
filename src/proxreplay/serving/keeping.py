"""What stays on disk: snapshots, within a budget, and nothing of what was deleted."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from proxreplay.options import DurableOptions
from proxreplay.serving import deletion
from proxreplay.serving.events import FORGET, ROLLBACK
from proxreplay.serving.snapshots import Snapshot
from proxreplay.serving.timeline import Timeline


class Keeping:
    """Writes snapshots of a learner and removes what is not needed or not wanted any more."""

    def __init__(self, timeline: Timeline, options: DurableOptions) -> None:
        self._now = timeline
        self._log, self._snapshots = timeline.log, timeline.snapshots
        self._options = options

    @property
    def due(self) -> bool:
        """Whether there are enough events for another snapshot."""
        newest = max(self._snapshots.sequences(), default=0)
        return self._now.applied - newest >= self._options.snapshot_every

    def versions(self) -> list[Snapshot]:
        """All snapshots, newest first."""
        known = self._log.snapshots()
        found = []
        for sequence in self._snapshots.sequences():
            when, good, _ = known.get(sequence, (0.0, False, ()))
            path, size = self._snapshots.path(sequence), self._snapshots.nbytes(sequence)
            found.append(Snapshot(sequence, path, size, when, good))
        return found

    def write_snapshot(self, time: float, good: bool) -> None:
        """Write a snapshot (``good`` if the guard is content); drop what exceeds the budgets."""
        now = self._now
        now.flush()
        self._snapshots.save(now.learner, now.applied, torch.get_num_threads())
        self._log.note_snapshot(now.applied, time, good, now.learner.memory.ids.tolist())
        now.version = now.applied
        self._keep_to_budget(time)

    def _keep_to_budget(self, time: float) -> None:
        """Drop snapshots, data of events and history that nobody needs."""
        known, sequences = self._log.snapshots(), self._snapshots.sequences()
        older = sequences[:2][-1]
        bases = {older}  # what opening the folder may begin with
        for sequence, _, _, _, there in self._log.kinds((ROLLBACK,)):
            if sequence > older and there:
                bases.add(self._log.event(sequence).body["base"])
        kept = [
            Kept(s, known[s][0] if s in known else 0.0, self._snapshots.nbytes(s))
            for s in sequences
        ]
        good = [s for s in sequences if s in known and known[s][1]][:1]
        bodies, floor = [Kept(*row) for row in self._log.sizes()], min(bases)
        gone = plan(kept, bodies, self._options, now=time, floor=floor, pinned=bases.union(good))
        if gone.bodies_through:
            self._log.drop_bodies(gone.bodies_through)
        if gone.snapshots:
            self._snapshots.remove(list(gone.snapshots))
            self._log.drop_snapshots(gone.snapshots)
            self._drop_dead_keys()
        history = min(floor, self._log.last - self._options.keep_history)
        if history > 0:
            self._log.drop_history(history)

    def _drop_dead_keys(self) -> None:
        """Forget the keys of examples that are nowhere any more."""
        memory = self._now.learner.memory
        alive = set(memory.ids.tolist())
        for _, _, ids in self._log.snapshots().values():
            alive.update(ids)
        bodies = (sequence for sequence, _, _ in self._log.sizes())
        since = self._log.first_id_since(min(bodies, default=self._now.applied + 1) - 1)
        self._log.drop_keys(sorted(alive), memory.next_id if since is None else since)

    def complete_deletions(self, time: float, good: bool) -> bool:
        """Delete from disk what was forgotten; also what an earlier process did not come to.

        Returns whether there was anything. See `write_snapshot`.
        """
        now = self._now
        owed = [row for row in self._log.kinds((FORGET,)) if row[4] and row[0] <= now.applied]
        if not owed:
            return False
        self.write_snapshot(time, good)
        for sequence, *_ in owed:
            body = self._log.event(sequence).body
            threads = torch.get_num_threads()
            removed = deletion.rewrite_snapshots_(
                now.learner, self._snapshots, self._log, now.applied, body, threads
            )
            removed |= set(body.get("ids", ()))
            self._log.scrub(now.applied, sorted(removed), f"{len(removed)} ids")
        self._drop_dead_keys()
        self._log.database.checkpoint()
        return True


@dataclass(frozen=True)
class Kept:
    """A snapshot or the data of an event: its sequence, time and bytes."""

    sequence: int
    time: float
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """What has to go."""

    snapshots: tuple[int, ...]  # sequences of snapshots
    bodies_through: int  # data of events up to this sequence


def plan(
    snapshots: Sequence[Kept],
    bodies: Sequence[Kept],
    options: DurableOptions,
    *,
    now: float,
    floor: int,
    pinned: Collection[int] = (),
) -> Plan:
    """What exceeds the budgets.

    Args:
        snapshots: newest first.
        bodies: data of events, newest first.
        options: the budgets.
        now: in seconds.
        floor: events after it stay whatever the budgets say, and so does the newest snapshot.
        pinned: further snapshots that stay.

    >>> at = [Kept(n, float(n), 1) for n in (300, 200, 101, 100, 0)]
    >>> plan(at, [], DurableOptions(keep_snapshots=3), now=300.0, floor=200, pinned=[200])
    Plan(snapshots=(101, 0), bodies_through=0)
    """
    oldest = -float("inf") if options.keep_days is None else now - 86400 * options.keep_days
    free = [s for s in snapshots[1:] if s.sequence not in pinned]
    gone = {s.sequence for s in free if s.time < oldest}
    left = [s.sequence for s in snapshots if s.sequence not in gone]
    gone |= _too_many(left, {s.sequence for s in free}, options)
    through = 0
    for place, body in enumerate(bodies):
        if body.sequence <= floor and (place >= options.keep_events or body.time < oldest):
            through = body.sequence
            break
    if options.keep_bytes is not None:
        rest = [s for s in snapshots if s.sequence not in gone]
        rest += [b for b in bodies if b.sequence > through]
        total, age = sum(kept.nbytes for kept in rest), attrgetter("sequence")
        for kept in sorted((b for b in bodies if through < b.sequence <= floor), key=age):
            if total <= options.keep_bytes:
                break
            total, through = total - kept.nbytes, kept.sequence
        for kept in sorted((s for s in free if s.sequence not in gone), key=age):
            if total <= options.keep_bytes:
                break
            total -= kept.nbytes
            gone.add(kept.sequence)
    return Plan(tuple(s.sequence for s in snapshots if s.sequence in gone), through)


def _too_many(sequences: Sequence[int], free: Collection[int], options: DurableOptions) -> set[int]:
    """Those close to their neighbours, as deletions and rollbacks write them; then the oldest.

    The newest come first; only those that are ``free`` may go.
    """
    left = list(sequences)
    while len(left) > options.keep_snapshots and (may := [s for s in left if s in free]):
        gaps = {
            s: after - before for after, s, before in zip(left, left[1:], left[2:], strict=False)
        }
        close = [s for s in may if gaps.get(s, math.inf) < 2 * options.snapshot_every]
        left.remove(min(close, key=gaps.__getitem__, default=may[-1]))
    return set(sequences).difference(left)
