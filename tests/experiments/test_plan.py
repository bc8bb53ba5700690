"""What a plan counts is what a run then does."""

from pathlib import Path

import pytest
import torch
from torch import nn

from proxreplay.experiments.build import build_learner, build_stream
from proxreplay.experiments.configure import configure, declared
from proxreplay.experiments.plan import plan
from proxreplay.experiments.results import read_run
from proxreplay.experiments.run import run
from proxreplay.replay import Learner
from proxreplay.replay.class_statistics import TOGETHER, SharedCovariance

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


@pytest.mark.parametrize("capacity", [50, 400, None])
def test_a_full_memory_holds_as_much_as_was_planned(capacity: int | None) -> None:
    config = configure("split-digits", "er", {"capacity": capacity})
    benchmark = declared(config)
    dataset = benchmark.load(None)
    stream = build_stream(config, benchmark, dataset)
    learner = build_learner(config, benchmark, dataset, stream)
    assert isinstance(learner, Learner)
    for batch in stream:
        learner.remember(batch.inputs, batch.labels)
    full = learner.memory.nbytes if capacity else len(learner.memory) * learner.memory.row_nbytes
    assert plan(config).memory_bytes == full


def held(thing: object) -> int:
    """Bytes of all tensors that an object has, each storage once."""
    parts = [thing, *(p for p in vars(thing).values() if isinstance(p, SharedCovariance))]
    found = [t for part in parts for t in vars(part).values() if isinstance(t, torch.Tensor)]
    found += [t for m in vars(thing).values() if isinstance(m, nn.Module) for t in m.parameters()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return sum(storages.values())


@pytest.mark.parametrize("first", [2, 5])
def test_a_companion_holds_as_much_as_was_planned(first: int) -> None:
    config = configure("split-digits", "er", {"companion.weight": 1.0, "stream.first": first})
    benchmark = declared(config)
    dataset = benchmark.load(None)
    stream = build_stream(config, benchmark, dataset)
    learner = build_learner(config, benchmark, dataset, stream)
    assert isinstance(learner, Learner)
    companion = learner.companion
    assert companion is not None
    most = 0
    for batch in stream:
        learner.remember(batch.inputs, batch.labels)
        rows = len(companion.statistic.state_dict()["recent"])
        most = max(most, held(companion) + (TOGETHER - 1 - rows) * 256 * 8)
    planned = plan(config)
    assert planned.companion_bytes == most  # d = 256
    said = dict(planned.described())["companion"]
    assert said == f"at most {most / 2**20:.1f} MiB"


def test_without_a_companion_there_is_no_line_for_it() -> None:
    assert "companion" not in dict(plan(configure("split-digits", "er", QUICK)).described())


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
