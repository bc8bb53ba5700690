"""Deletion that can be proved: from memory, snapshots, events, free pages and the log."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from proxreplay.errors import CheckpointError, InputError
from proxreplay.serving.events import Event
from proxreplay.serving.log import EventLog
from proxreplay.serving.snapshots import Snapshots

if TYPE_CHECKING:
    from proxreplay.replay.learner import Learner


def rewrite_snapshots_(
    learner: "Learner",
    snapshots: Snapshots,
    log: EventLog,
    current: int,
    body: dict[str, Any],
    threads: int,
) -> set[int]:
    """Delete examples from every snapshot that holds them; the learner is left as it is.

    A snapshot that cannot be read cannot be shown to be clean, so it is removed. ``current`` is the
    newest one, which is clean; the learner has its state, and is lent to older ones. ``body`` is
    that of the deletion: ``ids`` or ``label``. Returns the ids of what was deleted.
    """
    known, removed = log.snapshots(), set[int]()
    with learner._lock:
        try:
            for sequence in snapshots.sequences():
                if sequence >= current:
                    continue
                try:
                    state = snapshots.load(sequence)
                except CheckpointError:
                    snapshots.remove([sequence])
                    log.drop_snapshots([sequence])
                    continue
                concerned = _within(state, body)
                if concerned is None:
                    continue
                learner.load_state_dict(state)
                learner.forget(**concerned)
                removed |= ids_in(state).difference(learner.memory.ids.tolist())
                snapshots.save(learner, sequence, threads)
                time, good, _ = known.get(sequence, (0.0, False, ()))
                log.note_snapshot(sequence, time, good, learner.memory.ids.tolist())
        finally:
            learner.load_state_dict(snapshots.load(current))
    return removed


def ids_in(state: dict[str, Any]) -> set[int]:
    """The ids of the examples in the memory of a saved learner."""
    fields = state["memory"]["fields"]
    return set(fields["id"].tolist()) if fields else set()


def _within(state: dict[str, Any], body: dict[str, Any]) -> dict[str, Any] | None:
    """A deletion as far as it concerns a snapshot; None if it does not."""
    if "ids" in body:
        ids = ids_in(state).intersection(body["ids"])
        return {"ids": sorted(ids)} if ids else None
    labels = state["learner"]["labels"]
    known = labels["names"] if labels["kind"] == "names" else labels["met"]
    return body if body["label"] in known else None


def forgetting(
    learner: "Learner",
    log: EventLog,
    label: Any,
    ids: Iterable[int] | None,
    key: str | None,
    waiting: int,
) -> Event:
    """The event of `DurableLearner.forget`; refused if there is nothing it could mean.

    It names no key. Everything is applied to the learner; ``waiting`` is how many inputs wait for
    their labels under the key.
    """
    if sum(given is not None for given in (label, ids, key)) != 1:
        raise InputError("forget: give one of label=..., ids=... and key=...")
    if label is not None:
        learner.intake.index_of(label)
        return Event("forget", {"label": label})
    if key is not None:
        found = log.ids_of(key)
        if not found and not waiting and not keyed_events(log, key):
            raise InputError(f"forget: no example has the key {key!r}.")
        return Event("forget", {"ids": found, "waiting": waiting})
    numbers = sorted(learner.memory.given_out(ids or ()))
    if not numbers:
        raise InputError("forget: ids=[]; give at least one.")
    return Event("forget", {"ids": numbers})


def keyed_events(log: EventLog, key: str) -> list[int]:
    """The sequences of events whose data names a key."""
    there = (sequence for sequence, _, _ in log.sizes())
    return sorted(s for s in there if key in log.event(s).body.get("keys", ()))


def findings(learner: "Learner", log: EventLog, snapshots: Snapshots, key: str) -> list[str]:
    """Where a key, its examples, or any example that was ever deleted is still to be found.

    All outcomes are in the log; every snapshot is read.
    """
    ids, gone = set(log.ids_of(key)), set(log.deleted())
    found = [f"the table of keys: {len(ids)} examples"] if ids else []
    found += [f"event {sequence}" for sequence in keyed_events(log, key)]
    places = [("the memory", set(learner.memory.ids.tolist()))]
    for sequence in snapshots.sequences():
        places.append((f"snapshot {sequence}", ids_in(snapshots.load(sequence))))
    for place, held in places:
        if held & ids:
            found.append(f"{place}: examples {sorted(held & ids)[:10]}")
        if held & gone:
            found.append(f"{place}: deleted examples {sorted(held & gone)[:10]}")
    return found
