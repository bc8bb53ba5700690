"""A study on Ray ends with the same bytes as a local one, whatever is killed on the way."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proxreplay.errors import InputError
from proxreplay.experiments import ray_engine
from proxreplay.experiments.engines import Audience, InlineEngine, Job, Outcome
from proxreplay.experiments.interrupt import StopRequest
from proxreplay.experiments.jobs import comparison
from proxreplay.experiments.ray_engine import RayEngine, _fits, _Study
from proxreplay.experiments.ray_worker import (
    Channel,
    Surroundings,
    _wait_until_free,
    names_in,
    versions,
)
from proxreplay.experiments.results import find_runs
from proxreplay.experiments.run import RunOptions, RunProgress
from proxreplay.locking import locked

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
METHODS, SEEDS = ("er", "lpr-er"), (0, 1, 2, 3)
SETTINGS = {"steps_per_batch": 1, "eval_every": 20, "refresh.every": 20, "capacity": 100}
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
RESULTS = ("records.jsonl", "result.json", "config.yaml")


def jobs(out: Path) -> list[Job]:
    options = RunOptions(checkpoint_every=5)
    return comparison("split-digits", METHODS, SEEDS, out, SETTINGS, options=options)


def contents(out: Path) -> dict[str, bytes]:
    folders = sorted((out / "runs").glob("*"))
    return {f"{f.name}/{name}": (f / name).read_bytes() for f in folders for name in RESULTS}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the local engine makes of the study."""
    out = tmp_path_factory.mktemp("local")
    InlineEngine().make(jobs(out), StopRequest())
    return contents(out)


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two Ray nodes on this machine, one CPU each."""
    from ray.cluster_utils import Cluster

    made = Cluster()
    try:
        start_node(made)
        start_node(made)
        yield made
    finally:
        made.shutdown()


def start_node(cluster: Any, attempts: int = 5) -> None:
    """Ray gives a node 30 seconds to start, which a busy machine may not keep."""
    while True:
        try:
            cluster.add_node(**NODE)
            return
        except Exception as error:
            attempts -= 1
            if "timed out during startup" not in str(error) or not attempts:
                raise


class Killer(Audience):
    """Ends one worker politely, kills another, then a whole node; each in the middle of a run."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.hit: list[str] = []
        self.seen: list[Outcome] = []

    def on_outcome(self, outcome: Outcome) -> None:
        self.seen.append(outcome)

    def on_progress(self, job: Job, at: RunProgress) -> None:
        name = job.folder.name
        if at.total - at.position < 20 or name in self.hit or len(self.hit) == 3:
            return
        if len(self.hit) < 2:
            number = (signal.SIGTERM, signal.SIGKILL)[len(self.hit)]
            os.kill(int((job.folder / "lock").read_text()), number)
        else:
            (node,) = self.cluster.worker_nodes
            self.cluster.remove_node(node, allow_graceful=False)
        self.hit.append(name)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Ray's own processes and files
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_study_survives_its_worker_its_node_and_its_driver(
    cluster: Any, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    out, killer = tmp_path / "a", Killer(cluster)
    engine = RayEngine(cluster.address)
    outcomes = engine.make(jobs(out), StopRequest(), killer)
    assert [o.status for o in outcomes] == ["complete"] * 8, outcomes
    assert len(killer.hit) == 3
    assert sorted(map(id, killer.seen)) == sorted(map(id, outcomes))
    assert contents(out) == undisturbed
    logs = [path.read_text() for path in (out / "runs").glob("*/log.txt")]
    assert any("resumed after" in text for text in logs)
    assert not ray.is_initialized()

    check_drivers(cluster.address, tmp_path / "b", undisturbed)
    check_two_drivers(cluster.address, tmp_path / "c")
    check_unseen_folder(cluster.address, tmp_path / "d", monkeypatch)
    assert not cluster.head_node.dead_processes()  # joined, and not shut down


def check_drivers(address: str, out: Path, undisturbed: dict[str, bytes]) -> None:
    """One driver is killed, the next interrupted; the local engine finishes the study."""
    with drive(address, out) as killed:
        wait_for_progress(killed)
        killed.kill()
    with drive(address, out) as interrupted:
        wait_for_progress(interrupted)
        interrupted.send_signal(signal.SIGINT)
        _, text = interrupted.communicate()
    assert interrupted.returncode == 128 + signal.SIGINT, text
    assert "The same command again goes on where this one stopped." in text
    # Runs that were over before the signal reached them have no checkpoint any more.
    saved = re.findall(r"^(\S+): interrupted$", text, re.MULTILINE)
    assert all((Path(folder) / "checkpoint").exists() for folder in saved)
    assert {r.status for r in find_runs([out])} <= {"complete", "incomplete"}
    InlineEngine().make(jobs(out)[:4], StopRequest())
    assert contents(out).items() <= undisturbed.items()
    assert [r.status for r in find_runs([out])] == ["complete"] * 4
    assert not list((out / "runs").glob(".*"))  # no marker is left, not even of the killed driver


def check_two_drivers(address: str, out: Path) -> None:
    """A run that somebody else is making is refused by name, and left as it is."""
    job = jobs(out)[0]
    job.folder.mkdir(parents=True)
    with locked(job.folder / "lock"):
        (outcome,) = RayEngine(address, patience=0.0).make([job], StopRequest())
    assert (outcome.status, [p.name for p in job.folder.iterdir()]) == ("refused", ["lock"])
    assert f"{job.folder}: another process is at work on this run" in str(outcome.problem)


def check_unseen_folder(address: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that no node sees is named as the problem of its run, and stays empty."""
    monkeypatch.setattr(ray_engine, "marker", lambda folder: nullcontext(folder / "unseen"))
    (outcome,) = RayEngine(address).make(jobs(out)[:1], StopRequest())
    assert outcome.status == "failed"
    assert f"does not see {out / 'runs'} as the driver sees it; put --out" in str(outcome.problem)
    assert not out.exists()


def drive(address: str, out: Path) -> "subprocess.Popen[str]":
    words = [*("compare", "split-digits", "--methods", ",".join(METHODS), "--seeds", "0-1")]
    words += [*("--engine", "ray", "--address", address, "--out", str(out))]
    words += [*("--checkpoint-every", "5")]
    for key, value in SETTINGS.items():
        words += ["--set", f"{key}={value}"]
    command = [sys.executable, "-m", "proxreplay", *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def wait_for_progress(driver: "subprocess.Popen[str]") -> None:
    assert driver.stderr is not None
    lines = []
    for line in driver.stderr:
        lines.append(line)
        if "batch" in line:
            return
    raise AssertionError("".join(lines))


# --- without a cluster ----------------------------------------------------------------------------


@pytest.fixture
def around(tmp_path: Path) -> Surroundings:
    """What a worker on this machine sees."""
    data = tmp_path / "data"
    (data / "cifar").mkdir(parents=True)
    (tmp_path / ".marker").touch()
    return Surroundings(tmp_path / ".marker", tmp_path, ((data, names_in(data)),), versions())


def test_a_worker_that_sees_the_same_works_where_the_driver_works(around: Surroundings) -> None:
    (around.cwd / "data" / "more").mkdir()  # what is only here does no harm
    around.check()
    before = Path.cwd()
    with around.entered():
        assert Path.cwd() == around.cwd
    with replace(around, cwd=around.cwd / "elsewhere").entered():
        assert Path.cwd() == before


def test_a_folder_on_another_disk_is_named(around: Surroundings, tmp_path: Path) -> None:
    around.marker.unlink()
    with pytest.raises(InputError, match=f"does not see {tmp_path} as the driver sees it; put"):
        around.check()


def test_missing_data_is_named(around: Surroundings, tmp_path: Path) -> None:
    (tmp_path / "data" / "cifar").rmdir()
    with pytest.raises(InputError, match=r"data: cifar is missing here, but the driver has it"):
        around.check()
    (tmp_path / "data").rmdir()
    with pytest.raises(InputError, match=r"data: it is missing here, but the driver has it"):
        around.check()


def test_another_version_is_named(around: Surroundings) -> None:
    other = replace(around, versions=(("proxreplay", "0.0.1"), *around.versions[1:]))
    with pytest.raises(InputError, match=r"has proxreplay .*, but the driver has 0\.0\.1"):
        other.check()


def test_another_source_code_of_the_same_version_is_named(
    around: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxreplay.experiments.environment.code_digest", lambda: "0" * 64)
    with pytest.raises(InputError, match="has source code of proxreplay 00000000, but the driver"):
        around.check()


def test_the_channel_keeps_the_newest_and_passes_the_wish_to_stop_on() -> None:
    channel = Channel()
    assert not channel.tell(3, None)
    assert not channel.tell(3, (1, 10))
    assert channel.collect(stop=True) == {3: (1, 10)}
    assert channel.collect(stop=True) == {}
    assert channel.tell(4, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"address": "ray://10.0.0.1:10001"}, "Ray Client is not supported"),
        ({"address": "http://10.0.0.1:8265"}, r"give HOST:PORT .* or auto"),
        ({"at_a_time": 0}, "jobs=0"),
    ],
    ids=["client", "job-server", "none-at-a-time"],
)
def test_what_cannot_be_done_is_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RayEngine(**arguments)


def test_an_address_from_the_environment_is_refused_like_one_that_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    with pytest.raises(InputError, match=r"address=ray://10\.0\.0\.1:10001: Ray Client is"):
        RayEngine()


def test_ray_chooses_the_gpu(tmp_path: Path) -> None:
    planned = comparison("split-digits", ["er"], [0], tmp_path, {"device": "cuda:1"})
    with pytest.raises(InputError, match="device=cuda:1: Ray chooses the GPU"):
        RayEngine().make(planned, StopRequest())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("address", "message"),
    [("127.0.0.1:1", "no Ray cluster can be joined there"), ("somewhere", "give HOST:PORT")],
)
def test_no_cluster_at_an_address(address: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"address={address}.*{message}"):
        RayEngine(address).make(jobs(tmp_path), StopRequest())
    assert not list(tmp_path.iterdir())


def test_a_node_must_have_room_for_a_run(tmp_path: Path) -> None:
    (job,) = comparison("split-digits", ["er"], [0], tmp_path, {"threads": 2})
    small, large = ({"Resources": {"CPU": float(n), "memory": 1e9}} for n in (1, 2))
    assert not _fits(job, small)
    assert _fits(job, large)
    on_gpu = replace(job, config=job.config.with_values({"device": "cuda"}))
    assert not _fits(on_gpu, large)
    assert _fits(on_gpu, {"Resources": {"CPU": 2.0, "GPU": 1.0}})
    assert not _fits(job, {"Resources": {}})


def test_a_run_that_was_cancelled_before_it_began_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where SIGINT is ignored, as after ``ray start --block &``, Ray cancels with a TypeError."""
    import ray

    def get(ref: Any) -> None:
        raise ray.exceptions.RayTaskError("work", "", TypeError("not callable"))

    monkeypatch.setattr(ray, "get", get)
    seen: list[Any] = []
    study: Any = SimpleNamespace(jobs=jobs(tmp_path), cancelled={1}, outcomes=[])
    study.told = SimpleNamespace(on_outcome=seen.append)
    for number in (0, 1):
        _Study._conclude(study, None, number)
    assert [outcome.job for outcome in seen] == study.jobs[:1]
    assert seen == study.outcomes


def test_a_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxreplay.experiments.ray_engine.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"install 'proxreplay\[ray\]'"):
        RayEngine()


def test_a_task_waits_for_a_lost_worker_unless_asked_to_stop(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert not _wait_until_free(lock, 60.0, lambda: False)  # nobody was ever here
    with locked(lock):
        answers = iter([False, True])
        assert _wait_until_free(lock, 1e9, lambda: next(answers))
        assert not _wait_until_free(lock, 0.0, lambda: False)  # the run itself will refuse
    assert not _wait_until_free(lock, 60.0, lambda: False)
