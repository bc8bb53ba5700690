"""A run is the same whether it is left alone, interrupted or killed; its folder is its own."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from proxreplay.errors import CheckpointError, DivergenceError, InputError, StorageError
from proxreplay.experiments import run as engine
from proxreplay.experiments.build import build_stream
from proxreplay.experiments.config import RunConfig
from proxreplay.experiments.configure import configure, declared
from proxreplay.experiments.engines import Job, make_one
from proxreplay.experiments.interrupt import StopRequest
from proxreplay.experiments.ownership import owned
from proxreplay.experiments.recipes import METHODS
from proxreplay.experiments.results import read_json, read_run
from proxreplay.experiments.run import Interrupted, RunOptions, RunProgress, run
from proxreplay.serialization import load_state

QUICK = {"steps_per_batch": 1, "eval_every": 25, "refresh.every": 5, "capacity": 30}


PLAIN = [name for name in METHODS if not name.endswith("-avg")]


def quick(method: str, **values: object) -> RunConfig:
    return configure("split-digits", method, QUICK, values)


def contents(folder: Path) -> dict[str, bytes]:
    """What must be bit-identical: everything but times and places."""
    return {n: (folder / n).read_bytes() for n in ("config.yaml", "records.jsonl", "result.json")}


def interrupted(config: RunConfig, folder: Path, at: int, options: RunOptions) -> None:
    """Ask the run to stop after so many batches."""
    stop = StopRequest()

    def watch(progress: RunProgress) -> None:
        if progress.position == at:
            stop.signal = signal.SIGTERM

    with pytest.raises(Interrupted, match=f"stopped after {at} of"):
        run(config, folder, options, stop=stop, on_progress=watch)


@pytest.mark.parametrize("method", [*PLAIN, "lpr-er-avg"])
def test_an_interrupted_run_ends_as_if_it_had_not_been(method: str, tmp_path: Path) -> None:
    """Two short tasks: refreshes, a full memory, new classes and a snapshot lie in between."""
    config = quick(method, **{"stream.first": 2, "stream.limit": 80, "loss.teacher_every": 3})
    run(config, tmp_path / "whole")
    for at in (3, 11):  # before the first refresh, and in the second task
        interrupted(config, tmp_path / "parts", at, RunOptions(checkpoint_every=2))
    run(config, tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert not (tmp_path / "parts" / "checkpoint").exists()


@pytest.mark.parametrize(("method", "head"), [("gpm", "treat"), ("sgp", "free")])
def test_a_run_with_refreshes_at_task_ends_goes_on_exactly(
    method: str, head: str, tmp_path: Path
) -> None:
    values = {"refresh.every": "task", "refresh.samples": 40, "projection.head": head}
    config = quick(method, **values)
    run(config, tmp_path / "whole")
    refreshes = [r for r in read_run(tmp_path / "whole").records if r["kind"] == "refresh"]
    assert [(r["task"], r["examples"]) for r in refreshes] == [(t, 40) for t in range(5)]
    # within a task, right after the end of one, and within the last one
    for at in (3, refreshes[1]["position"] + 1, refreshes[3]["position"] + 4):
        interrupted(config, tmp_path / "parts", at, RunOptions(checkpoint_every=10))
    run(config, tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_at_task_ends_the_basis_is_that_of_the_published_algorithm(tmp_path: Path) -> None:
    """The first layer sees the images whatever the weights are, so its basis is known by SVD."""
    values = {"refresh.every": "task", "diagnostics.spectrum": True, "projection.energy": 0.95}
    config = quick("gpm", **values)
    run(config, tmp_path)
    (record,) = [r for r in read_run(tmp_path).records if r["kind"] == "spectrum"]
    closed = record["layers"]["linear1"]["shrunk_by_half"]

    benchmark = declared(config)
    M = torch.zeros(65, 0).double()
    for task in build_stream(config, benchmark, benchmark.load(None)).tasks:
        pixels = (task.train[:].inputs.double().flatten(1) / 16 - 0.305) / 0.376
        R = torch.cat([pixels, torch.ones(len(pixels), 1).double()], dim=1).T
        rest = R - M @ M.T @ R
        U, s, _ = torch.linalg.svd(rest, full_matrices=False)
        held, total = (R**2).sum() - (rest**2).sum(), (R**2).sum()
        k = next(k for k in range(66) if held + (s[:k] ** 2).sum() >= 0.95 * total)
        M = torch.cat([M, U[:, :k]], dim=1)
    assert closed == M.shape[1]
    assert 10 < closed < 65


@pytest.mark.parametrize("method", ["owm", "aop", "gpm", "sgp"])
def test_a_free_head_is_not_projected(method: str, tmp_path: Path) -> None:
    for head in ("treat", "free"):
        config = quick(method, **{"projection.head": head, "diagnostics.spectrum": True})
        run(config, tmp_path / head)
        (spectrum,) = [r for r in read_run(tmp_path / head).records if r["kind"] == "spectrum"]
        assert ("head" in spectrum["layers"]) == (head == "treat")
        assert {"linear1", "linear2"} <= set(spectrum["layers"])


@pytest.mark.parametrize("method", ["er", "lpr-er"])
def test_only_gpm_and_sgp_are_refreshed_at_task_ends(method: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"refresh.every=task: only gpm and sgp .* not {method}"):
        run(quick(method, **{"refresh.every": "task"}), tmp_path)


def test_a_killed_process_loses_only_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    """A real process and a real kill; what each method keeps is compared above."""
    config, folder = quick("lpr-er-avg", steps_per_batch=3), tmp_path / "killed"
    run(config, tmp_path / "whole")
    command = [sys.executable, "-m", "proxreplay", "run", "split-digits", "--method", "lpr-er-avg"]
    command += ["--checkpoint-every", "7", "--out", str(folder)]
    for key, value in {**QUICK, "steps_per_batch": 3}.items():
        command += ["--set", f"{key}={value}"]
    dice = random.Random("lpr-er-avg")
    for _ in range(2):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not (folder / "checkpoint").exists() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(dice.random() * 0.4)
        process.kill()
        process.wait()
    run(config, folder)
    assert contents(folder) == contents(tmp_path / "whole")


def test_the_same_configuration_gives_the_same_bits(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(quick("lpr-er", seed=5), tmp_path / name)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    run(quick("lpr-er", seed=6), tmp_path / "c")
    assert contents(tmp_path / "a")["records.jsonl"] != contents(tmp_path / "c")["records.jsonl"]


def test_a_complete_run_is_not_made_again(tmp_path: Path) -> None:
    first = run(quick("er"), tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*.js*")}
    assert run(quick("er"), tmp_path, on_progress=lambda p: pytest.fail("it ran")) == first
    assert {p: p.stat().st_mtime_ns for p in tmp_path.glob("*.js*")} == before


def test_a_folder_of_another_configuration_is_refused_and_left_alone(tmp_path: Path) -> None:
    run(quick("er"), tmp_path)
    before = contents(tmp_path)
    with pytest.raises(InputError, match=r"another configuration \(lr: 0\.1 there, 0\.05 here\)"):
        run(quick("er", lr=0.05), tmp_path)
    assert contents(tmp_path) == before


def test_a_folder_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match="not empty and holds no run"):
        run(quick("er"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("status", ["complete", "incomplete"])
def test_a_refused_command_leaves_no_word_of_failure(status: str, tmp_path: Path) -> None:
    if status == "complete":
        run(quick("er"), tmp_path)
    else:
        interrupted(quick("er"), tmp_path, 3, RunOptions())
    outcome = make_one(Job(quick("er", lr=0.05), tmp_path), StopRequest(), lambda progress: None)
    assert outcome.status == "refused"
    assert read_run(tmp_path).status == status


def test_a_second_process_leaves_no_word_of_failure(tmp_path: Path) -> None:
    def again(progress: RunProgress) -> None:
        outcome = make_one(Job(quick("er"), tmp_path), StopRequest(), lambda progress: None)
        assert outcome.status == "refused"
        assert read_run(tmp_path).status == "incomplete"

    run(quick("er"), tmp_path, on_progress=again)


def test_what_fails_before_anything_was_computed_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="which data"):
        run(configure("custom", "er"), tmp_path / "deep" / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_nothing_computed_in_it_can_be_used_again(tmp_path: Path) -> None:
    wrong = quick("er", network=f"{tmp_path}/net.py:net")
    (tmp_path / "net.py").write_text("from torch import nn\ndef net(): return nn.Linear(3, 10)\n")
    folder = tmp_path / "run"
    with pytest.raises(InputError, match="cannot take inputs"):
        run(wrong, folder)
    assert read_run(folder).status == "failed"
    run(quick("er"), folder)
    assert read_run(folder).status == "complete"
    assert read_run(folder).config == quick("er")


def test_two_processes_do_not_work_on_one_folder(tmp_path: Path) -> None:
    def again(progress: RunProgress) -> None:
        with pytest.raises(InputError, match="another process is at work"):
            run(quick("er"), tmp_path)

    run(quick("er"), tmp_path, on_progress=again)


def test_a_damaged_checkpoint_is_reported_and_the_older_one_used(tmp_path: Path) -> None:
    config = quick("lpr-er")
    run(config, tmp_path / "whole")
    folder = tmp_path / "damaged"
    interrupted(config, folder, 45, RunOptions(checkpoint_every=20))
    older, newest = sorted((folder / "checkpoint").iterdir())
    assert (int(older.stem), int(newest.stem)) == (40, 45)
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    run(config, folder)
    assert contents(folder) == contents(tmp_path / "whole")
    assert "000000045.safetensors cannot be used" in (folder / "log.txt").read_text()


def test_when_every_checkpoint_is_damaged_the_run_does_not_pretend(tmp_path: Path) -> None:
    config = quick("er")
    interrupted(config, tmp_path, 45, RunOptions(checkpoint_every=20))
    for checkpoint in (tmp_path / "checkpoint").iterdir():
        checkpoint.write_bytes(b"")
    with pytest.raises(CheckpointError, match="no checkpoint can be used"):
        run(config, tmp_path)


def test_records_that_are_missing_are_noticed(tmp_path: Path) -> None:
    config = quick("er")
    interrupted(config, tmp_path, 45, RunOptions())
    os.truncate(tmp_path / "records.jsonl", 100)
    with pytest.raises(CheckpointError, match="records are missing"):
        run(config, tmp_path)


def test_a_full_disk_stops_the_run_and_leaves_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = quick("er")
    run(config, tmp_path / "whole")
    folder = tmp_path / "full"
    save = engine.save_checkpoint

    def full(where: Path, position: int, parts: dict[str, object]) -> None:
        if position > 40:
            raise OSError(28, "No space left on device")
        save(where, position, parts)

    monkeypatch.setattr(engine, "save_checkpoint", full)
    with pytest.raises(StorageError, match=r"No space left on device.*proxreplay resume"):
        run(config, folder, RunOptions(checkpoint_every=20))
    monkeypatch.undo()
    assert read_run(folder).status == "incomplete"
    run(config, folder)
    assert contents(folder) == contents(tmp_path / "whole")


def test_a_run_that_diverges_stops_and_keeps_the_last_good_state(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match=r"stream batches; the learner is in .*diverged"):
        run(quick("er", lr=1e10), tmp_path)
    assert read_run(tmp_path).status == "failed"
    assert "NaN" not in (tmp_path / "records.jsonl").read_text()
    weights = load_state(tmp_path / "diverged.safetensors")["model"]
    assert all(bool(torch.isfinite(w).all()) for w in weights.values() if torch.is_tensor(w))


def test_evaluations_are_never_missing_around_a_switch(tmp_path: Path) -> None:
    run(quick("er", eval_every=1000), tmp_path)
    records = read_run(tmp_path).records
    task_of = {r["position"]: r["task"] for r in records if r["kind"] == "train"}
    seen = {r["position"] for r in records if r["kind"] == "evaluation" and "position" in r}
    firsts = [min(p for p, t in task_of.items() if t == task) for task in range(1, 5)]
    for first in firsts:
        assert {first - 1, first, first + 1, first + 2} <= seen
    assert len(seen) == 4 * len(firsts) + 1


def test_test_examples_are_left_alone_when_told_so(tmp_path: Path) -> None:
    result = run(quick("er", test=False), tmp_path)
    assert result.measures["acc"] is None
    assert all(r.get("split") != "test" for r in read_run(tmp_path).records)


def test_an_average_is_reported_beside_the_online_network(tmp_path: Path) -> None:
    result = run(quick("ema"), tmp_path)
    assert result.predictors["online"]["aaa"] != result.measures["aaa"]


@pytest.mark.parametrize("completes", [True, False], ids=["it is complete", "it is at work"])
def test_a_run_that_somebody_else_begins_while_this_one_gets_ready(
    completes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder, ready = quick("er", **{"stream.limit": 20}), tmp_path / "run", engine._Run
    others = []
    with ExitStack() as at_work:

        def slowly(*arguments: object) -> object:
            made = ready(*arguments)  # type: ignore[arg-type]
            monkeypatch.setattr(engine, "_Run", ready)
            if completes:
                others.append(run(config, folder))
            else:
                at_work.enter_context(owned(folder, config))
            return made

        monkeypatch.setattr(engine, "_Run", slowly)
        if completes:
            again: list[RunProgress] = []
            assert run(config, folder, on_progress=again.append) == others[0]
            assert again == []  # it was not made a second time
        else:
            with pytest.raises(InputError, match="another process is at work on this run"):
                run(config, folder)
            assert not (folder / "records.jsonl").exists()


def test_another_source_code_that_goes_on_with_a_run_is_named_and_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = quick("er", **{"stream.first": 2, "stream.limit": 60})
    folder = tmp_path / "run"
    interrupted(config, folder, 4, RunOptions())
    before = read_json(folder / "environment.json")
    interrupted(config, folder, 6, RunOptions())
    assert read_json(folder / "environment.json") == before  # the same code goes on
    assert "another source code" not in caplog.text
    monkeypatch.setattr("proxreplay.experiments.environment.code_digest", lambda: "0" * 64)
    run(config, folder)
    assert "made by another source code of proxreplay" in caplog.text
    after = read_json(folder / "environment.json")
    assert [one["code"] for one in after.pop("continued")] == ["0" * 64]
    assert after == before


def test_a_rule_that_never_acted_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    short = {"stream.first": 2, "stream.limit": 15}
    run(quick("lpr-er", **short), tmp_path / "idle")
    assert "LPR never acted, because the stream ended before its first refresh" in caplog.text
    caplog.clear()
    run(quick("lpr-er", **short, **{"refresh.every": 1}), tmp_path / "refreshed")
    run(quick("er", **short), tmp_path / "plain")
    assert "never acted" not in caplog.text


def test_warnings_of_a_run_are_shown_and_kept(tmp_path: Path) -> None:
    """Beside the file, on standard error, as those before and after a run."""
    code = (
        "import logging\nfrom pathlib import Path\n"
        "from proxreplay.experiments.environment import logging_to\n"
        f"with logging_to(Path({str(tmp_path / 'log.txt')!r})):\n"
        "    logging.getLogger('proxreplay.x').warning('look here')\n"
        "    logging.getLogger('proxreplay.x').info('not here')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "look here\n"
    assert "look here" in (tmp_path / "log.txt").read_text()
    assert "not here" in (tmp_path / "log.txt").read_text()
