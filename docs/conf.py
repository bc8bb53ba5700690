"""The docs as a site: ``make docs``. Pages are Markdown, the reference is made from docstrings."""

import contextlib
import io
import runpy
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
exclude_patterns = ["_build", "evidence"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures stay short; Args say what is meant
python_use_unqualified_type_names = True

# Shown with what they print when the site is built. Those left out need what may be missing.
GALLERY = ["three_lines", "your_own_stream", "your_own_layer", "text_stream"]


def output_of(name: str) -> str:
    """What an example prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return printed.getvalue()


def write_gallery(app: Any) -> None:
    """One page with every example: its text, and what it printed."""
    lines = ["# Examples", "", "Each is one file in `examples/`; the output is that of this build."]
    for name in GALLERY:
        source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
        lines += ["", f"## {name.replace('_', ' ')}", "", "```python", source.rstrip(), "```"]
        if app.config.gallery_run:
            lines += ["", "It prints:", "", "```text", output_of(name).rstrip(), "```"]
    (HERE / "gallery.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_config_value("gallery_run", True, "env", bool)
    app.connect("builder-inited", write_gallery)
