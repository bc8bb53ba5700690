"""What is deleted is nowhere: not in the memory, snapshots, events, free pages or logs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from proxreplay.errors import InputError, StorageError
from proxreplay.options import DurableOptions
from proxreplay.serving import DurableLearner
from proxreplay.serving.log import NAME
from tests.serving.streams import batches, make, names

FEW = DurableOptions(snapshot_every=3, keep_snapshots=9)


def places(folder: Path, wanted: bytes) -> list[str]:
    """Files that hold some bytes."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path.name for path in files if wanted in path.read_bytes())


def held(folder: Path, rows: Tensor) -> list[str]:
    return [place for row in rows for place in places(folder, row.contiguous().numpy().tobytes())]


def filled(folder: Path, count: int = 10) -> DurableLearner:
    """Every second batch belongs to Ada, whose key is nowhere else."""
    durable = DurableLearner(folder, make(), options=FEW)
    for i, (x, y) in enumerate(batches(count)):
        keys = "ada@example.org" if i % 2 else [f"{i}/{j}" for j in range(len(y))]
        durable.learn(x, list(names(y)), keys=keys, idempotency_key=f"request {i}")
    return durable


def test_a_key_and_its_data_are_gone_from_every_byte_of_the_folder(tmp_path: Path) -> None:
    mine = torch.cat([x for i, (x, _) in enumerate(batches(10)) if i % 2])
    with filled(tmp_path) as durable:
        assert len(durable.audit("ada@example.org")) > 3
        durable.log.database.checkpoint()
        assert set(held(tmp_path, mine)) >= {NAME}
        assert places(tmp_path, b"ada@example.org")
        others = [s.sequence for s in durable.versions()]
        outcome = durable.forget(key="ada@example.org")
        assert outcome.removed > 0
        assert durable.audit("ada@example.org") == []
        assert places(tmp_path, b"ada@example.org") == []
        assert held(tmp_path, mine) == []
        live = durable.fingerprint()
        assert {s.sequence for s in durable.versions()} > set(others[:2])
        with pytest.raises(InputError, match="no example has the key"):
            durable.forget(key="ada@example.org")
        assert durable.submit(*as_given(3), idempotency_key="request 3").repeated
    assert places(tmp_path, b"ada@example.org") == []
    assert held(tmp_path, mine) == []
    with DurableLearner(tmp_path, make(), options=FEW) as durable:
        assert durable.fingerprint() == live
        assert durable.audit("ada@example.org") == []


def as_given(i: int) -> tuple[Tensor, list[str]]:
    x, y = batches(10)[i]
    return x, list(names(y))


def test_nothing_comes_back_with_an_older_snapshot(tmp_path: Path) -> None:
    mine = torch.cat([x for i, (x, _) in enumerate(batches(10)) if i % 2])
    with filled(tmp_path) as durable:
        durable.forget(key="ada@example.org")
        older = [s for s in durable.versions() if 0 < s.sequence < 10]
        assert len(older) >= 1
        for snapshot in older:
            durable.rollback(snapshot)
            assert durable.audit("ada@example.org") == []
            assert held(tmp_path, mine) == []
        with pytest.raises(InputError, match="not there any more"):
            durable.rollback(older[0].sequence + 1)
        live = durable.fingerprint()
    with DurableLearner(tmp_path, make(), options=FEW) as durable:
        assert durable.fingerprint() == live


@pytest.mark.parametrize("crash", ["snapshot", "rewrite", "scrub", "after"])
def test_a_deletion_that_was_interrupted_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    from proxreplay.serving import deletion
    from proxreplay.serving.keeping import Keeping
    from proxreplay.serving.log import EventLog

    mine = torch.cat([x for i, (x, _) in enumerate(batches(10)) if i % 2])

    def die(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    durable = filled(tmp_path)
    broken = {
        "snapshot": (Keeping, "write_snapshot"),
        "rewrite": (deletion, "rewrite_snapshots_"),
        "scrub": (EventLog, "scrub"),
        "after": (Keeping, "_drop_dead_keys"),
    }[crash]
    with monkeypatch.context() as patch:
        patch.setattr(*broken, die)
        with pytest.raises(KeyboardInterrupt):
            durable.forget(key="ada@example.org")
    durable.close()
    with DurableLearner(tmp_path, make(), options=FEW) as again:
        assert again.audit("ada@example.org") == []
    assert held(tmp_path, mine) == []
    assert places(tmp_path, b"ada@example.org") == []


def test_a_disk_that_is_full_leaves_a_deletion_owed_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from proxreplay.errors import CheckpointError
    from proxreplay.serving import snapshots

    def full(path: Path, parts: object) -> None:
        raise CheckpointError(f"{path}: no space left")

    with filled(tmp_path) as durable:
        with monkeypatch.context() as patch:
            patch.setattr(snapshots, "save_state", full)
            with pytest.raises(StorageError, match=r"not yet from the disk.*no space left"):
                durable.forget(key="ada@example.org")
        assert durable.audit("ada@example.org")
        durable.learn(*as_given(0))
        durable.snapshot()
        assert durable.audit("ada@example.org") == []


def test_a_label_is_deleted_by_name_and_examples_by_id(tmp_path: Path) -> None:
    with filled(tmp_path) as durable:
        (x, y) = batches(10)[0]
        name = next(names(y))
        assert places(tmp_path, name.encode())
        durable.forget(label=name)
        assert name not in durable.learner.labels
        assert places(tmp_path, name.encode()) == []
        rows = x[[label == name for label in names(y)]]
        assert held(tmp_path, rows) == []
        x, y = batches(1, seed=9)[0]
        outcome = durable.learn(x, list(names(y)))
        assert held(tmp_path, x)
        durable.forget(ids=outcome.ids)
        assert held(tmp_path, x) == []
        for wrong in ({"ids": [10**6]}, {"ids": []}, {"label": "nobody"}, {"key": "nobody"}, {}):
            before = durable.log.last
            with pytest.raises(InputError):
                durable.forget(**wrong)  # type: ignore[arg-type]
            assert durable.log.last == before


def test_after_a_deletion_a_damaged_snapshot_does_not_matter(tmp_path: Path) -> None:
    with filled(tmp_path) as durable:
        durable.forget(key="ada@example.org")
        live, newest = durable.fingerprint(), durable.versions()[0]
    newest.path.write_bytes(newest.path.read_bytes()[:-1])
    with DurableLearner(tmp_path, make(), options=FEW) as durable:
        assert durable.fingerprint() == live


def test_ids_are_not_used_twice_so_that_deletion_means_the_right_example(tmp_path: Path) -> None:
    stream = batches(6)
    with DurableLearner(tmp_path, make(), options=FEW) as durable:
        for x, y in stream[:3]:
            durable.learn(x, y, keys="first line")
        durable.rollback(0)
        for x, y in stream[3:]:
            durable.learn(x, y, keys="second line")
        before = len(durable.learner.memory)
        durable.forget(key="first line")
        assert len(durable.learner.memory) == before
        assert durable.audit("first line") == []
        assert durable.audit("second line")
        assert held(tmp_path, torch.cat([x for x, _ in stream[:3]])) == []


def test_an_input_that_waits_for_its_label_is_found_and_deleted(tmp_path: Path) -> None:
    x, y = batches(1, seed=5)[0]
    with filled(tmp_path) as durable:
        durable.keep("bob@example.org", x)
    with DurableLearner(tmp_path, make(), options=FEW) as durable:
        assert durable.audit("bob@example.org") == ["an input that waits for its labels"]
        durable.log.database.checkpoint()
        assert held(tmp_path, x)
        assert durable.forget(key="bob@example.org").removed == 4
        assert durable.audit("bob@example.org") == []
        assert held(tmp_path, x) == places(tmp_path, b"bob@example.org") == []
        durable.keep("bob@example.org", x)
        durable.submit(None, list(names(y)), keys="bob@example.org", kept="bob@example.org")
        durable.forget(key="bob@example.org")
        assert durable.audit("bob@example.org") == []
        assert held(tmp_path, x) == places(tmp_path, b"bob@example.org") == []
