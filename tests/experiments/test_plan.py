"""What a plan counts is what a run then does."""

from pathlib import Path

import pytest

from proxreplay.experiments.configure import configure
from proxreplay.experiments.plan import plan
from proxreplay.experiments.results import read_run
from proxreplay.experiments.run import run

QUICK = {"steps_per_batch": 2, "eval_every": 13, "stream.limit": 55}


def test_the_counts_are_those_of_the_run(tmp_path: Path) -> None:
    config = configure("split-digits", "lpr-ema", QUICK)
    planned = plan(config)
    run(config, tmp_path)
    records = read_run(tmp_path).records
    trained = [r for r in records if r["kind"] == "train"]
    evaluated = [r for r in records if r["kind"] == "evaluation" and r["split"] == "validation"]
    assert planned.trained_batches == len(trained)
    assert planned.sgd_steps == 2 * len(trained)
    assert planned.stream_batches == 5 * 6
    assert planned.refreshes == sum(r["kind"] == "refresh" for r in records)
    assert planned.evaluations == sum(not r.get("online") for r in evaluated)
    assert planned.evaluated_images > 2 * planned.evaluations
    assert planned.rule_bytes > 0
    assert planned.memory_bytes >= 50 * 64


def test_refreshes_at_task_ends_are_counted(tmp_path: Path) -> None:
    config = configure("split-digits", "sgp", QUICK, {"refresh.every": "task"})
    run(config, tmp_path)
    refreshes = [r for r in read_run(tmp_path).records if r["kind"] == "refresh"]
    assert plan(config).refreshes == len(refreshes) == 5


def test_a_plain_run_has_no_refreshes() -> None:
    planned = plan(configure("split-digits", "er", QUICK))
    assert (planned.refreshes, planned.rule_bytes) == (0, 0)
    assert planned.seconds["refreshing"] == 0
    assert dict(planned.described())["tasks"] == "5"


@pytest.mark.parametrize(
    "values",
    [{"refresh.every": 1, "stream.short_last": "train"}, {"capacity": 1}],
    ids=["every batch refreshes", "a memory of one"],
)
def test_the_calibration_finds_something_to_time(values: dict[str, object]) -> None:
    planned = plan(configure("split-digits", "lpr-er", QUICK, values))
    assert min(planned.seconds["learning"], planned.seconds["refreshing"]) > 0


def test_a_rule_that_learns_from_steps_has_no_refreshes() -> None:
    planned = plan(configure("split-digits", "klpr-er", QUICK))
    assert planned.refreshes == 0
    assert planned.rule_bytes > 0


@pytest.mark.parametrize(("every", "said"), [(10, "at most 2"), (5, "5")])
def test_refreshes_that_may_be_left_out_are_counted_as_most(every: int, said: str) -> None:
    """25 batches are trained. Only the default interval is stretched."""
    values = {"lpr.omega_0": None, "refresh.every": every}
    planned = plan(configure("split-digits", "lpr-er", QUICK, values))
    assert dict(planned.described())["refreshes"] == said
