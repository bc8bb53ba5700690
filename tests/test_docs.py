"""Pages that point to each other, to pictures and to files must point to something."""

import re
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md")]
for folder in ("docs", "docs/guides", "docs/evidence"):
    PAGES += (ROOT / folder).glob("*.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    local = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
    missing = [link for link in local if not (page.parent / link).exists()]
    assert not missing, f"{page.name} points to {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_is_wrapped_at_100_columns(page: Path) -> None:
    text = re.sub(
        r"```.*?```", lambda block: "\n" * block[0].count("\n"), page.read_text(), flags=re.S
    )
    other = ("|", "    ", "!", "#")  # tables, code, pictures, headings
    lines = enumerate(text.splitlines(), start=1)
    long = [number for number, line in lines if len(line) > 100 and not line.startswith(other)]
    assert not long, f"{page.name}: lines {long}"


def test_there_are_pages() -> None:
    assert {"README.md", "speed.md", "reproduction.md"} <= {page.name for page in PAGES}


def cells_that_name_code(page: Path) -> list[list[str]]:
    """What stands in backticks in each last cell of tables that say where code is."""
    cells, inside = [], False
    for line in page.read_text().splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        last = line.rstrip(" |").rpartition(" | ")[2].strip()
        if inside:
            cells.append(re.findall(r"`([^`]+)`", last))
        inside = inside or last in ("where", "code")
    return [cell for cell in cells if cell]


@pytest.mark.parametrize("page", ["lpr.md", "rules.md"])
def test_code_named_in_formula_tables_can_be_imported_from_where_they_say(page: str) -> None:
    cells = cells_that_name_code(ROOT / "docs" / page)
    assert len(cells) > 4
    for cell in cells:
        files = [name for name in cell if name.endswith(".py")]
        dotted = [name.removesuffix(".py").replace("/", ".") for name in files]
        modules = [import_module(f"proxreplay.{name}") for name in dotted]
        for name in cell:
            if re.fullmatch(r"[A-Za-z_]\w*", name):
                assert any(hasattr(module, name) for module in modules), f"{page}: {name}, {files}"


LOOP = """
import torch
from torch import nn
from proxreplay import LPR, Batch, Learner
from proxreplay.models import mlp
from proxreplay.proximal import OWM, KroneckerLPR
model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
memory_inputs, step = torch.randn(20, 4), 0
x, y = torch.randn(12, 4), torch.arange(12) % 3
replayed_x, replayed_y = x.clone(), y.clone()
F = nn.functional
loss = nn.functional.cross_entropy(model(x), y)
X = x
"""
NAMED = LOOP + "model, y = mlp(4), ['customer 1', 'customer 2', 'customer 3'] * 4"
BEFORE = {  # what a page takes for granted
    "README.md": LOOP,
    "companion.md": LOOP + "from proxreplay import CompanionOptions",
    "lpr.md": LOOP,
    "rules.md": LOOP,
    "replay.md": NAMED,
    "scale.md": LOOP
    + """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
""",
    "serve.md": "import torch; x, y = torch.randn(12, 64), torch.arange(12) % 3",
}
ELSEWHERE = {"integrations.md"}  # tests/integrations/test_docs.py


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


WITH_SNIPPETS = [page for page in PAGES if snippets(page) and page.name != "gallery.md"]


@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=lambda page: page.name)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name in ELSEWHERE:
        pytest.skip("its snippets are run by tests/integrations/test_docs.py")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    exec(BEFORE.get(page.name, ""), names)
    try:
        for number, snippet in enumerate(snippets(page)):
            exec(compile(snippet, f"{page.name}, snippet {number}", "exec"), names)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="sphinx is not installed")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-D", "gallery_run=0"]
    built = subprocess.run(
        [*command, "-b", "dummy", "-d", str(tmp_path / "doctrees"), "docs", str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr


def test_the_gallery_shows_every_example(monkeypatch: pytest.MonkeyPatch) -> None:
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    shown = {file.relative_to(ROOT / "examples").as_posix() for file in conf["examples"]()}
    kept = {
        file.relative_to(ROOT / "examples").as_posix() for file in conf["EXAMPLES"].rglob("*.py")
    }
    assert kept - shown == {"serve/learner.py"}  # a part of the one about serving
    own = ROOT / "examples" / "your_own_layer.py"
    text = "\n".join(conf["shown"](own, run=True))
    assert own.read_text().rstrip() in text
    assert "FourierLinear  d = 7, groups = 1" in text.partition("It prints:")[2]
    with monkeypatch.context() as patch:
        patch.setitem(conf["NEEDS"], "your_own_layer", "nowhere_to_be_found")
        assert "not run for this page: nowhere" in "\n".join(conf["shown"](own, run=True))
