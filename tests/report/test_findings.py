"""What the report says in words, and what it warns of."""

import json
from pathlib import Path

import pytest

from proxreplay.files import write_json
from proxreplay.report.findings import headline, section_warnings, study_warnings, verdict
from proxreplay.report.grouping import read_study
from proxreplay.report.page import render
from tests.report.synthetic import write_run


def texts(folder: Path) -> str:
    study = read_study([folder])
    warnings = [*study_warnings(study), *(w for s in study.sections for w in section_warnings(s))]
    return "\n".join(f"{w.level}: {w.text}" for w in warnings)


def test_the_verdict_names_the_difference_its_interval_and_the_seeds(tmp_path: Path) -> None:
    for method in ("er", "lpr-er"):
        for seed in range(5):
            write_run(tmp_path / f"{method}{seed}", method, seed)
    study = read_study([tmp_path])
    (sentence,) = verdict(study.sections[0])
    assert sentence.startswith("LPR (ER) ends ")
    assert "ahead in 5 of 5 seeds" in sentence
    assert "at its worst it is" in sentence
    assert "points above ER (95 % interval +" in sentence
    assert headline(study) == "ER, LPR (ER) on split-digits"


def test_a_difference_that_may_be_chance_is_called_so(tmp_path: Path) -> None:
    for seed, shift in enumerate((0.02, -0.01, 0.01, -0.02, 0.005)):
        for method in ("er", "lpr-er"):
            folder = write_run(tmp_path / f"{method}{seed}", method, seed)
            result = json.loads((folder / "result.json").read_text())
            del result["sha256"]
            result["acc"] = 0.5 + shift * (method == "lpr-er")
            (folder / "result.json").write_text(json.dumps(result))
    study = read_study([tmp_path])
    (sentence,) = verdict(study.sections[0])
    assert "points above ER (not clear, 95 % interval -" in sentence
    page = render(study)
    assert "<td>+0.0010 <small>" in page  # chance is not bold, what is clear is
    assert '<td class="best">+0.1' in page


def test_few_seeds_are_told_one_by_one_instead_of_an_interval(tmp_path: Path) -> None:
    for seed, gain in enumerate((0.01, 0.05, 0.03)):
        for method in ("er", "lpr-er"):
            folder = write_run(tmp_path / f"{method}{seed}", method, seed)
            result = json.loads((folder / "result.json").read_text())
            del result["sha256"]
            result["acc"] = 0.5 + gain * (method == "lpr-er")
            (folder / "result.json").write_text(json.dumps(result))
    study = read_study([tmp_path])
    (sentence,) = verdict(study.sections[0])
    assert "ends 3.0 points above ER (seed by seed +1.0 to +5.0), ahead in 3 of 3" in sentence
    assert "+0.0100 to +0.0500" in render(study)


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    for method in ("er", "lpr-er"):
        write_run(tmp_path / method, method)
    (sentence,) = verdict(read_study([tmp_path]).sections[0])
    assert "interval" not in sentence
    assert sentence.endswith("This is one seed only.")


def test_without_a_pair_the_leader_is_named_and_without_runs_nobody(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "er", stop_after=10)
    (section,) = read_study([tmp_path]).sections
    assert verdict(section) == ["No run is complete yet, so there is nothing to compare."]
    write_run(tmp_path / "b", "der")
    (section,) = read_study([tmp_path]).sections
    assert verdict(section)[0].startswith("DER ends at an accuracy of 0.")
    write_run(tmp_path / "c", "lode")
    (section,) = read_study([tmp_path]).sections
    assert "is ahead with a final accuracy" in verdict(section)[0]


def test_a_quiet_study_has_no_warnings(tmp_path: Path) -> None:
    for seed in range(5):
        write_run(tmp_path / str(seed), seed=seed)
    assert texts(tmp_path) == ""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"eval_every": 10}, "serious: Evaluated every 10 stream batches"),
        (
            {"capacity": 5000},
            "note: The memory of 5,000 never filled: about 1,000 examples",
        ),
    ],
    ids=["coarse evaluation", "memory not full"],
)
def test_settings_that_limit_the_numbers(
    tmp_path: Path, settings: dict[str, int], expected: str
) -> None:
    for seed in range(5):
        write_run(tmp_path / str(seed), seed=seed, settings=settings)
    assert texts(tmp_path).startswith(expected)


def test_few_and_uneven_seeds(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "er", 0)
    write_run(tmp_path / "b", "lpr-er", 1)
    told = texts(tmp_path)
    assert "Few seeds (ER: 1, LPR (ER): 1)" in told
    assert "not run with the same seeds" in told


def test_intervals_that_differ_cannot_be_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "er", settings={"eval_every": 1})
    write_run(tmp_path / "b", "er", settings={"eval_every": 5})
    assert "serious: Evaluation intervals differ ([1, 5])" in texts(tmp_path)


def test_runs_that_did_not_finish(tmp_path: Path) -> None:
    write_run(tmp_path / "half", stop_after=10)
    failed = write_run(tmp_path / "sad", seed=1, stop_after=10)
    (failed / "failure.txt").write_text("Traceback\n  File x\nRuntimeError: no memory")
    broken = write_run(tmp_path / "torn", seed=2)
    (broken / "config.yaml").write_text("a: [\n")
    told = texts(tmp_path)
    assert "note: 1 run is not finished: half." in told
    assert "serious: 2 runs are left out of the tables (1 failed, 1 broken)." in told


def test_a_messy_folder_has_one_summary_and_no_empty_sections(tmp_path: Path) -> None:
    for seed in range(2):
        for method in ("er", "lpr-er"):
            write_run(tmp_path / f"{method}-{seed}", method, seed)
    for number in range(17):
        failed = write_run(tmp_path / f"bad{number}", settings={"capacity": 100 + number})
        (failed / "result.json").unlink()
        (failed / "records.jsonl").unlink()
        (failed / "failure.txt").write_text(f"Traceback\nRuntimeError: reason {number % 2}")
    study = read_study([tmp_path])
    (section,) = study.sections
    assert section.title == "split-digits, memory of 50"
    (serious,) = (w for w in study_warnings(study) if w.level == "serious")
    assert serious.text == "17 runs are left out of the tables (17 failed)."
    assert len(serious.details) == 2
    assert serious.details[0].startswith("failed: RuntimeError: reason 0. (bad0, bad10, bad12")
    page = render(study)
    assert page.count("<section ") == 2  # one of numbers, one of runs without
    assert page.count('class="serious"') == 1
    assert all(f"bad{number}" in page for number in range(17))
    assert 'class="best"' not in page


def test_untreated_layers_and_the_papers_ema_are_noted(tmp_path: Path) -> None:
    settings = {"capacity": 2000}
    folder = write_run(tmp_path, "lpr-ema", benchmark="split-cifar100", settings=settings)
    with (folder / "records.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "rule", "untreated": {"gru": "unknown type"}}) + "\n")
    told = texts(tmp_path)
    assert "LPR leaves some layers as they are: gru (unknown type)." in told
    assert "those of the online network" in told


def test_runs_of_one_seed_that_disagree_and_other_source_codes_are_named(tmp_path: Path) -> None:
    for name, code in (("a", "1" * 64), ("b", "1" * 64)):
        folder = write_run(tmp_path / name, "er", 0)
        write_json(folder / "environment.json", {"code": code, "git_commit": name})
    times = (folder / "timings.jsonl").read_text()
    (folder / "timings.jsonl").write_text(times.replace('"learning": ', '"learning": 1'))
    assert "disagree" not in texts(tmp_path)  # the same run twice, in other times
    assert "source codes" not in texts(tmp_path)
    assert "Few seeds (ER: 1)" in texts(tmp_path)
    result = json.loads((tmp_path / "b" / "result.json").read_text())
    del result["sha256"]
    write_json(tmp_path / "b" / "result.json", {**result, "acc": 0.1})
    write_json(tmp_path / "b" / "environment.json", {"code": "2" * 64})
    assert "serious: Several runs of one seed disagree (ER, seed 0)" in texts(tmp_path)
    assert "serious: The runs were made with 2 different source codes" in texts(tmp_path)


def test_a_run_that_other_code_went_on_with_is_of_two(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", "er", 0)
    then = {"code": "2" * 64, "git_commit": None}
    write_json(folder / "environment.json", {"code": "1" * 64, "continued": [then]})
    assert "made with 2 different source codes" in texts(tmp_path)


@pytest.mark.parametrize("continued", ["abc", 3, [1, "x", None], {"code": "y"}])
def test_a_continuation_that_is_none_is_passed_over(tmp_path: Path, continued: object) -> None:
    folder = write_run(tmp_path / "a", "er", 0)
    write_json(folder / "environment.json", {"code": "1" * 64, "continued": continued})
    assert "source codes" not in texts(tmp_path)
