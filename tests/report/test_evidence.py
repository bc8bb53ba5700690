"""The pages about evidence say what the committed results say."""

from pathlib import Path

import pytest

from proxreplay.report.grouping import read_study
from proxreplay.report.tables import tables_of

DOCS = Path(__file__).parents[2] / "docs"
FOLDERS = sorted(p.name for p in (DOCS / "evidence").iterdir() if p.is_dir())


@pytest.mark.parametrize("name", FOLDERS)
def test_the_tables_of_a_page_are_those_of_its_folder(name: str) -> None:
    """``proxreplay report docs/evidence/NAME --out tables.md`` prints them."""
    study = read_study([DOCS / "evidence" / name])
    assert study.runs
    assert {run.status for run in study.runs} == {"complete"}
    file = DOCS / ("reproduction.md" if name == "table1" else f"evidence/{name}.md")
    page = file.read_text(encoding="utf-8")
    rows = [line for line in tables_of(study, ".md").splitlines() if line.startswith("|")]
    missing = [row for row in rows if row not in page]
    assert not missing, missing
