"""Power fails at any operation of SQLite or Python: what was acknowledged is there, exactly once.

One history (batches, a rollback, a deletion, snapshots) is recorded on a disk that remembers. Then
the folder is opened as a power loss would have left it, with everything lost, torn or zeroed that
was not synced. ``PROXREPLAY_CRASHES=all`` tries every operation.
"""

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from proxreplay.errors import ProxreplayError
from proxreplay.options import DurableOptions
from proxreplay.serving import DurableLearner
from tests.disk import after_kill, after_power_loss
from tests.serving.lossy import Lossy, sqlite_library
from tests.serving.streams import batches, make

EXHAUSTIVE = os.environ.get("PROXREPLAY_CRASHES") == "all"
SAMPLE = 10
OPTIONS = DurableOptions(snapshot_every=4, keep_snapshots=3, keep_events=6)
pytestmark = pytest.mark.skipif(
    sqlite_library() is None, reason="Python's sqlite3 has SQLite inside; its writes are not seen"
)


class History:
    """What was done, what was acknowledged after how many operations, and the state after each."""

    def __init__(self, root: Path) -> None:
        self.acknowledged: list[tuple[int, int]] = []  # operations, sequence
        self.states: dict[int, str] = {}
        self.kept: list[tuple[int, str]] = []  # operations, id
        self.deleted: list[int] = []  # operations after which the deletion was acknowledged
        root.mkdir()
        self.recorder = Lossy(root)
        with self.recorder():
            with DurableLearner(root / "d", make(), options=OPTIONS) as durable:
                self.note(durable)
                for i, (x, y) in enumerate(batches(11)):
                    durable.learn(x, y, keys=f"key {i}", idempotency_key=f"batch {i}")
                    self.note(durable)
                    if i % 3 == 0:
                        durable.keep(f"id {i}", x + 1)
                        self.kept.append((len(self.recorder.operations), f"id {i}"))
                durable.submit(None, batches(11)[0][1], kept="id 0")  # event 12
                durable._worker.drain()
                self.note(durable)
                durable.rollback(8)
                self.note(durable)
            with DurableLearner(root / "d", make(), options=OPTIONS) as durable:
                self.note(durable)
                durable.forget(key="key 3")
                self.deleted.append(len(self.recorder.operations))
                self.note(durable)
                self.states[14] = self.states[15]  # the deletion, and the mark after it
                for x, y in batches(6, seed=1):
                    durable.learn(x, y)
                    self.note(durable)
        self.count = len(self.recorder.operations)

    def note(self, durable: DurableLearner) -> None:
        self.acknowledged.append((len(self.recorder.operations), durable.applied))
        self.states[durable.applied] = durable.fingerprint()

    def check(self, place: Path, count: int) -> None:
        """The folder opens with all that was acknowledged, as one of the states there were."""
        least = max((s for at, s in self.acknowledged if at <= count), default=0)
        with DurableLearner(place / "d", make(), options=OPTIONS) as durable:
            now = durable.applied
            assert now >= least
            assert durable.fingerprint() == self.states[now]
            for at, identity in self.kept:
                learned = identity == "id 0" and now >= 12
                if at <= count or learned:
                    assert (identity in durable.kept) != learned
            if self.deleted[0] <= count:
                assert durable.audit("key 3") == []
            for i in range(min(least, 11)):
                again = durable.submit(
                    *batches(11)[i], keys=f"key {i}", idempotency_key=f"batch {i}"
                )
                assert (again.repeated, again.sequence) == (True, i + 1)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    return History(tmp_path_factory.mktemp("lossy") / "disk")


def sample(count: int, seed: int) -> list[int]:
    if EXHAUSTIVE:
        return list(range(count + 1))
    return sorted(random.Random(seed).sample(range(count + 1), SAMPLE))


def attempt(history: History, place: Path, count: int, disk: Any) -> None:
    disk.write_to(place)
    history.check(place, count)
    shutil.rmtree(place)


def test_the_recording_sees_sqlite(history: History) -> None:
    kinds = {operation.kind for operation in history.recorder.operations}
    assert kinds >= {"create", "write", "fsync", "fsync-folder", "rename", "unlink", "truncate"}
    assert len(history.states) == 22
    assert history.count > 300


def test_a_power_loss_at_any_operation(history: History, tmp_path: Path) -> None:
    for count in sample(history.count, 1):
        disk = after_power_loss(history.recorder, count, random.Random(count))
        attempt(history, tmp_path / "disk", count, disk)


def test_a_kill_at_any_operation(history: History, tmp_path: Path) -> None:
    for count in sample(history.count, 2):
        attempt(history, tmp_path / "disk", count, after_kill(history.recorder, count))


def test_an_event_that_is_not_synced_is_lost(history: History, tmp_path: Path) -> None:
    """The disk of the tests does lose what is not synced: without syncs nothing survives."""
    unsynced = Lossy(tmp_path)
    unsynced.disk = history.recorder.disk
    unsynced.operations = [o for o in history.recorder.operations if "sync" not in o.kind]
    lost = 0
    for seed in range(5):
        disk = after_power_loss(unsynced, len(unsynced.operations), random.Random(seed))
        try:
            attempt(history, tmp_path / str(seed), history.count, disk)
        except (AssertionError, KeyError, ProxreplayError):
            lost += 1
    assert lost > 2
