"""A durable learner is the learner that was never stopped."""

import shutil
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from proxreplay.errors import (
    BusyError,
    CheckpointError,
    DivergenceError,
    InputError,
    StoppedError,
    StorageError,
)
from proxreplay.options import DurableOptions
from proxreplay.serving import DurableLearner, Follower
from proxreplay.serving.log import NAME, EventLog
from proxreplay.serving.timeline import fingerprint
from tests.serving.streams import batches, make, names, poison

FEW = DurableOptions(snapshot_every=3, keep_snapshots=3, keep_events=100)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_opened_again_after_every_event_it_is_the_learner_never_stopped(
    kind: str, tmp_path: Path
) -> None:
    twin = make(kind)
    for count, (x, y) in enumerate(batches(10), start=1):
        x = x if kind == "mlp" else x[:, None, None].expand(-1, 1, 4, -1).contiguous()
        with DurableLearner(tmp_path / "d", make(kind), options=FEW) as durable:
            durable.learn(x, y)
            twin.learn(x, y)
            assert durable.applied == count
            assert durable.fingerprint() == fingerprint(twin)
    with DurableLearner(tmp_path / "d", make(kind, seed=0), options=FEW) as durable:
        assert durable.fingerprint() == fingerprint(twin)


def test_any_input_that_a_learner_takes(tmp_path: Path) -> None:
    twin = make()
    with DurableLearner(tmp_path / "d", make(), options=DurableOptions()) as durable:
        for x, y in batches(3):
            for a, b in ((x.numpy().astype("float64"), list(names(y))), (x[0], f"class {y[0]}")):
                durable.learn(a, b)
                twin.learn(a, b)
            durable.remember(x, list(names(y)))
            twin.remember(x, list(names(y)))
            weights = [0.5, 1.0, 2.0, 3.0]
            durable.learn(x, list(names(y)), sample_weight=weights)
            twin.learn(x, list(names(y)), sample_weight=weights)
            for wrong in ([0.0, 1, 1, 1], [0.0] * 4, [1.0], [-1.0] * 4):
                with pytest.raises(InputError):
                    durable.learn(x, list(names(y)), sample_weight=wrong)
    with DurableLearner(tmp_path / "d", make()) as durable:
        assert durable.fingerprint() == fingerprint(twin)
        assert durable.predict(x).tolist() == twin.predict(x).tolist()


def test_events_that_were_not_applied_are_applied_on_opening(tmp_path: Path) -> None:
    twin = make()
    with DurableLearner(tmp_path / "d", make()) as durable:
        for x, y in batches(4):
            durable.submit(x, y)
            twin.learn(x, y)
        assert durable.applied == 0
        assert durable.waiting == 4
        told = "event 0 applied, 4 waiting, version 0"
        assert repr(durable) == f"DurableLearner in {tmp_path / 'd'}: {told}"
    with DurableLearner(tmp_path / "d", make()) as durable:
        assert durable.fingerprint() == fingerprint(twin)


def test_a_refused_batch_is_no_event(tmp_path: Path) -> None:
    (x, y), *_ = batches(1)
    with DurableLearner(tmp_path / "d", make()) as durable:
        durable.learn(x, y)
        before = durable.fingerprint()
        for wrong in (
            (x[:, :3], y),
            (x, y[:2]),
            (x, ["a", "b", "c", "d"]),
            (x * float("nan"), y),
            (x, [-1, 0, 0, 0]),
            (x, [10**6] * 4),
        ):
            with pytest.raises(InputError):
                durable.learn(*wrong)
        for keys in (["a"], [1, 2, 3, 4], ["", "a", "b", "c"], "a" * 201, "\ud800"):
            with pytest.raises(InputError):
                durable.learn(x, y, keys=keys)  # type: ignore[arg-type]
        assert durable.log.last == 1
        assert durable.fingerprint() == before


def test_a_batch_is_judged_as_what_waits_before_it_will_leave_the_learner(tmp_path: Path) -> None:
    (x, y), *_ = batches(1)
    with DurableLearner(tmp_path / "d", make()) as durable:
        durable.submit(x, list(names(y)))
        with pytest.raises(InputError, match="earlier ones were names"):
            durable.submit(x, y)
        with pytest.raises(InputError, match=r"earlier ones were \[8\] float32"):
            durable.submit(x[:, :4], list(names(y)))
        assert durable.log.last == 1


def test_divergence_is_part_of_history(tmp_path: Path) -> None:
    twin = make()
    with DurableLearner(tmp_path / "d", make()) as durable:
        for x, y in [*batches(3), poison(), *batches(3, seed=1)]:
            if bool((x > 1e38).any()):
                for learner in (durable, twin):
                    with pytest.raises(DivergenceError):
                        learner.learn(x, y)
            else:
                durable.learn(x, y)
                twin.learn(x, y)
        assert durable.outcome(4).diverged
    with DurableLearner(tmp_path / "d", make()) as durable:
        assert durable.fingerprint() == fingerprint(twin)
        assert durable.outcome(4).diverged


def test_an_idempotency_key_works_once_also_after_restart_and_rollback(tmp_path: Path) -> None:
    (a, b), (x, y) = batches(2)
    with DurableLearner(tmp_path / "d", make(), options=FEW) as durable:
        durable.learn(a, b, idempotency_key="one")
        first = durable.fingerprint()
        again = durable.submit(a, b, idempotency_key="one")
        assert (again.sequence, again.repeated, again.applied.result().sequence) == (1, True, 1)
        with pytest.raises(InputError, match="another batch"):
            durable.submit(x, y, idempotency_key="one")
        durable.learn(x, y, idempotency_key="two")
        durable.rollback(0)
        rolled = durable.fingerprint()
        assert rolled != first
    with DurableLearner(tmp_path / "d", make(), options=FEW) as durable:
        assert durable.submit(a, b, idempotency_key="one").repeated
        assert durable.learn(x, y, idempotency_key="two").sequence == 2
        assert durable.fingerprint() == rolled
        assert durable.log.last == 3


def test_the_key_of_a_batch_that_waits_is_known(tmp_path: Path) -> None:
    (x, y), *_ = batches(1)
    with DurableLearner(tmp_path / "d", make()) as durable:
        first = durable.submit(x, y, idempotency_key="one")
        again = durable.submit(x, y, idempotency_key="one")
        assert again.repeated
        assert again.applied is first.applied


def test_threads_share_writes_and_every_acknowledged_batch_is_there(tmp_path: Path) -> None:
    stream = batches(40)
    sizes: list[int] = []
    with DurableLearner(tmp_path / "d", make(), options=FEW) as durable:
        write = durable.log.append
        slow = threading.Event()

        def noted(rows: Any) -> None:
            sizes.append(len(rows))
            slow.wait(0.02)
            write(rows)

        durable.log.append = noted  # type: ignore[method-assign]
        durable.start()
        told: dict[int, int] = {}

        def client(part: int) -> None:
            for i in range(part, len(stream), 8):
                told[i] = durable.submit(*stream[i]).sequence

        clients = [threading.Thread(target=client, args=(part,)) for part in range(8)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        durable._worker.drain()
        live = durable.fingerprint()
    assert sorted(told.values()) == list(range(1, 41))
    assert max(sizes) > 1
    assert sum(sizes) == 40
    twin = make()
    for i in sorted(told, key=told.__getitem__):
        twin.learn(*stream[i])
    assert live == fingerprint(twin)
    with DurableLearner(tmp_path / "d", make(), options=FEW) as durable:
        assert durable.fingerprint() == live


def test_a_full_queue_refuses(tmp_path: Path) -> None:
    (x, y), *_ = batches(1)
    with DurableLearner(tmp_path / "d", make(), options=DurableOptions(queue_events=2)) as durable:
        durable.submit(x, y)
        durable.submit(x, y)
        with pytest.raises(BusyError):
            durable.submit(x, y)
        durable._worker.drain()
        assert durable.submit(x, y).sequence == 3


# --- going back -----------------------------------------------------------------------------------


def test_rollback_to_any_event_and_on_from_there(tmp_path: Path) -> None:
    stream = batches(12)
    states = []
    with DurableLearner(tmp_path / "d", make(), options=FEW) as durable:
        for x, y in stream[:8]:
            durable.learn(x, y)
            states.append(durable.learner.state_dict()["model"]["linear1.weight"].clone())
        ids = durable.learner.memory.next_id
        for to in (5, 3, 8):
            durable.rollback(to, "because")
            now = durable.learner.state_dict()["model"]["linear1.weight"]
            assert torch.equal(now, states[to - 1])
        assert durable.learner.memory.next_id == ids
        for x, y in stream[8:]:
            durable.learn(x, y)
        assert [row[3] for row in durable.history()] == [f"to {to}: because" for to in (5, 3, 8)]
        live = durable.fingerprint()
    with DurableLearner(tmp_path / "d", make(), options=FEW) as durable:
        assert durable.fingerprint() == live
        with pytest.raises(InputError, match="at most 15"):
            durable.rollback(99)
        durable.forget(ids=[0])
        with pytest.raises(InputError, match=r"event 7 is not there any more; there are snapshots"):
            durable.rollback(7)
        with pytest.raises(InputError):
            durable.rollback(True)


def test_a_way_back_that_leads_over_another_one_is_refused(tmp_path: Path) -> None:
    """The state after a rollback needs its snapshot: what it went back to may be gone since."""
    options = DurableOptions(snapshot_every=5)
    with DurableLearner(tmp_path / "d", make(), options=options) as durable:
        for x, y in batches(6):
            durable.learn(x, y)
        durable.rollback(2)
        durable.learn(*batches(1)[0])
        durable.snapshots.remove([7, 0])
        with pytest.raises(InputError, match="is not there any more; there are snapshots at 5"):
            durable.rollback(8)
        assert durable.rollback(6).sequence == 9


def test_a_rollback_is_replayed_when_the_snapshot_after_it_is_damaged(tmp_path: Path) -> None:
    options = DurableOptions(snapshot_every=4, keep_snapshots=2, keep_events=2)
    with DurableLearner(tmp_path / "d", make(), options=options) as durable:
        for x, y in batches(6):
            durable.learn(x, y)
        durable.rollback(4)
        for x, y in batches(2, seed=3):
            durable.learn(x, y)
        live = durable.fingerprint()
        newest = durable.versions()[0]
        assert newest.sequence == 7
    damage(newest.path)
    with DurableLearner(tmp_path / "d", make(), options=options) as durable:
        assert durable.fingerprint() == live


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_snapshot_is_replaced_by_an_older_one_and_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with DurableLearner(tmp_path / "d", make(), options=FEW) as durable:
        for x, y in batches(11):
            durable.learn(x, y)
        live, newest = durable.fingerprint(), durable.versions()[0]
    damage(newest.path)
    with DurableLearner(tmp_path / "d", make(), options=FEW) as durable:
        assert durable.fingerprint() == live
    assert "an older snapshot is used" in caplog.text
    for snapshot in (tmp_path / "d" / "snapshots").iterdir():
        snapshot.write_bytes(snapshot.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="no intact snapshot"):
        DurableLearner(tmp_path / "d", make(), options=FEW)


def test_a_database_that_is_older_than_its_snapshots_is_a_clear_stop(tmp_path: Path) -> None:
    """Otherwise the next events get numbers of lost ones, and a snapshot of those is opened."""
    stream = batches(10)
    with DurableLearner(tmp_path / "d", make(), options=FEW) as durable:
        for x, y in stream[:4]:
            durable.learn(x, y)
        copied(tmp_path / "d" / NAME, tmp_path / NAME)
        for x, y in stream[4:]:
            durable.learn(x, y)
    (tmp_path / NAME).replace(tmp_path / "d" / NAME)
    with pytest.raises(CheckpointError, match="event is 4, but there is a snapshot of event 9"):
        DurableLearner(tmp_path / "d", make(), options=FEW)
    for snapshot in (6, 9):
        durable.snapshots.path(snapshot).unlink()
    with DurableLearner(tmp_path / "d", make(), options=FEW) as durable:
        assert durable.applied == 4


def test_a_folder_is_copied_while_it_is_used(tmp_path: Path) -> None:
    stream = batches(10)
    with DurableLearner(tmp_path / "d", make(), options=FEW) as durable:
        for x, y in stream[:4]:
            durable.learn(x, y)
        shutil.copytree(tmp_path / "d" / "snapshots", tmp_path / "copy" / "snapshots")
        for x, y in stream[4:]:
            durable.learn(x, y)
        copied(tmp_path / "d" / NAME, tmp_path / "copy" / NAME)
        live = durable.fingerprint()
    with DurableLearner.open(tmp_path / "copy", options=FEW) as durable:
        assert durable.fingerprint() == live


def copied(database: Path, to: Path) -> None:
    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(to)) as target:
        source.backup(target)


# --- one writer, many readers ---------------------------------------------------------------------


def test_one_writer_and_followers(tmp_path: Path) -> None:
    stream = batches(7)
    with DurableLearner(tmp_path / "d", make(), options=FEW) as durable:
        with pytest.raises(InputError, match="follow it read-only"):
            DurableLearner(tmp_path / "d", make())
        follower = Follower.open(tmp_path / "d")
        assert follower.version == 0
        for x, y in stream:
            durable.learn(x, y)
        assert follower.update()
        assert not follower.update()
        assert follower.version == 6
    twin = make()
    for x, y in stream[:6]:
        twin.learn(x, y)
    assert fingerprint(follower.learner) == fingerprint(twin)
    assert follower.predict(x).shape == (4,)
    with DurableLearner.open(tmp_path / "d", options=FEW) as durable:
        assert durable.applied == 7


def test_a_follower_goes_back_with_the_writer(tmp_path: Path) -> None:
    stream = batches(7)
    with DurableLearner(tmp_path / "d", make(), options=FEW) as durable:
        for x, y in stream:
            durable.learn(x, y)
        follower = Follower.open(tmp_path / "d")
        assert follower.version == 6
        durable.rollback(3)
        assert follower.update()
        assert fingerprint(follower.learner) == durable.fingerprint()
    twin = make()
    for x, y in stream[:3]:
        twin.learn(x, y)
    assert torch.equal(follower.learner.logits(x), twin.logits(x))  # ids go on from where they were


def test_foreign_and_missing_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        DurableLearner(tmp_path / "f", make())
    with pytest.raises(InputError, match="not a folder"):
        DurableLearner(tmp_path / "f" / "thesis.txt", make())
    with pytest.raises(InputError, match="no durable learner"):
        DurableLearner.open(tmp_path / "nothing")
    assert {path.name for path in tmp_path.iterdir()} == {"f"}
    with DurableLearner(tmp_path / "d", make()) as durable:
        durable.learn(*batches(1)[0])
    (tmp_path / "d" / NAME).unlink()
    with pytest.raises(CheckpointError, match="missing, but there are snapshots"):
        DurableLearner(tmp_path / "d", make())


def test_another_learner_is_refused(tmp_path: Path) -> None:
    with DurableLearner(tmp_path / "d", make()) as durable:
        durable.learn(*batches(1)[0])
    with pytest.raises(InputError, match="make it as it was"):
        DurableLearner(tmp_path / "d", make(seed=1))


# --- budgets --------------------------------------------------------------------------------------


def test_snapshots_and_events_are_kept_to_a_budget(tmp_path: Path) -> None:
    options = DurableOptions(snapshot_every=5, keep_snapshots=3, keep_events=8, keep_history=20)
    with DurableLearner(tmp_path / "d", make(), options=options) as durable:
        for i, (x, y) in enumerate(batches(40)):
            durable.learn(x, y, keys=f"key {i}")
        assert [snapshot.sequence for snapshot in durable.versions()] == [40, 35, 30]
        assert [row[0] for row in durable.log.sizes()] == list(range(40, 32, -1))
        assert durable.log.row(19) is None
        assert durable.log.row(20) is None or durable.log.row(20).body is None  # type: ignore[union-attr]
        assert len(durable.log.ids_of("key 39")) == 4
        stored = set(durable.learner.memory.ids.tolist())
        for i in range(25):  # keys live as long as an example of theirs
            assert set(durable.log.ids_of(f"key {i}")) <= stored | {
                id_ for _, _, ids in durable.log.snapshots().values() for id_ in ids
            }


def test_deletions_and_rollbacks_do_not_use_up_the_ways_back(tmp_path: Path) -> None:
    """Each writes snapshots of its own; they leave before those that are far apart."""
    options = DurableOptions(snapshot_every=5, keep_snapshots=5)
    with DurableLearner(tmp_path / "d", make(), options=options) as durable:
        for x, y in batches(20):
            durable.learn(x, y)
        assert [snapshot.sequence for snapshot in durable.versions()] == [20, 15, 10, 5, 0]
        for _ in range(4):
            durable.forget(ids=durable.learner.memory.ids.tolist()[:1])
        assert [snapshot.sequence for snapshot in durable.versions()] == [28, 27, 24, 15, 10]
        for back in (24, 15, 10):
            durable.rollback(back)
        assert [snapshot.sequence for snapshot in durable.versions()] == [31, 30, 24, 15, 10]


def test_age_and_bytes_are_budgets_and_a_clock_may_go_back(tmp_path: Path) -> None:
    now = [1e9]
    options = DurableOptions(snapshot_every=2, keep_snapshots=50, keep_days=1)
    with DurableLearner(tmp_path / "d", make(), options=options, clock=lambda: now[0]) as durable:
        for i, (x, y) in enumerate(batches(12)):
            now[0] = 1e9 + (86400 * i / 4 if i != 7 else -1e8)
            durable.learn(x, y)
        times = [durable.log.row(n).time for n in range(1, 13)]  # type: ignore[union-attr]
        assert times == sorted(times)
        assert all(s.time >= now[0] - 86400 for s in durable.versions())
        assert 2 <= len(durable.versions()) < 6
        now[0] = 0.0  # years ago: nothing is dropped for that, and nothing breaks
        durable.learn(*batches(1)[0])
        live = durable.fingerprint()
    small = DurableOptions(snapshot_every=2, keep_snapshots=50, keep_bytes=1)
    with DurableLearner(tmp_path / "d", make(), options=small, clock=lambda: 0.0) as durable:
        assert durable.fingerprint() == live
        durable.learn(*batches(1)[0])
        assert len(durable.versions()) == 2


# --- disks that fail ------------------------------------------------------------------------------


def test_a_full_disk_refuses_and_learning_goes_on_when_there_is_room(tmp_path: Path) -> None:
    stream = batches(8)
    twin = make()
    with DurableLearner(tmp_path / "d", make()) as durable:
        durable.learn(*stream[0])
        twin.learn(*stream[0])
        pages = durable.log.database.connection.execute("PRAGMA page_count").fetchone()[0]
        durable.log.database.connection.execute(f"PRAGMA max_page_count={pages}")  # as ENOSPC does
        refused = 0
        for x, y in stream[1:4]:
            try:
                durable.learn(x.repeat(100, 1), y.repeat(100))
            except StorageError as error:
                assert "full" in str(error)  # noqa: PT017
                refused += 1
        assert refused == 3
        durable.log.database.connection.execute("PRAGMA max_page_count=1000000")
        for x, y in stream[4:]:
            durable.learn(x, y)
            twin.learn(x, y)
        assert durable.log.last == 5
        assert durable.fingerprint() == fingerprint(twin)
    with DurableLearner(tmp_path / "d", make()) as durable:
        assert durable.fingerprint() == fingerprint(twin)


def test_a_snapshot_that_cannot_be_written_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from proxreplay.serving import snapshots

    twin = make()
    with DurableLearner(tmp_path / "d", make(), options=FEW) as durable:
        save = snapshots.save_state

        def full(path: Path, parts: Any) -> None:
            raise CheckpointError(f"{path}: no space left")

        monkeypatch.setattr(snapshots, "save_state", full)
        for x, y in batches(7):
            durable.learn(x, y)
            twin.learn(x, y)
        assert "no space left" in str(durable.snapshot_failure)
        monkeypatch.setattr(snapshots, "save_state", save)
        assert durable.snapshot().sequence == 7
        assert durable.snapshot_failure is None
    with DurableLearner(tmp_path / "d", make(), options=FEW) as durable:
        assert durable.fingerprint() == fingerprint(twin)


def test_outcomes_that_cannot_be_written_wait_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from proxreplay.serving import timeline

    def full(*args: Any) -> None:
        raise StorageError("no space left")

    monkeypatch.setattr(timeline, "OUTCOMES_PER_WRITE", 3)
    with DurableLearner(tmp_path / "d", make()) as durable:
        with monkeypatch.context() as patch:
            patch.setattr(durable.log, "note_outcomes", full)
            for x, y in batches(5):
                durable.learn(x, y, keys="mine")
            with pytest.raises(StorageError):
                durable.forget(key="mine")
        durable.learn(x, y)
        assert [outcome.sequence for outcome in durable.log.outcomes(9)] == [1, 2, 3, 4, 5, 6]
        assert len(durable.log.ids_of("mine")) == 20


def test_a_folder_that_cannot_be_written_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from proxreplay.serving import folder as module

    with DurableLearner(tmp_path / "d", make()) as durable:
        durable.learn(*batches(1)[0])

    def read_only(*args: Any, **kwargs: Any) -> None:
        raise OSError(30, "Read-only file system", str(tmp_path / "d" / "lock"))

    monkeypatch.setattr(module, "locked", read_only)
    with pytest.raises(StorageError, match="Read-only file system"):
        DurableLearner(tmp_path / "d", make())
    assert Follower.open(tmp_path / "d").version == 0


def test_every_damaged_page_is_noticed_or_harmless(tmp_path: Path) -> None:
    """Each page of the database in turn: a clear stop, or the very same state."""
    with DurableLearner(tmp_path / "d", make()) as durable:
        for i, (x, y) in enumerate(batches(6)):
            durable.learn(x, y, keys=f"key {i}", idempotency_key=str(i))
        live = durable.fingerprint()
    size = (tmp_path / "d" / NAME).stat().st_size
    stops = 0
    for page in range(0, size, 4096):
        place = tmp_path / "copy"
        shutil.copytree(tmp_path / "d", place)
        content = bytearray((place / NAME).read_bytes())
        content[page : page + 4096] = bytes(b ^ 0x5A for b in content[page : page + 4096])
        (place / NAME).write_bytes(content)
        try:
            with DurableLearner(place, make()) as durable:
                assert durable.fingerprint() == live
        except CheckpointError as error:
            assert NAME in str(error)  # noqa: PT017
            stops += 1
        shutil.rmtree(place)
    assert stops > 3


def test_a_lost_event_is_noticed(tmp_path: Path) -> None:
    with DurableLearner(tmp_path / "d", make()) as durable:
        for x, y in batches(4):
            durable.learn(x, y)
    shutil.copytree(tmp_path / "d", tmp_path / "copy")
    for folder, gone, told in (
        ("d", 4, "newest event is 3 instead of 4"),
        ("copy", 2, "event 2 is not there"),
    ):
        log = EventLog(tmp_path / folder / NAME)
        log.database.connection.execute("DELETE FROM events WHERE sequence = ?", (gone,))
        log.database.close()
        with pytest.raises(CheckpointError, match=told):
            DurableLearner(tmp_path / folder, make())


def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    DurableLearner(tmp_path / "d", make()).close()
    log = EventLog(tmp_path / "d" / NAME)
    log.database.connection.execute("UPDATE meta SET value = '7' WHERE name = 'version'")
    log.database.close()
    with pytest.raises(CheckpointError, match="version '7'"):
        DurableLearner(tmp_path / "d", make())


def test_an_error_while_applying_stops_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = batches(3)
    with DurableLearner(tmp_path / "d", make()) as durable:
        durable.learn(*stream[0])

        def broken(*args: Any) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(durable.learner, "learn", broken)
        with pytest.raises(StoppedError, match=r"event 2 could not be applied.*out of memory"):
            durable.learn(*stream[1])
        with pytest.raises(StoppedError):
            durable.learn(*stream[2])
    twin = make()
    for x, y in stream[:2]:
        twin.learn(x, y)
    with DurableLearner(tmp_path / "d", make()) as durable:
        assert durable.fingerprint() == fingerprint(twin)


def test_closing_does_not_wait_for_a_rollback_that_waits_for_the_queue(tmp_path: Path) -> None:
    durable = DurableLearner(tmp_path / "d", make())
    inside, go, told = threading.Event(), threading.Event(), []
    learn = durable.learner.learn

    def slow(*args: Any, **further: Any) -> Any:
        inside.set()
        go.wait(30)
        return learn(*args, **further)

    durable.learner.learn = slow  # type: ignore[method-assign]
    durable.start()
    for x, y in batches(3):
        durable.submit(x, y)

    def back() -> None:
        try:
            durable.rollback(0)
        except StoppedError as error:
            told.append(str(error))

    rollback = threading.Thread(target=back, daemon=True)
    closing = threading.Thread(target=durable.close, daemon=True)
    assert inside.wait(30)
    rollback.start()
    while durable._admitting.acquire(blocking=False):  # until the rollback holds admission
        durable._admitting.release()
        time.sleep(0.001)
    closing.start()
    while not durable._line.closed:
        time.sleep(0.001)
    go.set()
    closing.join(30)
    assert not closing.is_alive()
    rollback.join(30)
    assert told
    assert "it is closed" in told[0]
    with DurableLearner(tmp_path / "d", make()) as again:
        assert again.applied == 3
