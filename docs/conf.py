"""The docs as a site: ``make docs``. Pages are Markdown, the reference is made from docstrings."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
sys.path.insert(0, str(HERE.parent / "src"))

project = "proxreplay"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "proxreplay"
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures stay short; Args say what is meant
python_use_unqualified_type_names = True

NEEDS = {"avalanche_plugin": "avalanche"}  # what may be missing
PICTURES = {"two_sided", "hard_projection"}  # are called with the file to draw


def examples() -> list[Path]:
    """Every program in `examples/`, the shortest first."""
    files = [*EXAMPLES.glob("*.py"), EXAMPLES / "serve" / "client.py"]
    return sorted(files, key=lambda file: (file.stat().st_size, file))


def shown(file: Path, *, run: bool) -> list[str]:
    """One example as Markdown: its text, and what it prints and draws."""
    name, source = file.stem, file.read_text(encoding="utf-8")
    where = file.relative_to(EXAMPLES.parent).as_posix()
    title = "serve" if file.parent != EXAMPLES else name.replace("_", " ")
    lines = ["", f"## {title}", "", f"`{where}`", "", "```python", source.rstrip(), "```", ""]
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        return [*lines, f"It was not run for this page: {NEEDS[name]} is not installed."]
    if not run:
        return lines
    picture = [f"gallery-{name}.png"] if name in PICTURES else []
    done = subprocess.run(
        [sys.executable, str(file), *picture],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent / "src")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines += ["It prints:", "", "```text", done.stdout.rstrip(), "```"]
    return [*lines, "", *(f"![What it draws]({one})" for one in picture)]


def write_gallery(app: Any) -> None:
    """One page with every example."""
    lines = ["# Examples", "", "Each is one file in `examples/`; the output is that of this build."]
    for file in examples():
        lines += shown(file, run=app.config.gallery_run)
    (HERE / "gallery.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_config_value("gallery_run", True, "env", bool)
    app.connect("builder-inited", write_gallery)
