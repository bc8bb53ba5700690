"""Real disks that are full, under a running server, or cannot be written to.

They are mounted, which takes root. `test_durable` has the same with errors that are raised.
"""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from proxreplay.errors import StorageError
from proxreplay.options import DurableOptions
from proxreplay.serving import DurableLearner, Follower
from proxreplay.serving.timeline import fingerprint
from tests.serving.streams import batches, make
from tests.serving.test_api import Server

OPTIONS = DurableOptions(snapshot_every=4)
STREAM = batches(12)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of two megabytes."""
    made = tmp_path / "disk"
    made.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(made)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if done.returncode:
        pytest.skip("only root may mount a disk")
    yield made
    subprocess.run(["umount", "-l", str(made)], check=True)


def fill(disk: Path) -> Callable[[], None]:
    """Leave no room; returns what makes room again."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return filler.unlink


def test_a_full_disk(disk: Path) -> None:
    twin, (x, y) = make(), STREAM[0]
    large = {"inputs": x.repeat(12, 1).tolist(), "labels": y.repeat(12).tolist()}
    with Server(disk / "d", options=OPTIONS) as server:
        for a, b in STREAM[:3]:
            assert server.learn(a, b).status_code == 200
            twin.learn(a, b)
        make_room = fill(disk)
        for path, body in (
            *[("/learn", large), ("/predict", {"inputs": large["inputs"], "id": "a"})] * 20,
            ("/rollback", {"to": 2}),
            ("/forget", {"label": 1}),
            ("/snapshot", {}),
        ):
            answer = server.client.post(path, json=body)
            assert answer.status_code in (507, 503), (path, answer.text)
            assert "full" in answer.text or "No space left" in answer.text
        assert server.client.post("/predict", json={"inputs": x.tolist()}).status_code == 200
        assert server.durable.log.last == 3
        assert len(server.durable.kept) == 0
        make_room()
        for a, b in STREAM[3:]:
            assert server.learn(a, b).status_code == 200
            twin.learn(a, b)
    with DurableLearner(disk / "d", make(), options=OPTIONS) as durable:
        assert durable.fingerprint() == fingerprint(twin)


def test_a_server_ends_on_a_full_disk(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    twin = make()
    with Server(disk / "d", options=OPTIONS) as server:
        for x, y in STREAM[:3]:
            assert server.learn(x, y).status_code == 200
            twin.learn(x, y)
        make_room = fill(disk)
    assert "no snapshot was written at the end; the events are kept" in caplog.text
    make_room()
    with DurableLearner(disk / "d", make(), options=OPTIONS) as durable:
        assert durable.fingerprint() == fingerprint(twin)


def test_a_disk_that_cannot_be_written_to(disk: Path) -> None:
    with DurableLearner(disk / "d", make(), options=OPTIONS) as durable:
        for x, y in STREAM[:6]:
            durable.learn(x, y)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for folder in (disk / "d", disk / "new"):
        with pytest.raises(StorageError, match=r"Read-only file system.*--read-only"):
            DurableLearner(folder, make())
    assert Follower.open(disk / "d").version == 4
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    with DurableLearner(disk / "d", make()) as durable:
        assert durable.applied == 6
