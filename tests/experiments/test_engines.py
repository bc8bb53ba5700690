"""Many runs: in parallel as in sequence, one failure does not stop the others."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from proxreplay.errors import InputError
from proxreplay.experiments.configure import configure
from proxreplay.experiments.engines import Audience, InlineEngine, Job, Outcome, ProcessEngine
from proxreplay.experiments.interrupt import StopRequest
from proxreplay.experiments.jobs import comparison
from proxreplay.experiments.results import find_runs, read_run
from proxreplay.experiments.run import RunProgress
from proxreplay.locking import locked

QUICK = {"steps_per_batch": 1, "eval_every": 50, "refresh.every": 20}


def jobs(out: Path, methods: tuple[str, ...] = ("er", "lpr-er")) -> list[Job]:
    return comparison("split-digits", methods, [0, 1], out, QUICK)


class Ears(Audience):
    """Hears what the functions handed in do something about."""

    def __init__(self, **functions: Callable[..., None]) -> None:
        vars(self).update(functions)


def block(folder: Path) -> None:
    """Put something into the place of a run that is not to be touched."""
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("precious")


def test_parallel_runs_equal_the_same_runs_in_sequence_and_a_failure_stops_no_other(
    tmp_path: Path,
) -> None:
    seen: list[Outcome] = []
    for way, engine in {"p": ProcessEngine(2), "s": InlineEngine()}.items():
        planned = jobs(tmp_path / way)
        blocked = planned[1].folder
        block(blocked)
        outcomes = engine.make(planned, StopRequest(), Ears(on_outcome=seen.append))
        status = {o.job.folder: o.status for o in outcomes}
        assert status == {
            j.folder: "refused" if j.folder == blocked else "complete" for j in planned
        }
        assert sorted(o.job.folder for o in seen) == sorted(status)
        (problem,) = (str(o.problem) for o in seen if o.status == "refused")
        assert "not empty" in problem
        assert [path.name for path in blocked.iterdir()] == ["thesis.tex"]
        seen.clear()
    for name in ("er-seed0", "er-seed1", "lpr-er-seed1"):
        for file in ("records.jsonl", "result.json", "config.yaml"):
            a, b = (tmp_path / way / "runs" / name / file for way in "ps")
            assert a.read_bytes() == b.read_bytes()


def test_a_process_that_dies_costs_its_own_run_only(tmp_path: Path) -> None:
    planned = jobs(tmp_path)
    killed: list[Path] = []

    def kill_once(job: Job, progress: RunProgress) -> None:
        if not killed and progress.position > 5:
            killed.append(job.folder)
            os.kill(worker_of(job), signal.SIGKILL)

    made = ProcessEngine(2).make(planned, StopRequest(), Ears(on_progress=kill_once))
    outcomes = {o.job.folder: o for o in made}
    assert outcomes[killed[0]].status == "failed"
    assert "exit code -9" in str(outcomes[killed[0]].problem)
    assert read_run(killed[0]).status == "failed"
    assert sum(o.status == "complete" for o in outcomes.values()) == 3
    again = InlineEngine().make(planned, StopRequest())
    assert [o.status for o in again] == ["complete"] * 4


@pytest.mark.parametrize("engine", [InlineEngine(), ProcessEngine(2)], ids=["inline", "processes"])
def test_a_study_can_be_interrupted_and_continued(engine: InlineEngine, tmp_path: Path) -> None:
    planned = jobs(tmp_path)
    stop = StopRequest()

    def soon(job: Job, progress: RunProgress) -> None:
        if progress.position == 30:
            stop.signal = signal.SIGINT

    outcomes = engine.make(planned, stop, Ears(on_progress=soon))
    assert "interrupted" in {o.status for o in outcomes}
    assert "failed" not in {o.status for o in outcomes}
    again = InlineEngine().make(planned, StopRequest())  # it may be another engine
    assert [o.status for o in again] == ["complete"] * 4
    assert [r.status for r in find_runs([tmp_path])] == ["complete"] * 4


def test_runs_are_found_whatever_state_they_are_in(tmp_path: Path) -> None:
    InlineEngine().make(jobs(tmp_path, ("er",))[:1], StopRequest())
    for name, text in {"broken": "{", "empty": "", "foreign": "colour: blue"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
    statuses = {run.folder.name: run.status for run in find_runs([tmp_path])}
    assert statuses == {
        "er-seed0": "complete",
        "broken": "broken",
        "empty": "broken",
        "foreign": "broken",
    }


def test_an_engine_needs_at_least_one_process() -> None:
    with pytest.raises(InputError, match="jobs=0"):
        ProcessEngine(0)


def test_methods_are_compared_on_the_same_stream_and_weights() -> None:
    er, lpr = (configure("split-digits", m) for m in ("er", "lpr-er"))
    assert er.with_values({"method": "lpr-er", "refresh.samples": lpr.refresh.samples}) == lpr


def worker_of(job: Job) -> int:
    return int((job.folder / "lock").read_text())


def test_a_signal_to_one_worker_interrupts_its_run_only(tmp_path: Path) -> None:
    planned = jobs(tmp_path)
    stopped: list[Path] = []

    def stop_once(job: Job, progress: RunProgress) -> None:
        if not stopped and progress.position > 5:
            stopped.append(job.folder)
            os.kill(worker_of(job), signal.SIGTERM)

    made = ProcessEngine(1).make(planned, StopRequest(), Ears(on_progress=stop_once))
    outcomes = {o.job.folder: o.status for o in made}
    assert outcomes.pop(stopped[0]) == "interrupted"
    assert list(outcomes.values()) == ["complete"] * 3
    assert read_run(stopped[0]).status == "incomplete"


def test_a_second_interruption_stops_at_once_and_keeps_what_is_there(tmp_path: Path) -> None:
    planned = jobs(tmp_path, ("er",))[:1]

    def leave(job: Job, progress: RunProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ProcessEngine(1).make(planned, StopRequest(), Ears(on_progress=leave))
    with locked(planned[0].folder / "lock"):  # nobody is at work any more
        assert read_run(planned[0].folder).status == "incomplete"


ORPHAN = """
import os, signal, sys
from pathlib import Path
from proxreplay.experiments.engines import Audience, ProcessEngine
from proxreplay.experiments.interrupt import StopRequest
from proxreplay.experiments.jobs import comparison
class Killer(Audience):
    def on_progress(self, job, at):
        os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    planned = comparison("split-digits", ["er"], [0], Path(sys.argv[1]))
    ProcessEngine(1).make(planned, StopRequest(), Killer())
"""


def test_a_worker_whose_parent_was_killed_saves_and_ends(tmp_path: Path) -> None:
    (tmp_path / "orphan.py").write_text(ORPHAN)
    command = [sys.executable, str(tmp_path / "orphan.py"), str(tmp_path / "s")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    folder = tmp_path / "s" / "runs" / "er-seed0"
    with locked(folder / "lock", wait=True):
        assert read_run(folder).status == "incomplete"
        assert (folder / "checkpoint").exists()
