"""A run survives anything that can happen to its files, and ends as if nothing had happened.

Every method is run once on a disk that records (`tests.disk`). Then the run is resumed from what a
kill, a failing disk, a power loss or damage would have left at each operation. By default a sample
is tried; ``PROXREPLAY_CRASHES=all`` tries every operation.
"""

import errno
import gc
import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from proxreplay.errors import (
    CheckpointError,
    DataError,
    InputError,
    ProxreplayError,
    StorageError,
)
from proxreplay.experiments.config import RunConfig
from proxreplay.experiments.configure import configure
from proxreplay.experiments.interrupt import StopRequest
from proxreplay.experiments.journal import Journal
from proxreplay.experiments.results import read_run
from proxreplay.experiments.run import Interrupted, Progress, RunOptions, run
from tests.disk import Recorder, after_kill, after_power_loss

EXHAUSTIVE = os.environ.get("PROXREPLAY_CRASHES") == "all"
METHODS = ("er", "lpr-er", "lpr-der", "ema")
TINY = {
    **{"steps_per_batch": 1, "eval_every": 4, "refresh.every": 2, "capacity": 10},
    **{"stream.first": 2, "stream.limit": 40, "batch_size": 10},
}
OPTIONS = RunOptions(checkpoint_every=2)
RESULTS = ("config.yaml", "records.jsonl", "result.json")
COMPLETE = {*RESULTS, "environment.json", "timings.jsonl", "log.txt", "lock"}


@pytest.fixture(scope="module", params=METHODS)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Whole":
    return Whole(request.param, tmp_path_factory.mktemp(request.param))


class Whole:
    """A run of one method that nothing happened to, and all that it did to its folder."""

    def __init__(self, method: str, folder: Path) -> None:
        self.config: RunConfig = configure("split-digits", method, TINY, {})
        self.folder = folder / "run"
        with Recorder(folder)() as self.recorder:
            run(self.config, self.folder, OPTIONS)
        self.count = len(self.recorder.operations)
        self.contents = contents(self.folder)

    def check_resumed(self, folder: Path) -> None:
        """Resume; the outcome is that of the whole run, and nothing is left behind."""
        run(self.config, folder, OPTIONS)
        assert contents(folder) == self.contents
        left = {path.name for path in folder.iterdir()}
        assert left <= COMPLETE
        assert COMPLETE - left <= {"timings.jsonl", "log.txt"}  # these are not synced


def interrupt(whole: Whole, folder: Path) -> None:
    """Stop a run after 7 of its 8 batches; it has checkpoints at 6 and 7 then."""
    stop = StopRequest()

    def watch(progress: Progress) -> None:
        if progress.position == 7:
            stop.signal = signal.SIGTERM

    with pytest.raises(Interrupted):
        run(whole.config, folder, OPTIONS, stop=stop, on_progress=watch)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in RESULTS}


def sample(count: int, size: int, seed: int) -> list[int]:
    """All numbers below ``count``, or so many of them."""
    if EXHAUSTIVE or count <= size:
        return list(range(count))
    return sorted(random.Random(seed).sample(range(count), size))


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def test_the_recording_is_the_run(recorded: Whole, tmp_path: Path) -> None:
    kinds = {operation.kind for operation in recorded.recorder.operations}
    assert kinds >= {"create", "write", "fsync", "rename", "fsync-folder", "mkdir", "unlink"}
    after_kill(recorded.recorder, recorded.count).write_to(tmp_path)
    assert contents(tmp_path / "run") == recorded.contents
    assert {path.name for path in (tmp_path / "run").iterdir()} == COMPLETE


def test_a_kill_at_any_operation(recorded: Whole, tmp_path: Path) -> None:
    for count in sample(recorded.count + 1, 14, seed=1):
        with scratch(tmp_path / str(count)) as place:
            after_kill(recorded.recorder, count).write_to(place)
            recorded.check_resumed(place / "run")


def test_a_second_kill_while_resuming(recorded: Whole, tmp_path: Path) -> None:
    first = tmp_path / "first"
    middle = recorded.count * 2 // 3
    after_kill(recorded.recorder, middle).write_to(first)
    with Recorder(first)() as recorder:
        recorded.check_resumed(first / "run")
    for count in sample(len(recorder.operations), 4, seed=2):
        with scratch(tmp_path / str(count)) as place:
            after_kill(recorder, count).write_to(place)
            recorded.check_resumed(place / "run")


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
def test_an_error_at_any_operation(recorded: Whole, lasting: bool, tmp_path: Path) -> None:
    for at in sample(recorded.count, 5, seed=3 + lasting):
        code = (errno.ENOSPC, errno.EIO)[at % 2]
        with scratch(tmp_path / str(at)) as place:
            recorder = Recorder(
                place, at, lambda code=code: OSError(code, os.strerror(code)), lasting
            )
            try:
                with recorder():
                    run(recorded.config, place / "run", OPTIONS)
            except (CheckpointError, StorageError) as error:
                assert os.strerror(code) in str(error)  # noqa: PT017
            recorded.check_resumed(place / "run")


def test_a_power_loss_at_any_operation(recorded: Whole, tmp_path: Path) -> None:
    for count in sample(recorded.count + 1, 14, seed=5):
        for again in range(5 if EXHAUSTIVE else 1):
            with scratch(tmp_path / str(count)) as place:
                rng = random.Random(1000 * count + again)
                after_power_loss(recorded.recorder, count, rng).write_to(place)
                recorded.check_resumed(place / "run")


def test_what_is_complete_survives_a_power_loss(recorded: Whole, tmp_path: Path) -> None:
    for seed in range(5):
        with scratch(tmp_path / str(seed)) as place:
            after_power_loss(recorded.recorder, recorded.count, random.Random(seed)).write_to(place)
            stored = read_run(place / "run").with_records()
            assert stored.status == "complete", stored.problem
            assert contents(place / "run") == recorded.contents


def test_damage_to_any_file_is_exact_older_or_refused_by_name(
    recorded: Whole, tmp_path: Path
) -> None:
    interrupt(recorded, tmp_path / "before" / "run")
    files = sorted(path for path in (tmp_path / "before").rglob("*") if path.is_file())
    assert len([path for path in files if path.suffix == ".safetensors"]) == 2
    rng = random.Random(7)
    for number in range(300 if EXHAUSTIVE else 14):
        victim = files[number % len(files)].relative_to(tmp_path / "before")
        with scratch(tmp_path / str(number)) as place:
            shutil.copytree(tmp_path / "before", place, dirs_exist_ok=True)
            damage(place / victim, rng)
            try:
                run(recorded.config, place / "run", OPTIONS)
            except ProxreplayError as error:
                assert victim.name in str(error) or "config" in victim.name, error  # noqa: PT017
            else:
                assert contents(place / "run") == recorded.contents, victim


def damage(path: Path, rng: random.Random) -> None:
    """Flip a bit, cut the end off or overwrite a region."""
    content = bytearray(path.read_bytes())
    if not content:
        return
    at = rng.randrange(len(content))
    kind = rng.choice(("flip", "cut", "zeros"))
    if kind == "flip":
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del content[at:]
    else:
        content[at : at + 50] = bytes(len(content[at : at + 50]))
    path.write_bytes(content)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("name", ["records.jsonl", "timings.jsonl", "log.txt", "lock"])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(
    name: str, er: Whole, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    interrupt(er, folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(InputError, match=f"{name} is no regular file"):
        run(er.config, folder, OPTIONS)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_no_file_stays_open_if_the_folder_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        raise OSError(errno.EIO, folder.name)

    monkeypatch.setattr("proxreplay.experiments.journal.sync_folder", fail)
    journal = Journal(tmp_path / "records.jsonl")
    with pytest.raises(OSError, match=tmp_path.name), journal:
        pass
    del journal
    gc.collect()  # a file left open would warn now


@pytest.mark.parametrize("computed", [True, False], ids=["complete", "before a checkpoint"])
def test_other_settings_in_the_configuration_are_noticed(computed: bool, tmp_path: Path) -> None:
    """Valid YAML with another value, or with its end cut off, is not taken for what was asked."""
    config, folder = configure("split-digits", "er", TINY), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt) if not computed else nullcontext():
        run(config, folder, OPTIONS, on_progress=lambda at: None if computed else _interrupt())
    file = folder / "config.yaml"
    written = file.read_text()
    assert yaml.safe_load(written) == config.to_dict()
    for text in (written.replace("lr: 0.1", "lr: 0.2"), written[: written.index("threads")]):
        file.write_text(text)
        assert read_run(folder).status == "broken"
        for asked in (config, replace(config, lr=0.2)):
            with pytest.raises(DataError, match="not those that the run wrote"):
                run(asked, folder, OPTIONS)
        assert file.read_text() == text
        assert not (folder / "failure.txt").exists()
    file.write_bytes(written.replace("\n", "\r\n# a comment\r\n").encode())  # says the same
    run(config, folder, OPTIONS)
    file.write_text(written.partition("\n")[2])  # as version 0.1 wrote it
    run(config, folder, OPTIONS)
    assert read_run(folder).status == "complete"


def _interrupt() -> None:
    raise KeyboardInterrupt


# --- one by one, with the first method ------------------------------------------------------------


@pytest.fixture(scope="module")
def er(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole("er", tmp_path_factory.mktemp("er"))


def test_leftovers_never_block_and_only_ours_are_removed(er: Whole, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupt(er, folder)
    foreign = [folder / "checkpoint" / ".DS_Store", folder / "notes.txt", folder / ".tmpAb12Cd"]
    ours = ["result.json.123.tmp", ".result.json.0123abcd.proxreplay-writing"]
    ours += ["checkpoint/.000000008.safetensors.0123abcd.proxreplay-writing"]
    for path in (*foreign, *(folder / name for name in ours)):
        path.write_text("left behind")
    (folder / "checkpoint" / "000000009").mkdir()  # version 0.1, killed while it wrote
    (folder / "checkpoint" / "000000009" / ".tmpAb12Cd").write_text("torn")
    run(er.config, folder, OPTIONS)
    assert contents(folder) == er.contents
    assert {path.name for path in folder.iterdir()} == COMPLETE | {
        "checkpoint",
        "notes.txt",
        ".tmpAb12Cd",
    }
    assert [path.name for path in (folder / "checkpoint").iterdir()] == [".DS_Store"]


@pytest.mark.parametrize("name", ["config.yaml.99.tmp", ".config.yaml.0123abcd.proxreplay-writing"])
def test_a_kill_while_the_configuration_is_first_written(
    er: Whole, name: str, tmp_path: Path
) -> None:
    for left in (name, "lock", ".DS_Store"):
        (tmp_path / left).write_text("bench")
    run(er.config, tmp_path, OPTIONS)
    assert contents(tmp_path) == er.contents
    assert {path.name for path in tmp_path.iterdir()} == COMPLETE | {".DS_Store"}


def test_the_checkpoint_of_a_finished_run_is_removed_by_the_next_start(
    er: Whole, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    interrupt(er, folder)
    shutil.copy(er.folder / "result.json", folder)
    run(er.config, folder, OPTIONS)
    assert not (folder / "checkpoint").exists()


def test_a_changed_record_is_noticed(er: Whole, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupt(er, folder)
    records = folder / "records.jsonl"
    lines = records.read_bytes().splitlines(keepends=True)
    records.write_bytes(b"".join([*lines[:-1], lines[-1].replace(b"0", b"1", 1)]))
    run(er.config, folder, OPTIONS)  # the older checkpoint does not know the last line
    assert contents(folder) == er.contents
    assert "000000007.safetensors cannot be used" in (folder / "log.txt").read_text()

    interrupt(er, tmp_path / "second")
    records = tmp_path / "second" / "records.jsonl"
    records.write_bytes(lines[0].replace(b"0", b"1", 1) + b"".join(lines[1:]))
    with pytest.raises(CheckpointError, match=r"records\.jsonl: damaged, its first \d+ bytes"):
        run(er.config, tmp_path / "second", OPTIONS)


def test_changed_records_of_a_complete_run_are_noticed(er: Whole, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(er.folder, folder)
    assert read_run(folder).with_records().status == "complete"
    records = (folder / "records.jsonl").read_bytes()
    (folder / "records.jsonl").write_bytes(records.replace(b"0.", b"1.", 1))
    stored = read_run(folder).with_records()
    assert stored.status == "broken"
    assert "records.jsonl is not as the run wrote it" in str(stored.problem)


def test_timings_never_stop_a_run(er: Whole, tmp_path: Path) -> None:
    for number, content in enumerate((b'{"position": 3, "lea', b"\xff\0\n", b"[1]\n", b"{}\n")):
        folder = tmp_path / str(number)
        interrupt(er, folder)
        (folder / "timings.jsonl").write_bytes(content)
        run(er.config, folder, OPTIONS)
        assert contents(folder) == er.contents
    folder = tmp_path / "folder"
    interrupt(er, folder)
    (folder / "timings.jsonl").unlink()
    (folder / "timings.jsonl").mkdir()
    run(er.config, folder, OPTIONS)
    assert contents(folder) == er.contents


def test_a_checkpoint_of_another_configuration_is_refused(er: Whole, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupt(er, folder)
    changed = replace(er.config, lr=er.config.lr * 2)
    text = yaml.safe_dump(changed.to_dict(), sort_keys=False)
    (folder / "config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"lr: 0\.1 there, 0\.2 here"):
        run(changed, folder, OPTIONS)


def test_a_damaged_result_is_refused_by_name(er: Whole, tmp_path: Path) -> None:
    shutil.copytree(er.folder, tmp_path / "run")
    (tmp_path / "run" / "result.json").write_text("{")
    with pytest.raises(DataError, match=r"result\.json"):
        run(er.config, tmp_path / "run", OPTIONS)
