"""One table, four drawings; what is best, and what is tied with it."""

import csv
import io
import math
from pathlib import Path

import numpy as np
import pytest

from proxreplay.evaluation import Estimate
from proxreplay.evaluation.measures import BY_KEY
from proxreplay.report.grouping import Section, read_study
from proxreplay.report.tables import (
    Row,
    Table,
    comparison_rows,
    comparisons,
    further_table,
    main_table,
    paper_row_of,
    tables_of,
    to_csv,
    to_latex,
    to_markdown,
)
from tests.report.synthetic import write_run


def estimates(*pairs: tuple[float, float]) -> tuple[Estimate, ...]:
    return tuple(Estimate(mean, error, 5) for mean, error in pairs)


TABLE = Table(
    "A & B",
    (BY_KEY["acc"], BY_KEY["forgetting"]),
    (
        Row("ER_1", estimates((0.50, 0.01), (0.30, 0.01))),
        Row("LPR (ER)", estimates((0.53, 0.01), (0.20, 0.01))),
        Row("EMA", estimates((0.52, 0.01), (0.19, 0.02))),
        Row("EMA", estimates((0.90, 0.01), (0.01, 0.01)), "paper"),
        Row("Lost|one", (None, None)),
    ),
)


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory) -> Section:
    folder = tmp_path_factory.mktemp("runs")
    for method in ("er", "lpr-er"):
        for seed in range(3):
            name = f"{method}-{seed}"
            settings = {"capacity": 2000}
            write_run(folder / name, method, seed, benchmark="split-cifar100", settings=settings)
    write_run(folder / "extra", "er", 7, benchmark="split-cifar100", settings={"capacity": 2000})
    (found,) = read_study([folder]).sections
    return found


def test_the_best_and_those_within_its_standard_error_are_best() -> None:
    best = [[TABLE.is_best(row, i) for i in range(2)] for row in TABLE.rows]
    # The paper's row does not compete with ours, and less forgetting is better.
    assert best == [[False, False], [True, True], [True, True], [False, False], [False, False]]


def test_a_ceiling_competes_with_no_method() -> None:
    rows = [Row(f"m{i}", (Estimate(0.5 + i / 10, 0.01, 5),)) for i in range(2)]
    rows.append(Row("i.i.d. (ceiling)", (Estimate(0.9, 0.01, 5),), "ceiling"))
    table = Table("", (BY_KEY["acc"],), tuple(rows))
    assert [table.is_best(row, 0) for row in rows] == [False, True, False]


@pytest.mark.parametrize("seeds", [1, 2, 4, 5])
def test_with_few_seeds_nothing_is_best(seeds: int) -> None:
    error = math.nan if seeds == 1 else 0.001
    rows = [Row(str(mean), (Estimate(mean, error, seeds),)) for mean in (0.2, 0.9)]
    table = Table("", (BY_KEY["acc"],), tuple(rows))
    assert [table.is_best(row, 0) for row in rows] == [False, seeds == 5]
    assert ("**" in to_markdown(table)) is (seeds == 5)


EVIL = ["=1+1", " +cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\n=1"]


@pytest.mark.parametrize("label", EVIL, ids=repr)
def test_names_are_no_formulas_in_a_spreadsheet(label: str) -> None:
    table = Table(label, (BY_KEY["acc"],), (Row(label, estimates((-0.5, 0.1))),))
    (row,) = csv.DictReader(io.StringIO(to_csv(table)))
    assert not row["method"].strip().startswith(("=", "+", "-", "@"))
    assert not row["table"].strip().startswith(("=", "+", "-", "@"))
    assert row["mean"] == "-0.5"  # a number stays one


def test_names_are_text_in_markdown_and_latex(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>[a](javascript:b)`c`*d*|e\n\x1b[31m# f\u202e"
    write_run(tmp_path, evil)
    study = read_study([tmp_path])
    text = tables_of(study, ".md")
    assert "<" not in text
    assert r"&lt;img src=x onerror=alert(1)&gt;\[a\](javascript:b)\`c\`\*d\*\|e" in text
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "## split-digits, memory of 50"
    ]
    for ending in (".md", ".tex", ".csv"):
        written = tables_of(study, ending)
        assert all(c.isprintable() or c == "\n" for c in written)
        assert sum("onerror" in line for line in written.splitlines()) >= 2


def test_markdown() -> None:
    lines = to_markdown(TABLE).splitlines()
    assert lines[0] == "| Method | Seeds | Acc | Forgetting |"
    assert lines[3] == "| LPR (ER) | 5 | **0.5300 ± 0.0100** | **0.2000 ± 0.0100** |"
    assert lines[5] == "| EMA, paper | 5 | 0.9000 ± 0.0100 | 0.0100 ± 0.0100 |"
    assert lines[6] == r"| Lost\|one | 0 | - | - |"


def test_latex_escapes_what_comes_from_files() -> None:
    text = to_latex(TABLE)
    assert r"ER\_1 & 5 & $0.5000 \pm 0.0100$ & $0.3000 \pm 0.0100$ \\" in text
    assert r"{\boldmath$0.5300 \pm 0.0100$}" in text
    assert r"Lost|one & 0 & -- & -- \\" in text
    assert text.count(r"\\") == 6


def test_csv_holds_numbers_in_full() -> None:
    exact = Table("t", (BY_KEY["acc"],), (Row("a,b", (Estimate(1 / 3, math.nan, 1),)),))
    (row,) = csv.DictReader(io.StringIO(to_csv(exact)))
    assert float(row["mean"]) == 1 / 3
    assert (row["method"], row["standard_error"], row["seeds"]) == ("a,b", "", "1")
    assert len(to_csv(TABLE).splitlines()) == 1 + 4 * 2


def test_ours_stand_beside_the_papers(section: Section) -> None:
    table = main_table(section)
    assert [(row.label, row.source) for row in table.rows] == [
        ("ER", "ours"),
        ("ER", "paper"),
        ("LPR (ER)", "ours"),
        ("LPR (ER)", "paper"),
    ]
    assert table.rows[1].estimates[0] == Estimate(0.2937, 0.0054, 10)
    runs = [run.result.measures["aaa"] for run in section.groups[0].complete if run.result]
    ours = table.rows[0].estimates[1]
    assert ours is not None
    assert (ours.mean, ours.seeds) == (pytest.approx(np.mean(runs)), 4)


@pytest.mark.parametrize("part", [{"stream.first": 5}, {"stream.limit": 100}], ids=str)
def test_a_part_of_the_stream_does_not_stand_beside_the_paper(
    part: dict[str, int], tmp_path: Path
) -> None:
    for name, settings in (("whole", {}), ("part", part)):
        write_run(
            tmp_path / name,
            "lpr-er",
            benchmark="split-cifar100",
            settings={"capacity": 2000, **settings},
        )
    whole, cut = (main_table(read_study([tmp_path / n]).sections[0]) for n in ("whole", "part"))
    assert [row.source for row in whole.rows] == ["ours", "paper"]
    assert [row.source for row in cut.rows] == ["ours"]


def test_only_the_papers_settings_stand_beside_the_paper(tmp_path: Path) -> None:
    for name, settings in {
        "own": {},
        "seldom": {"eval_every": 10, "refresh.samples": 400},
        "slower": {"lr": 0.03},
        "authors": {"lpr.reference": "authors"},
        "wider": {"network": "resnet18"},
    }.items():
        write_run(
            tmp_path / name,
            "lpr-er",
            benchmark="split-cifar100",
            settings={"capacity": 2000, **settings},
        )
    (section,) = read_study([tmp_path]).sections
    beside = {
        group.runs[0].folder.name: paper_row_of(section, group) is not None
        for group in section.groups
    }
    assert beside == {
        "own": True,
        "seldom": True,
        "slower": False,
        "authors": False,
        "wider": False,
    }


def test_all_tables_of_a_study_go_into_one_file(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"a{seed}", "lpr-er", seed)
    write_run(tmp_path / "b", "er", 0, settings={"capacity": 100})
    study = read_study([tmp_path])
    rows = list(csv.reader(io.StringIO(tables_of(study, ".csv"))))
    assert rows[0][:2] == ["table", "method"]
    assert sum(row == rows[0] for row in rows) == 1
    assert [row[6] for row in rows if row[3] == "Acc"] == ["2", "1"]
    assert {row[3] for row in rows} >= {"Acc", "AAA", "WC-Acc", "Forgetting"}
    text = tables_of(study, ".md")
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "## split-digits, memory of 50",
        "## split-digits, memory of 100",
    ]
    assert text.count("| LPR (ER) |") == 2  # the main table, and the further one
    assert tables_of(study, ".tex").count(r"\begin{tabular}") == 4


def test_further_measures_leave_out_what_no_run_has(section: Section, tmp_path: Path) -> None:
    assert BY_KEY["minutes"] in further_table(section).columns
    write_run(tmp_path / "one", tasks=1, timings=False)
    (single,) = read_study([tmp_path]).sections
    columns = [measure.label for measure in further_table(single).columns]
    assert "Minutes" not in columns
    assert "Forgetting" not in columns
    assert "Variation, all seen" in columns


def test_comparisons_use_the_seeds_both_have(section: Section) -> None:
    (one,) = comparisons(section)
    assert (one.group.method, one.base.method, one.seeds) == ("lpr-er", "er", 3)
    theirs, ours = (g.values("wc_acc") for g in (one.base, one.group))
    mean = np.mean([ours[seed] - theirs[seed] for seed in range(3)])
    assert one.differences["wc_acc"].mean == pytest.approx(mean)
    assert one.better["wc_acc"] == 3


def test_rows_of_a_comparison_with_its_difference(section: Section) -> None:
    rows = comparison_rows(section.runs)
    assert [(row.label, row.seeds) for row in rows] == [
        ("ER", 4),
        ("LPR (ER)", 3),
        ("difference", 3),
    ]
    theirs, ours = (group.values("wc_acc") for group in section.groups)
    difference = rows[2].estimates[2]
    assert difference is not None
    assert difference.mean == pytest.approx(np.mean([ours[s] - theirs[s] for s in range(3)]))
