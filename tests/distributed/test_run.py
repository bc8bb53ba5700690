"""A run of several processes: torchrun's way in, and the loss of a process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from proxreplay.cli.runs import make
from proxreplay.data import Dataset
from proxreplay.errors import InputError, ProxreplayError
from proxreplay.experiments.configure import configure
from proxreplay.experiments.engines import Job
from proxreplay.experiments.results import read_run
from proxreplay.experiments.run import run
from tests.distributed.kills import SETTINGS
from tests.distributed.pool import Pool, problem_of

ROOT = Path(__file__).parents[2]
KILLS = 10 if os.environ.get("PROXREPLAY_SLOW") == "1" else 1


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("kills")
    command = [sys.executable, "-m", "tests.distributed.kills", str(folder), str(KILLS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_killed_process_ends_the_run_and_resume_makes_the_same_bytes(killed: Any) -> None:
    assert killed["whole"] == [0, 0]
    assert len(killed["kills"]) == KILLS
    for one in killed["kills"]:
        victim = one["victim"]
        assert one["codes"][victim] == -9
        assert one["codes"][1 - victim] not in (0, None)  # it ended by itself, and said so
        assert "ProcessError" in one["said"]
        assert one["resumed"] == [0, 0]
        assert one["same"]


def test_a_stop_in_one_process_is_one_in_all_and_one_process_goes_on(killed: Any) -> None:
    stopped = killed["stopped"]
    assert stopped["codes"] == [143, 143]
    assert stopped["saved"] == 1
    assert stopped["alone"] == [0]
    assert stopped["lines"] == killed["lines"]


def small(method: str = "er", **settings: Any) -> Any:
    return configure("split-digits", method, SETTINGS | {"stream.limit": 20} | settings, {})


def runs_that_fail(folder: str) -> dict[str, str]:
    import torch.distributed as dist

    rank = dist.get_rank()
    place = Path(folder)
    found = {
        "settings": problem_of(lambda: run(small(lr=0.1 + rank), place / "settings")),
        "diagnostics": problem_of(
            lambda: run(small(**{"diagnostics.gradients_every": 1}), place / "diagnostics")
        ),
    }
    with patch.object(Dataset, "digest", lambda self: f"of process {rank}"):
        found["data"] = problem_of(lambda: run(small(), place / "data"))
    (place / "foreign").mkdir(exist_ok=True)
    (place / "foreign" / "letter.txt").write_text("not a run")
    found["foreign"] = problem_of(lambda: run(small(), place / "foreign"))
    result = run(small(), place / "fine")
    found["again"] = str(run(small(), place / "fine") == result)
    return found


def test_bad_starts_are_named_in_all_processes_and_nothing_is_written(
    two: Pool, tmp_path: Path
) -> None:
    for found in two.run(runs_that_fail, str(tmp_path)):
        assert "process 1 of 2 was started with something else than process 0" in found["settings"]
        assert "lr" in found["settings"]
        assert "not with several processes" in found["diagnostics"]
        assert "process 1 of 2 holds something else than process 0 in data." in found["data"]
        assert "holds no run" in found["foreign"]
        assert found["again"] == "True"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fine", "foreign"]
    assert read_run(tmp_path / "fine").status == "complete"


def test_torchrun_makes_one_run_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    jobs = [Job(small(), tmp_path / name) for name in "ab"]
    with pytest.raises(InputError, match="2 runs in processes that torchrun started"):
        make(jobs)


def test_torchrun_resumes_a_complete_run_by_doing_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)  # no group could be made, and none is needed
    make([])


def test_no_group_where_one_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ProxreplayError, match="start with torchrun"):
        make([Job(small(), tmp_path / "run")])
    assert not (tmp_path / "run").exists()
