from pathlib import Path

import pytest

from proxreplay.data.scenarios import ClassIncremental
from proxreplay.errors import InputError
from proxreplay.experiments.benchmarks import BENCHMARKS, find_benchmark
from proxreplay.experiments.build import build_stream
from proxreplay.experiments.config import RunConfig, dump_settings
from proxreplay.experiments.configure import configure, declared, read_layer
from proxreplay.experiments.recipes import METHODS, find_method
from proxreplay.experiments.results import read_config

PUBLISHED = [  # benchmark, method, lr, omega_0, beta: the paper's selected values
    ("split-cifar100", "lpr-er", 0.1, 4.0, 2.0),
    ("split-cifar100", "lpr-der", 0.05, 1.0, 1.0),
    ("split-cifar100", "lpr-ema", 0.05, 0.04, 1.0),
    ("split-cifar100", "lpr-lode", 0.1, 1.0, 2.0),
    ("split-tinyimagenet", "lpr-er", 0.01, 0.25, 2.0),
    ("online-clear", "lpr-er", 0.01, 1.0, 1.0),
    ("online-clear", "lpr-der", 0.1, 0.25, 1.0),
]


@pytest.mark.parametrize(("benchmark", "method", "lr", "omega_0", "beta"), PUBLISHED)
def test_the_papers_settings_are_the_defaults(
    benchmark: str, method: str, lr: float, omega_0: float, beta: float
) -> None:
    config = configure(benchmark, method)
    assert (config.lr, config.lpr.omega_0, config.lpr.beta) == (lr, omega_0, beta)
    assert config.refresh.every == 10
    assert config.lr == configure(benchmark, method.removeprefix("lpr-")).lr


@pytest.mark.parametrize("benchmark", BENCHMARKS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_settings_on_every_benchmark(benchmark: str, method: str) -> None:
    config = configure(benchmark, method)
    declaration = find_benchmark(benchmark)
    assert config.capacity == declaration.capacity
    assert config.steps_per_batch == declaration.steps_per_batch


@pytest.mark.parametrize(
    ("method", "samples"), [("lpr-er", 100), ("lpr-lode", 100), ("er", None), ("gpm", None)]
)
def test_lpr_is_refreshed_from_a_part_of_the_memory_unless_told_otherwise(
    method: str, samples: int | None
) -> None:
    assert configure("split-cifar100", method).refresh.samples == samples
    assert configure("split-cifar100", method, {"refresh.samples": "all"}).refresh.samples is None


def test_later_layers_are_stronger() -> None:
    config = configure("split-cifar100", "lpr-er", {"lr": 0.3, "capacity": 7}, {"lr": 0.4})
    assert (config.lr, config.capacity, config.lpr.omega_0) == (0.4, 7, 4.0)


def test_a_file_of_another_run_is_not_mistaken() -> None:
    other = configure("split-digits", "er").to_dict()
    with pytest.raises(InputError, match="of er on split-digits, but lpr-er on split-cifar10 was"):
        configure("split-cifar10", "lpr-er", other)


def test_what_a_run_wrote_is_that_run_again_however_old_it_is() -> None:
    """Runs of every version since 0.1 are kept; some know no companion, some an `ema` section."""
    kept = sorted((Path(__file__).parents[2] / "docs" / "evidence").rglob("config.yaml"))
    assert len(kept) > 90
    said = []
    for path in kept:
        stored = read_config(path)
        values, remarks = read_layer(path)
        assert configure(stored.benchmark, stored.method, values) == stored
        said += [f"{stored.method}: {remark}" for remark in remarks if "says nothing" in remark]
    with_companion = [one for one in said if "companion.weight: 0.0 is taken" in one]
    assert with_companion
    assert all(one.startswith("anytime: ") for one in with_companion)
    assert any(
        one.startswith("lpr-er-avg: ") and "of lpr.per: step is taken" in one for one in said
    )


def test_a_setting_that_came_later_is_compared_with_what_these_settings_make_today(
    tmp_path: Path,
) -> None:
    """The recipe has omega_0 here, and would act at every step; without it, it would not."""
    values = configure("split-digits", "lpr-er", {"lpr.omega_0": None}).to_dict()
    del values["lpr"]["per"]
    (tmp_path / "config.yaml").write_text(dump_settings(values))
    (remark,) = read_layer(tmp_path / "config.yaml")[1]
    assert "says nothing of lpr.per: step is taken" in remark
    assert "--set lpr.per=batch" in remark


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ({}, "step"),  # the paper's omega_0
        ({"lpr.omega_0": None}, "batch"),
        ({"lpr.omega_0": None, "lpr.per": "step"}, "step"),
        ({"lpr.omega_0": None, "lpr.gradient": "all"}, "step"),
        ({"lpr.per": "batch"}, "batch"),
    ],
    ids=["omega_0", "none", "none, asked for", "whole", "omega_0, asked for"],
)
def test_how_often_lpr_acts_is_settled_before_a_run(
    layer: dict[str, object], expected: str
) -> None:
    """Runs that do not say so are from before there was a choice, and acted at every step."""
    assert configure("split-cifar100", "lpr-er", layer).lpr.per == expected
    assert configure("split-cifar100", "er").lpr.per == RunConfig("", "").lpr.per == "step"


@pytest.mark.parametrize(
    ("name", "near"), [("lpr_er", "lpr-er"), ("lod", "lode"), ("a-gem", "agem")]
)
def test_an_unknown_method_is_refused_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(InputError, match=f"unknown method '{name}'; the nearest is '{near}'"):
        find_method(name)


@pytest.mark.parametrize("method", ["gpm", "sgp"])
def test_runs_that_treat_norms_or_the_head_differently_are_told_apart(method: str) -> None:
    uses = find_method(method).uses
    assert {"projection.norms", "projection.head", "refresh.every"} <= set(uses)


def test_a_limit_shortens_every_task() -> None:
    config = configure("split-digits", "er", {"stream.limit": 25})
    benchmark = declared(config)
    dataset = benchmark.load(None)
    stream = build_stream(config, benchmark, dataset)
    assert [len(task.train) for task in stream.tasks] == [25] * 5
    whole = build_stream(configure("split-digits", "er"), benchmark, dataset)
    assert stream.tasks[2].train.rows.tolist() == whole.tasks[2].train.rows[:25].tolist()
    two = build_stream(configure("split-digits", "er", {"stream.first": 2}), benchmark, dataset)
    assert [t.train.rows.tolist() for t in two.tasks] == [
        t.train.rows.tolist() for t in whole.tasks[:2]
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stream.data": "x"}, "goes with the benchmark 'custom'"),
        ({"stream.scenario": "chaos"}, "stream.scenario=chaos"),
        ({"stream.image_size": 64}, "'split-digits' fixes both"),
        ({"stream.augment": False}, "'split-digits' fixes both"),
    ],
    ids=["data of one's own", "unknown scenario", "image size", "augmentation"],
)
def test_streams_that_make_no_sense_are_refused(values: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        declared(configure("split-digits", "er", values))


def test_domains_are_not_split_into_tasks() -> None:
    with pytest.raises(InputError, match="the tasks of domain-pacs are its domains"):
        declared(configure("domain-pacs", "er", {"stream.tasks": 3}))
    chosen = configure("domain-pacs", "er", {"stream.tasks": 7, "stream.scenario": "class"})
    assert declared(chosen).scenario == ClassIncremental(7)


def test_custom_needs_data() -> None:
    with pytest.raises(InputError, match="custom: which data"):
        declared(configure("custom", "er"))
