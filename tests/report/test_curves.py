"""Curves over progress: seeds with tasks of different lengths, unfinished runs, dips that stay."""

import json
from pathlib import Path

import numpy as np
import pytest

from proxreplay.evaluation import Trajectory
from proxreplay.evaluation.measures import BY_KEY
from proxreplay.experiments.results import StoredRun
from proxreplay.report.curves import curves, drawable, interpolate, task_accuracy_map
from proxreplay.report.grouping import Section, read_study
from tests.report.synthetic import write_run


def only_section(folder: Path) -> Section:
    (section,) = read_study([folder]).sections
    return section


def path_of(run: StoredRun) -> Trajectory:
    assert run.recorded is not None
    return run.recorded.accuracy


def test_mean_and_range_over_seeds_at_every_moment(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / str(seed), seed=seed, tasks=3, batches=10)
    section = only_section(tmp_path)
    (curve,) = curves(section, BY_KEY["accuracy"])
    seen = [path_of(run).seen_accuracy for run in section.runs]
    np.testing.assert_allclose(curve.x, np.arange(1, 31) / 10)
    np.testing.assert_allclose(curve.mean, np.mean(seen, axis=0))
    np.testing.assert_allclose(curve.low, np.min(seen, axis=0))
    np.testing.assert_allclose(curve.high, np.max(seen, axis=0))


def test_tasks_of_different_lengths_are_laid_on_top_of_each_other(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, tasks=3, batches=10)
    write_run(tmp_path / "b", seed=1, tasks=3, batches=14)
    section = only_section(tmp_path)
    (curve,) = curves(section, BY_KEY["accuracy"])
    ends = [p.seen_accuracy[p.tasks == 1][-1] for p in map(path_of, section.runs)]
    assert curve.mean[np.isclose(curve.x, 2.0)] == pytest.approx(np.mean(ends))


def test_a_switch_is_a_jump_and_dips_survive_few_points(tmp_path: Path) -> None:
    write_run(tmp_path / "a", tasks=4, batches=200)
    section = only_section(tmp_path)
    (curve,) = curves(section, BY_KEY["accuracy"], points=100)
    assert len(curve.x) == 100
    path = path_of(section.runs[0])
    first = path.seen_accuracy[path.tasks == 2][0]
    just_after = curve.mean[(curve.x > 2) & (curve.x < 2.02)]
    assert just_after.min() == pytest.approx(first, abs=0.05)
    assert curve.mean[np.isclose(curve.x, 2.0)] > first + 0.1


@pytest.mark.parametrize("lengths", [(20, 20), (20, 23)], ids=["same tasks", "longer tasks"])
@pytest.mark.parametrize("points", [600, 40], ids=["all moments", "fewer points than moments"])
def test_dips_survive_sparse_evaluation(
    lengths: tuple[int, int], points: int, tmp_path: Path
) -> None:
    """Moments are at both sides of a switch and every 7 batches, not evenly spaced."""
    for seed, batches in enumerate(lengths):
        folder = tmp_path / str(seed)
        write_run(folder, seed=seed, tasks=4, batches=batches, settings={"eval_every": 7})
    section = only_section(tmp_path)
    (curve,) = curves(section, BY_KEY["accuracy"], points)
    assert len(curve.x) <= points
    for task in (1, 2, 3):
        after = [p.seen_accuracy[p.tasks == task][0] for p in map(path_of, section.runs)]
        before = [p.seen_accuracy[p.tasks == task - 1][-1] for p in map(path_of, section.runs)]
        soon = (curve.x > task + 1e-9) & (curve.x < task + 0.06)
        assert curve.mean[soon].min() == pytest.approx(np.mean(after), abs=0.01)
        assert curve.mean[np.isclose(curve.x, task)] == pytest.approx(np.mean(before))


def test_before_the_first_moment_of_a_task_its_first_value_holds() -> None:
    x, y = np.array([0.5, 1.0, 1.5, 2.0]), np.array([0.9, 0.7, 0.1, 0.3])
    grid = np.array([0.75, 1.0, 1.1, 1.75, 2.5])
    expected = [0.8, 0.7, 0.1, 0.2, np.nan]
    np.testing.assert_allclose(interpolate(grid, x, y), expected)


def test_an_unfinished_run_counts_as_far_as_it_got(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, tasks=4, batches=10)
    write_run(tmp_path / "b", seed=1, tasks=4, batches=10, stop_after=25)
    section = only_section(tmp_path)
    (curve,) = curves(section, BY_KEY["accuracy"])
    alone = curve.x > 2.5 + 1e-6
    whole = path_of(section.groups[0].runs[0])
    np.testing.assert_allclose(curve.mean[alone], whole.seen_accuracy[25:])
    np.testing.assert_allclose(curve.low[alone], curve.high[alone])
    assert (curve.high[~alone] > curve.low[~alone]).any()


def test_an_unfinished_run_alone_still_has_a_curve(tmp_path: Path) -> None:
    write_run(tmp_path / "a", tasks=4, batches=10, stop_after=25)
    section = only_section(tmp_path)
    (curve,) = curves(section, BY_KEY["accuracy"])
    known = curve.x[np.isfinite(curve.mean)]
    assert known[-1] == pytest.approx(2.5)


def test_every_measure_has_a_curve_where_it_was_recorded(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "lpr-ema", online=True, diagnostics=True)
    write_run(tmp_path / "b", "er", timings=False)
    section = only_section(tmp_path)
    found = {m.key: [curve.label for curve in curves(section, m)] for m in drawable(section)}
    special = {"accuracy-online", "drift", "ratio_new", "ratio_replay", "share", "time"}
    special |= {"prequential", "prequential_fading", "prequential_kappa"}
    special |= {"regret_majority", "regret_no_change"}
    assert special < found.keys()
    for key, labels in found.items():
        assert labels == (["LPR (EMA)"] if key in special else ["ER", "LPR (EMA)"]), key


def test_what_is_recorded_before_the_first_evaluation_is_drawn_where_it_was(
    tmp_path: Path,
) -> None:
    write_run(tmp_path / "a", tasks=2, batches=10, diagnostics=True, complete=False)
    file = tmp_path / "a" / "records.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    right = [one["accuracy"] for one in records if one["kind"] == "prequential"]
    late = [one for one in records if one["kind"] != "evaluation" or one.get("position", 99) > 4]
    file.write_text("".join(json.dumps(one) + "\n" for one in late))
    (curve,) = curves(only_section(tmp_path), BY_KEY["prequential"])
    np.testing.assert_allclose(curve.x, np.arange(1, 21) / 10)
    np.testing.assert_allclose(curve.mean, right)


def test_time_is_time_spent_learning(tmp_path: Path) -> None:
    write_run(tmp_path / "a", tasks=2, batches=10)
    (curve,) = curves(only_section(tmp_path), BY_KEY["time"])
    assert curve.x[-1] == pytest.approx(0.01 * 20 / 60)


def test_a_slow_run_has_no_gaps_and_no_steps_at_whole_minutes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", tasks=2, batches=10)
    lines = [json.dumps({"position": p, "learning": 150.0 * p}) for p in range(1, 21)]
    (folder / "timings.jsonl").write_text("\n".join(lines) + "\n")
    section = only_section(tmp_path)
    (curve,) = curves(section, BY_KEY["time"])
    path = path_of(section.runs[0])
    minutes = 2.5 * (path.positions + 1)
    inside = curve.x >= minutes[0]
    expected = np.interp(curve.x[inside], minutes, path.seen_accuracy)
    np.testing.assert_allclose(curve.mean[inside], expected)


def test_the_map_holds_each_tasks_accuracy_over_time(tmp_path: Path) -> None:
    write_run(tmp_path / "a", tasks=3, batches=10)
    section = only_section(tmp_path)
    image = task_accuracy_map(section.groups[0], 3, bins=10)
    path = path_of(section.runs[0])
    assert image.shape == (3, 30)
    np.testing.assert_allclose(image, path.accuracy.T)
