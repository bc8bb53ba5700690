"""What is kept: the newest snapshots and events, to a budget of number, age and bytes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from proxreplay.options import DurableOptions


@dataclass(frozen=True)
class Kept:
    """A snapshot or the data of an event: its sequence, time and bytes."""

    sequence: int
    time: float
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """What has to go.

    Args:
        snapshots: sequences of snapshots.
        bodies_through: data of events up to this sequence.
    """

    snapshots: tuple[int, ...]
    bodies_through: int


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
        floor: this snapshot, newer ones and the events after it stay whatever the budgets say.
        pinned: further snapshots that stay.

    >>> at = [Kept(n, float(n), 1) for n in (30, 20, 10, 0)]
    >>> plan(at, [], DurableOptions(keep_snapshots=2), now=30.0, floor=20)
    Plan(snapshots=(10, 0), bodies_through=0)
    """
    oldest = -float("inf") if options.keep_days is None else now - 86400 * options.keep_days
    free = [s for s in snapshots if s.sequence < floor and s.sequence not in pinned]
    beyond = {s.sequence for s in snapshots[options.keep_snapshots :]}
    gone = {s.sequence for s in free if s.sequence in beyond or s.time < oldest}
    through = 0
    for place, body in enumerate(bodies):
        if body.sequence <= floor and (place >= options.keep_events or body.time < oldest):
            through = body.sequence
            break
    if options.keep_bytes is not None:
        rest = [s for s in snapshots if s.sequence not in gone]
        rest += [b for b in bodies if b.sequence > through]
        total = sum(kept.nbytes for kept in rest)
        for kept in sorted((b for b in bodies if through < b.sequence <= floor), key=_age):
            if total <= options.keep_bytes:
                break
            total, through = total - kept.nbytes, kept.sequence
        for kept in sorted((s for s in free if s.sequence not in gone), key=_age):
            if total <= options.keep_bytes:
                break
            total -= kept.nbytes
            gone.add(kept.sequence)
    return Plan(tuple(s.sequence for s in snapshots if s.sequence in gone), through)


def _age(kept: Kept) -> int:
    return kept.sequence
