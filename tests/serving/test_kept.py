"""Inputs that wait for their labels: on disk, within a budget, learned once."""

import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from proxreplay.errors import InputError, StorageError
from proxreplay.options import DurableOptions
from proxreplay.serialization import from_bytes
from proxreplay.serving import DurableLearner
from proxreplay.serving.kept import UnknownIdError
from proxreplay.serving.log import NAME
from tests.serving.streams import batches, make

STREAM = batches(4)


def opened(folder: Path, **options: Any) -> DurableLearner:
    return DurableLearner(folder / "d", make(), options=DurableOptions(**options))


def waiting(durable: DurableLearner) -> dict[str, Any]:
    """What is kept, read from the disk; oldest first."""
    rows = durable.log.database.query("SELECT id, body FROM kept ORDER BY number")
    assert [identity for identity, _ in rows] == list(durable.kept._places)
    return {identity: from_bytes(body)["inputs"] for identity, body in rows}


def test_the_oldest_make_room_and_the_rest_is_there_after_a_restart(tmp_path: Path) -> None:
    (x, y), *_ = STREAM
    with opened(tmp_path, kept_inputs=3) as durable:
        durable.learn(x, y)
        for i in range(5):
            durable.keep(str(i), x + i)
        durable.keep("3", x)  # again: it is the newest now
        durable.keep("5", x)
    with opened(tmp_path, kept_inputs=3) as durable:
        found = waiting(durable)
        assert list(found) == ["4", "3", "5"]
        assert torch.equal(found["4"], x + 4)
        assert torch.equal(found["3"], x)
        durable.keep("6", x)
        assert list(waiting(durable)) == ["3", "5", "6"]
        ((size,), *_) = durable.log.database.query("SELECT length(body) FROM kept")
    size = size * 5 // 2  # two of them, but not three
    with opened(tmp_path, kept_bytes=size) as durable:
        durable.keep("7", x)
        assert list(waiting(durable)) == ["6", "7"]
        with pytest.raises(InputError, match=f"{size} are kept at most"):
            durable.keep("large", x.repeat(100, 1))
        for wrong in ("", "\ud800", "x" * 201):
            with pytest.raises(InputError, match="id="):
                durable.keep(wrong, x)
        with pytest.raises(InputError, match="earlier ones were"):
            durable.keep("8", x[:, :3])
        assert list(waiting(durable)) == ["6", "7"]


def full(rows: Any) -> None:
    raise StorageError("no space left")


def test_an_input_is_learned_once_and_stays_if_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (x, y), (a, b), *_ = STREAM
    with opened(tmp_path) as durable:
        durable.learn(x, y)
        durable.keep("a", a)
        with pytest.raises(InputError):
            durable.submit(None, b[:1], kept="a")
        with monkeypatch.context() as patch:
            patch.setattr(durable.log, "append", full)
            with pytest.raises(StorageError):
                durable.submit(None, b, kept="a")
        first = durable.submit(None, b, kept="a", idempotency_key="k")
        assert durable.submit(None, b, kept="a", idempotency_key="k").sequence == first.sequence
        with pytest.raises(UnknownIdError):
            durable.submit(None, b, kept="a")
        durable.keep("a", x)  # the same id for something else
    with opened(tmp_path) as durable:
        assert torch.equal(waiting(durable)["a"], x)
        assert durable.log.last == 2


def test_one_of_many_who_ask_at_once_learns_it(tmp_path: Path) -> None:
    (x, y), (a, b), *_ = STREAM
    with opened(tmp_path) as durable:
        durable.learn(x, y)
        threads = [threading.Thread(target=durable.keep, args=(f"{i}", a)) for i in range(8)]
        told: list[Any] = []

        def ask() -> None:
            try:
                told.append(durable.submit(None, b, kept="3").sequence)
            except UnknownIdError:
                told.append(None)

        for batch in (threads, [threading.Thread(target=ask) for _ in range(8)]):
            for thread in batch:
                thread.start()
            for thread in batch:
                thread.join()
        assert sorted(told, key=str) == [2] + [None] * 7
        assert len(durable.kept) == 7


def test_a_folder_of_the_version_before_gets_the_table(tmp_path: Path) -> None:
    (x, y), *_ = STREAM
    with opened(tmp_path) as durable:
        durable.learn(x, y)
    older = sqlite3.connect(tmp_path / "d" / NAME)
    with older:
        older.execute("DROP TABLE kept")
        older.execute("UPDATE meta SET value = '1' WHERE name = 'version'")
    older.close()
    with opened(tmp_path) as durable:
        durable.keep("a", x)
    with opened(tmp_path) as durable:
        assert "a" in durable.kept
