"""Pages that point to each other, to pictures and to files must point to something."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    local = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
    missing = [link for link in local if not (page.parent / link).exists()]
    assert not missing, f"{page.name} points to {missing}"


def test_there_are_pages() -> None:
    assert {"README.md", "speed.md", "reproduction.md"} <= {page.name for page in PAGES}


PACKAGE = ROOT / "src" / "proxreplay"
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}


def named_in_tables(page: Path) -> list[str]:
    """What stands in backticks in the last column of tables that say where code is."""
    cells, inside = [], False
    for line in page.read_text().splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        last = line.rstrip(" |").rpartition(" | ")[2].strip()
        if inside:
            cells.append(last)
        inside = inside or last in ("where", "code")
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("page", ["lpr.md", "rules.md"])
def test_code_named_in_formula_tables_exists(page: str) -> None:
    names = named_in_tables(ROOT / "docs" / page)
    assert len(names) > 4
    for name in names:
        if name.endswith(".py"):
            assert name in SOURCES, f"{page}: no file {name}"
        elif re.fullmatch(r"[A-Za-z_]\w*", name):
            defined = re.compile(rf"^ *(def|class) {name}\b", re.MULTILINE)
            assert any(map(defined.search, SOURCES.values())), f"{page}: no {name} in the package"
