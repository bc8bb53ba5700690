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
