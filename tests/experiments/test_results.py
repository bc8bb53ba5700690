"""The reader of run folders: what damaged and hostile files do, and several predictors."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxreplay.errors import DataError
from proxreplay.experiments.results import (
    Result,
    StoredRun,
    evaluations,
    read_lines,
    read_run,
    summarise,
)
from tests.report.synthetic import write_run

Change = Callable[[Path], object]


def read(folder: Path) -> StoredRun:
    return read_run(folder).with_records()


def append(name: str, line: Any) -> Change:
    def change(folder: Path) -> None:
        with (folder / name).open("a") as file:
            file.write((line if isinstance(line, str) else json.dumps(line)) + "\n")

    return change


def evaluation(**fields: Any) -> dict[str, Any]:
    event = {"kind": "evaluation", "split": "validation", "position": 100, "task": 4}
    return {**event, "accuracy": [0.5] * 5, "loss": [1.0] * 5, **fields}


def bomb() -> str:
    """Ten levels of ten references each: 10^10 values in 600 bytes."""
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    return "\n".join(levels)


def fifo(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def large(name: str, size: int) -> Change:
    """A sparse file: it takes no room on the disk."""
    return lambda folder: os.truncate(folder / name, size)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (append("config.yaml", bomb()), "anchors"),
        (append("config.yaml", "x: " + "[" * 100_000), "config.yaml"),
        (append("config.yaml", "x: 0x" + "f" * 100_000), "config.yaml"),
        (fifo("config.yaml"), "config.yaml is not a regular file"),
        (fifo("records.jsonl"), "records.jsonl is not a regular file"),
        (large("config.yaml", 2**33), "config.yaml has 8,589,934,592 bytes"),
        (large("records.jsonl", 2**33), "records.jsonl has 8,589,934,592 bytes"),
        (large("result.json", 2**33), "result.json has 8,589,934,592 bytes"),
        (append("records.jsonl", "not json"), "records.jsonl, line 202: not JSON"),
        (append("records.jsonl", "\x00\x00"), "records.jsonl, line 202: not JSON"),
        (append("records.jsonl", "[" * 100_000), "records.jsonl, line 202"),
        (append("records.jsonl", [1]), "records.jsonl, line 202: not a record"),
        (append("records.jsonl", evaluation(task=100_000_000)), "task 100000000 with 5"),
        (append("records.jsonl", evaluation(task=10**5, accuracy=[0.5] * 100_001)), "10,000 tasks"),
        (append("records.jsonl", evaluation(accuracy=[2.0] * 5)), "accuracy"),
        (append("records.jsonl", evaluation(accuracy=[float("nan")] * 5)), "accuracy"),
        (append("records.jsonl", evaluation(position=10**30)), "position"),
        (append("records.jsonl", evaluation(position="3")), "position"),
        (lambda folder: (folder / "result.json").write_text('{"acc": "x"}'), "result.json"),
        (lambda folder: (folder / "result.json").write_bytes(b"\xff"), "result.json"),
    ],
    ids=[
        "anchors",
        "nested YAML",
        "long number",
        "fifo for the configuration",
        "fifo for the records",
        "large configuration",
        "large records",
        "large result",
        "not JSON",
        "zeros",
        "nested JSON",
        "a list",
        "task of nowhere",
        "many tasks",
        "accuracy above 1",
        "accuracy not a number",
        "far position",
        "position in words",
        "result of words",
        "result not UTF-8",
    ],
)
def test_a_bad_folder_is_named_and_takes_neither_time_nor_memory(
    tmp_path: Path, change: Change, problem: str
) -> None:
    folder = write_run(tmp_path)
    assert read(folder).status == "complete"
    change(folder)
    stored = read(folder)
    assert stored.status == "broken"
    assert problem in str(stored.problem)
    assert len(str(stored.problem)) < 500


def test_a_changed_digit_in_a_result_is_noticed(tmp_path: Path) -> None:
    file = write_run(tmp_path) / "result.json"
    written = file.read_text()
    value = json.loads(written)["aaa"]
    file.write_text(written.replace(str(value), str(value / 2), 1))
    stored = read(file.parent)
    assert stored.status == "broken"
    assert stored.problem == "result.json: damaged: its checksum is wrong"
    file.write_text(written.replace('"sha256"', '"sha257"', 1))  # a digit of the key's name
    assert "its checksum is called 'sha257'" in str(read(file.parent).problem)
    values = json.loads(written)
    del values["sha256"]  # as version 0.1 wrote it
    file.write_text(json.dumps(values))
    assert read(file.parent).status == "complete"


@pytest.mark.parametrize("content", ["[]", '{"cores": 3, "sha256": "0"}'])
def test_a_damaged_environment_costs_only_itself(tmp_path: Path, content: str) -> None:
    folder = write_run(tmp_path)
    whole = read(folder).measures
    (folder / "environment.json").write_text(content)
    stored = read(folder)
    assert (stored.status, stored.measures, stored.environment) == ("complete", whole, {})
    assert str(stored.problem).startswith("environment.json: ")


def test_damaged_timings_cost_the_times_and_not_the_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    whole = read(folder).measures
    append("timings.jsonl", "{torn")(folder)
    assert read(folder).measures == whole
    append("timings.jsonl", {"learning": 3})(folder)
    stored = read(folder)
    assert stored.status == "complete"
    assert "timings.jsonl" in str(stored.problem)
    assert stored.measures == {key: v for key, v in whole.items() if key != "minutes"}


def test_damaged_records_are_named_for_every_reader(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    with (folder / "records.jsonl").open("r+b") as file:
        file.write(b"\xff")
    with pytest.raises(DataError, match=r"records\.jsonl, line 1: not JSON"):
        read_lines(folder / "records.jsonl")


# Predictors


def test_several_predictors_have_their_own_measures(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "lpr-ema", online=True)
    records = read_lines(folder / "records.jsonl")
    both = [
        {**{k: v for k, v in r.items() if k != "online"}, "predictor": "both"}
        for r in records
        if r.get("online")
    ]
    result = summarise([*records, *both], 1)
    assert list(result.predictors) == ["online", "both"]
    assert result.predictors["both"] == result.predictors["online"]
    assert result.predictors["online"]["aaa"] == pytest.approx(0.9 * (result.measures["aaa"] or 0))
    assert len(evaluations([*records, *both], predictor="both")) == 100
    assert Result.from_json(json.loads(json.dumps(result.to_json()))) == result
    append("records.jsonl", "\n".join(map(json.dumps, both)))(folder)
    stored = read(folder).recorded
    assert stored is not None
    assert list(stored.predictors) == ["online", "both"]
    np.testing.assert_array_equal(
        stored.predictors["both"].accuracy, stored.predictors["online"].accuracy
    )


def test_results_of_the_version_before_are_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "ema", online=True)
    values = json.loads((folder / "result.json").read_text())
    assert list(values) == [
        *("acc", "aaa", "wc_acc", "validation_acc", "test_accuracy", "eval_every", "online"),
        "sha256",
    ]
    del values["sha256"]
    result = read_run(folder).result
    assert result is not None
    assert result.predictors == {"online": values["online"]}
    values["online"] = None
    assert Result.from_json(values).predictors == {}


@pytest.mark.parametrize("cut", ["inside a line", "between lines"])
def test_a_finished_run_whose_records_are_cut_is_told_also_without_a_checksum(
    cut: str, tmp_path: Path
) -> None:
    """As version 0.1 wrote them."""
    path = write_run(tmp_path) / "records.jsonl"
    assert read_run(tmp_path).with_records().status == "complete"
    lines = path.read_text().splitlines(keepends=True)
    half = "".join(lines[: len(lines) // 2])
    path.write_text(half + lines[len(lines) // 2][:15] * (cut == "inside a line"))
    stored = read_run(tmp_path).with_records()
    assert stored.status == "broken"
    assert "records.jsonl ends before the run did" in str(stored.problem)
