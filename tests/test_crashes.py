"""Nothing is lost whatever happens to files, and everything ends as if nothing had happened.

A sample of what `tests.crashes` does by the thousand, then single cases one by one.
"""

import errno
import gc
import os
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from proxreplay.cli import app
from proxreplay.errors import CheckpointError, DataError, InputError
from proxreplay.experiments.configure import configure
from proxreplay.experiments.journal import Journal
from proxreplay.experiments.results import read_run
from proxreplay.experiments.run import run
from tests.crashes import (
    COMPLETE,
    CRASHES,
    OPTIONS,
    SUBJECTS,
    TINY,
    Run,
    Subject,
    can_be,
    contents,
    crash,
    files_in,
)
from tests.disk import after_kill

SAMPLE = {"kills": 3, "losses": 3, "errors": 2, "damage": 4, "workers": 1}


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return SUBJECTS[request.param](tmp_path_factory.mktemp("subject"))


def test_the_recording_is_what_was_done(subject: Subject, tmp_path: Path) -> None:
    kinds = {operation.kind for operation in subject.recorder.operations}
    assert kinds >= {"create", "write", "fsync", "rename", "fsync-folder"}
    after_kill(subject.recorder, len(subject.recorder.operations)).write_to(tmp_path)
    assert files_in(tmp_path) == files_in(subject.recorder.root)


@pytest.mark.parametrize("kind", CRASHES)
def test_nothing_is_lost(kind: str, subject: Subject) -> None:
    for seed in range(SAMPLE[kind] if can_be(kind, subject) else 0):
        problem = crash(subject, kind, 1000 + seed)
        assert problem is None, f"{kind} {seed}: {problem}"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("name", ["records.jsonl", "timings.jsonl", "log.txt", "lock"])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(
    name: str, er: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    er.interrupt(folder)
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
def er(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("er"), "er")


def test_leftovers_never_block_and_only_ours_are_removed(er: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    er.interrupt(folder)
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
    er: Run, name: str, tmp_path: Path
) -> None:
    for left in (name, "lock", ".DS_Store"):
        (tmp_path / left).write_text("bench")
    run(er.config, tmp_path, OPTIONS)
    assert contents(tmp_path) == er.contents
    assert {path.name for path in tmp_path.iterdir()} == COMPLETE | {".DS_Store"}


def test_the_checkpoint_of_a_finished_run_is_removed_by_the_next_start(
    er: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    er.interrupt(folder)
    for name in ("records.jsonl", "result.json"):
        shutil.copy(er.whole / name, folder)
    run(er.config, folder, OPTIONS)
    assert not (folder / "checkpoint").exists()


def test_a_changed_record_is_noticed(er: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    er.interrupt(folder)
    records = folder / "records.jsonl"
    lines = records.read_bytes().splitlines(keepends=True)
    records.write_bytes(b"".join([*lines[:-1], lines[-1].replace(b"0", b"1", 1)]))
    run(er.config, folder, OPTIONS)  # the older checkpoint does not know the last line
    assert contents(folder) == er.contents
    assert "000000007.safetensors cannot be used" in (folder / "log.txt").read_text()

    er.interrupt(tmp_path / "second")
    records = tmp_path / "second" / "records.jsonl"
    records.write_bytes(lines[0].replace(b"0", b"1", 1) + b"".join(lines[1:]))
    with pytest.raises(CheckpointError, match=r"records\.jsonl: damaged, its first \d+ bytes"):
        run(er.config, tmp_path / "second", OPTIONS)


def test_changed_records_of_a_complete_run_are_noticed(er: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(er.whole, folder)
    assert read_run(folder).with_records().status == "complete"
    records = (folder / "records.jsonl").read_bytes()
    (folder / "records.jsonl").write_bytes(records.replace(b"0.", b"1.", 1))
    stored = read_run(folder).with_records()
    assert stored.status == "broken"
    assert "records.jsonl is not as the run wrote it" in str(stored.problem)


def test_timings_never_stop_a_run(er: Run, tmp_path: Path) -> None:
    for number, content in enumerate((b'{"position": 3, "lea', b"\xff\0\n", b"[1]\n", b"{}\n")):
        folder = tmp_path / str(number)
        er.interrupt(folder)
        (folder / "timings.jsonl").write_bytes(content)
        run(er.config, folder, OPTIONS)
        assert contents(folder) == er.contents
    folder = tmp_path / "folder"
    er.interrupt(folder)
    (folder / "timings.jsonl").unlink()
    (folder / "timings.jsonl").mkdir()
    run(er.config, folder, OPTIONS)
    assert contents(folder) == er.contents


def test_a_checkpoint_of_another_configuration_is_refused(er: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    er.interrupt(folder)
    changed = replace(er.config, lr=er.config.lr * 2)
    text = yaml.safe_dump(changed.to_dict(), sort_keys=False)
    (folder / "config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"lr: 0\.1 there, 0\.2 here"):
        run(changed, folder, OPTIONS)


def test_a_finished_run_with_changed_records_is_not_returned(er: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(er.whole, folder)
    records = (folder / "records.jsonl").read_bytes()
    (folder / "records.jsonl").write_bytes(records.replace(b"0.", b"1.", 1))
    before = files_in(folder)
    with pytest.raises(DataError, match=r"run: records.jsonl is not as the run wrote it.*remove"):
        run(er.config, folder, OPTIONS)
    answer = CliRunner().invoke(app, ["resume", str(folder)])
    assert answer.exit_code == 2
    assert "records.jsonl is not as the run wrote it" in answer.stderr
    assert files_in(folder) == before
    (folder / "records.jsonl").unlink()  # a result may be kept without its curve
    assert run(er.config, folder, OPTIONS).records_sha256
    assert CliRunner().invoke(app, ["resume", str(folder)]).exit_code == 0


def test_a_damaged_environment_is_described_again(er: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    er.interrupt(folder)
    (folder / "environment.json").write_text("{}")
    run(er.config, folder, OPTIONS)
    stored = read_run(folder).with_records()
    assert stored.problem is None
    assert stored.environment["torch"]


def test_a_damaged_result_is_refused_by_name(er: Run, tmp_path: Path) -> None:
    shutil.copytree(er.whole, tmp_path / "run")
    (tmp_path / "run" / "result.json").write_text("{")
    with pytest.raises(DataError, match=r"result\.json"):
        run(er.config, tmp_path / "run", OPTIONS)
