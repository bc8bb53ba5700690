"""Runs in every state are read, and gathered by what is compared."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from proxreplay.cli.options import parse_sets
from proxreplay.evaluation import average_forgetting, stability_gaps
from proxreplay.experiments.configure import configure
from proxreplay.experiments.results import StoredRun, find_runs, trajectory
from proxreplay.report.commands import run_command
from proxreplay.report.findings import study_warnings
from proxreplay.report.grouping import Cache, read_study
from proxreplay.report.page import render
from tests.report.synthetic import write_run


def only_run(folder: Path) -> StoredRun:
    (run,) = read_study([folder]).runs
    return run


def test_seeds_make_a_group_and_settings_that_matter_split_it(tmp_path: Path) -> None:
    for seed in (1, 0):
        write_run(tmp_path / f"a{seed}", "lpr-er", seed)
    write_run(tmp_path / "b", "lpr-er", 0, settings={"lpr.omega_0": 4.0})
    write_run(tmp_path / "c", "er", 0, settings={"lpr.omega_0": 9.0})  # nothing to ER
    write_run(tmp_path / "d", "er", 1, settings={"threads": 2})  # nothing to anyone
    (section,) = read_study([tmp_path]).sections
    labels = [(g.label, len(g.runs)) for g in section.groups]
    assert labels == [("ER", 2), ("LPR (ER), lpr.omega_0=1", 2), ("LPR (ER), lpr.omega_0=4", 1)]
    seeds = [run.config.seed for run in section.groups[1].runs if run.config]
    assert seeds == [0, 1]


def test_a_companion_makes_a_group_of_its_own_and_is_not_the_paper_s(tmp_path: Path) -> None:
    with_one = {"companion.weight": 1.0}
    write_run(tmp_path / "a", "er")
    write_run(tmp_path / "b", "er", 1, settings={"companion.filters": 8})  # there is none
    write_run(tmp_path / "c", "er", settings=with_one)
    write_run(tmp_path / "d", "slda")
    write_run(tmp_path / "e", "slda", 1, settings=with_one)  # nothing to a floor
    (section,) = read_study([tmp_path]).sections
    assert {g.label: len(g.runs) for g in section.groups} == {
        "ER, companion.weight=0": 2,
        "ER, companion.weight=1": 1,
        "Streaming LDA (floor)": 2,
    }
    ours = {"benchmark": "split-cifar100", "settings": {"capacity": 2000, **with_one}}
    write_run(tmp_path / "own" / "f", "er", **ours)
    (section,) = read_study([tmp_path / "own"]).sections
    assert not section.as_in_the_paper(section.groups[0])


def test_labels_say_what_is_unset_as_users_write_it_and_leave_out_what_does_nothing(
    tmp_path: Path,
) -> None:
    write_run(tmp_path / "a", "lpr-er", settings={"lpr.omega_0": None, "refresh.samples": 7})
    unused = {"step.every": 7, "lpr.level": 3.0}  # of statistics from steps, and of no omega_0
    paper = {"lpr.omega_0": 1.0, "refresh.samples": None}
    write_run(tmp_path / "b", "lpr-er", 0, settings=paper)
    write_run(tmp_path / "c", "lpr-er", 1, settings={**paper, **unused})
    (section,) = read_study([tmp_path]).sections
    labels = [(g.label, len(g.runs)) for g in section.groups]
    assert labels == [
        ("LPR (ER), lpr.omega_0=1, refresh.samples=all", 2),
        ("LPR (ER), lpr.omega_0=none, refresh.samples=7", 1),
    ]


def test_runs_without_omega_0_that_act_per_step_and_per_batch_are_told_apart(
    tmp_path: Path,
) -> None:
    """Those of earlier versions acted at every step."""
    for i, per in enumerate(("step", "batch")):
        settings = {"lpr.omega_0": None, "lpr.per": per}
        write_run(tmp_path / per, "lpr-er", i, settings=settings)
    (section,) = read_study([tmp_path]).sections
    labels = {g.label for g in section.groups}
    assert labels == {"LPR (ER), lpr.per=batch", "LPR (ER), lpr.per=step"}


def test_lpr_without_numbers_is_not_the_paper_s_and_can_be_reported(tmp_path: Path) -> None:
    """It has no beta; looking for one ended the report, in every other process (set order)."""
    whole = {"benchmark": "split-cifar100", "settings": {"capacity": 2000}}
    write_run(tmp_path / "paper", "lpr-er", **whole)
    whole["settings"] = {"capacity": 2000, "lpr.omega_0": None}
    write_run(tmp_path / "own", "lpr-er", **whole)
    (section,) = read_study([tmp_path]).sections
    assert [section.as_in_the_paper(group) for group in section.groups] == [True, False]


def test_benchmarks_and_memories_make_sections(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", settings={"capacity": 100})
    write_run(tmp_path / "c", benchmark="split-mnist")
    write_run(tmp_path / "d", settings={"capacity": None})
    titles = [section.title for section in read_study([tmp_path]).sections]
    assert titles == [
        "split-digits, memory of 50",
        "split-digits, memory of 100",
        "split-digits, unlimited memory",
        "split-mnist, memory of 50",
    ]


def test_streams_make_sections_too(tmp_path: Path) -> None:
    write_run(tmp_path / "whole")
    write_run(tmp_path / "part", settings={"stream.first": 2})
    for name in ("a", "b"):
        data = {"stream.data": str(tmp_path / f"my {name}"), "stream.tasks": 2}
        write_run(tmp_path / name, benchmark="custom", settings=data)
    sections = read_study([tmp_path]).sections
    assert [(section.title, len(section.runs)) for section in sections] == [
        ("custom, memory of 50, stream.data=my a, stream.tasks=2", 1),
        ("custom, memory of 50, stream.data=my b, stream.tasks=2", 1),
        ("split-digits, memory of 50", 1),
        ("split-digits, memory of 50, stream.first=2", 1),
    ]
    assert [section.slug for section in sections] == [
        "custom-50-data-my-a-tasks-2",
        "custom-50-data-my-b-tasks-2",
        "split-digits-50",
        "split-digits-50-first-2",
    ]


def test_an_lpr_group_is_compared_with_the_base_of_the_same_settings(tmp_path: Path) -> None:
    for lr in (0.05, 0.1):
        for method in ("er", "lpr-er"):
            write_run(tmp_path / f"{method}{lr}", method, settings={"lr": lr})
    (section,) = read_study([tmp_path]).sections
    for group in section.groups:
        if group.base:
            base = section.base_of(group)
            assert base is not None
            assert base.settings["lr"] == group.settings["lr"]


def test_measures_are_those_of_the_records(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (stored,) = find_runs([folder])
    path = trajectory(stored.records)
    measures = only_run(folder).measures
    assert stored.result is not None
    assert measures["acc"] == stored.result.measures["acc"]
    assert measures["forgetting"] == pytest.approx(average_forgetting(path))
    depth = np.mean([gap.depth for gap in stability_gaps(path)])
    assert measures["gap_depth"] == pytest.approx(depth)
    assert measures["minutes"] == pytest.approx(0.01 * 100 / 60)


def test_diagnostics_and_the_online_network_are_read(tmp_path: Path) -> None:
    run = only_run(write_run(tmp_path, "lpr-ema", online=True, diagnostics=True)).recorded
    assert run is not None
    np.testing.assert_allclose(run.predictors["online"].accuracy, 0.9 * run.accuracy.accuracy)
    assert run.drift is not None
    assert sorted(run.drift.values) == ["head", "stage1", "total"]
    assert run.gradients is not None
    assert np.isnan(run.gradients.values["replay"][0])


def test_runs_in_every_state(tmp_path: Path) -> None:
    write_run(tmp_path / "complete")
    write_run(tmp_path / "incomplete", seed=1, stop_after=33)
    empty = write_run(tmp_path / "empty", seed=2, complete=False)
    (empty / "records.jsonl").unlink()
    failed = write_run(tmp_path / "failed", seed=3, stop_after=5)
    (failed / "failure.txt").write_bytes(b"Traceback\nRuntimeError: out of memory \xff")
    study = read_study([tmp_path])
    status = {run.folder.name: run.status for run in study.runs}
    assert status == {
        "complete": "complete",
        "incomplete": "incomplete",
        "empty": "incomplete",
        "failed": "failed",
    }
    (group,) = study.sections[0].groups
    assert [run.folder.name for run in group.complete] == ["complete"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.yaml", "benchmark: ["),
        ("config.yaml", "- 1"),
        ("config.yaml", "benchmark: x\nmethod: y\nomega: 3"),
        ("result.json", "[]"),
        ("result.json", "{"),
        ("records.jsonl", "not json\n"),
        ("records.jsonl", '{"kind": "evaluation"}\n'),
        ("records.jsonl", "[]\n"),
        ("records.jsonl", ""),
    ],
)
def test_a_damaged_run_is_broken_and_the_others_are_not(
    tmp_path: Path, file: str, content: str
) -> None:
    write_run(tmp_path / "good")
    bad = write_run(tmp_path / "bad", seed=1)
    (bad / file).write_text(content)
    study = read_study([tmp_path])
    assert {run.folder.name: run.status for run in study.runs} == {
        "good": "complete",
        "bad": "broken",
    }
    (lost,) = study.lost
    assert lost.problem


def test_a_run_kept_without_its_records_counts_in_tables_but_has_no_curve(tmp_path: Path) -> None:
    for seed in (0, 1):
        folder = write_run(tmp_path / f"seed{seed}", seed=seed)
        whole = only_run(folder)
        for path in folder.iterdir():
            if path.name not in ("config.yaml", "result.json"):
                path.unlink()
        kept = only_run(folder)
        assert kept.status == "complete"
        assert kept.recorded is None
        assert whole.recorded is not None
        assert kept.measures == {m: whole.measures[m] for m in ("acc", "aaa", "wc_acc")}
    study = read_study([tmp_path])
    (caution,) = study_warnings(study)
    assert "Of 2 of 2 runs only the results were kept" in caution.text
    page = render(study)
    assert f"{np.mean(list(study.sections[0].groups[0].values('acc').values())):.4f}" in page


def test_records_without_a_configuration_are_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "config.yaml").unlink()
    assert only_run(tmp_path).problem == "config.yaml is missing"


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", stop_after=20)
    with (folder / "records.jsonl").open("a") as file:
        file.write('{"kind": "evalu')
    run = only_run(folder)
    assert run.status == "incomplete"
    assert run.recorded is not None
    assert run.recorded.accuracy.positions[-1] == 19


def test_runs_that_did_not_change_are_not_read_again(tmp_path: Path) -> None:
    same = write_run(tmp_path / "same")
    other = write_run(tmp_path / "other", seed=1, stop_after=10)
    cache: Cache = {}
    before = {run.folder: run for run in read_study([tmp_path], cache).runs}
    shutil.rmtree(other)
    write_run(other, seed=1, stop_after=30)
    after = {run.folder: run for run in read_study([tmp_path], cache).runs}
    assert after[same] is before[same]
    assert after[other] is not before[other]


def test_an_unknown_method_keeps_its_name(tmp_path: Path) -> None:
    write_run(tmp_path, "my-method")
    (section,) = read_study([tmp_path]).sections
    assert section.groups[0].label == "my-method"
    config = section.groups[0].runs[0].config
    assert config is not None
    assert run_command(config).startswith("proxreplay run split-digits --method my-method --seed 0")


def test_the_command_of_a_run_without_limit_gives_it_back() -> None:
    config = configure("split-digits", "er", {"capacity": None})
    *_, option, given = run_command(config).split()
    assert option == "--set"
    assert configure("split-digits", "er", parse_sets([given])) == config


def test_untreated_layers_are_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "lpr-er")
    with (folder / "records.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "rule", "untreated": {"gru": "no rows function"}}) + "\n")
    assert only_run(folder).untreated == {"gru": "no rows function"}
