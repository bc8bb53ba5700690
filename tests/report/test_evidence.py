"""The page about the reproduction says what the committed results say."""

from pathlib import Path

from proxreplay.report.grouping import read_study
from proxreplay.report.tables import tables_of

ROOT = Path(__file__).parents[2]


def test_the_tables_of_the_reproduction_are_those_of_the_evidence() -> None:
    """``proxreplay report docs/evidence --out tables.md`` prints them."""
    study = read_study([ROOT / "docs" / "evidence"])
    assert study.runs
    assert {run.status for run in study.runs} == {"complete"}
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    rows = [line for line in tables_of(study, ".md").splitlines() if line.startswith("|")]
    missing = [row for row in rows if row not in page]
    assert not missing, missing
