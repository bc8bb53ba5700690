"""The page in a real browser without a window: toggles, keys, widths, and not one console error.

The page is put into a frame of the wanted width, because a browser window cannot be narrower than
500 pixels, and a small script in the outer page uses it and writes down what it found.
"""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from proxreplay.report.page import write_report
from tests.report.synthetic import write_run

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None and os.environ.get("CI") != "true",
    reason="no chromium or chrome was found; with CI=true this is a failure",
)

# Goes first in the page's head: whatever goes wrong later is written down.
LISTENER = """<script>
window.problems = [];
addEventListener("error", (e) => problems.push(String(e.message || e.target.src)), true);
addEventListener("unhandledrejection", (e) => problems.push(String(e.reason)));
addEventListener("securitypolicyviolation", (e) => problems.push(e.violatedDirective));
console.error = console.warn = (...words) => problems.push(words.join(" "));
</script>"""

OUTER = """<!doctype html><meta charset="utf-8">
<iframe style="width:{width}px;height:900px;border:0" srcdoc="{page}"></iframe>
<pre id="found"></pre>
<script>
document.querySelector("iframe").addEventListener("load", (event) => {{
  const frame = event.target.contentWindow, page = frame.document;
  const found = {{}};
  const methods = () => [...page.querySelectorAll(".plot .curve")].map((p) => p.dataset.method);
  const key = (name) => page.querySelector(".plot svg").dispatchEvent(
    new frame.KeyboardEvent("keydown", {{ key: name, bubbles: true, cancelable: true }}));
  found.width = page.documentElement.scrollWidth;
  found.inner = frame.innerWidth;
  found.wide = [...page.querySelectorAll("body *")].filter((e) =>
    !e.closest(".scroll, .skip, .spoken, legend, .plot svg") &&
    e.getBoundingClientRect().right > frame.innerWidth + 1).map((e) => e.outerHTML.slice(0, 80));
  found.before = methods();
  page.querySelector(".methods input").click();
  found.off = methods();
  page.querySelector(".methods input").click();
  found.on = methods();
  const select = page.querySelector(".chart select");
  found.measures = [...select.options].map((o) => o.value);
  found.drawn = found.measures.map((name) => {{
    select.value = name;
    select.dispatchEvent(new frame.Event("change"));
    return page.querySelectorAll(".plot .curve").length;
  }});
  key("End"); key("ArrowLeft");
  found.spoken = page.querySelector(".spoken").textContent;
  found.dots = page.querySelectorAll(".plot circle").length;
  key("Escape");
  found.after_escape = page.querySelectorAll(".plot circle").length;
  const all = (selector) => [...page.querySelectorAll(selector)];
  found.reachable = all("select, input, button, summary, a, .plot svg, .scroll")
    .every((e) => e.tabIndex >= 0);
  found.unlabelled = all("input, select, button, img, .plot svg").filter((e) =>
    !(e.labels && e.labels.length) && !e.textContent.trim() &&
    !e.alt && !e.getAttribute("aria-label")).length;
  page.querySelectorAll("details").forEach((d) => {{ d.open = true; }});
  found.width_open = page.documentElement.scrollWidth;
  found.resources = frame.performance.getEntriesByType("resource")
    .map((e) => e.name).filter((name) => !name.startsWith("data:"));
  found.dark = frame.getComputedStyle(page.body).backgroundColor;
  found.problems = frame.problems;
  document.getElementById("found").textContent = JSON.stringify(found);
}});
</script>
"""


def browse(page: Path, folder: Path, width: int, *options: str) -> dict[str, Any]:
    """What the outer page's script found."""
    text = page.read_text("utf-8").replace("<head>", f"<head>{LISTENER}", 1)
    outer = folder / f"outer-{width}.html"
    outer.write_text(OUTER.format(width=width, page=html.escape(text)), "utf-8")
    assert CHROMIUM is not None, "CI=true, but there is no browser; .ci/run installs Debian's"
    command = [
        CHROMIUM,
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update", "--disable-quic"),
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=2200,1000",
        "--virtual-time-budget=5000",
        *options,
        "--dump-dom",
        outer.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    assert found.group(1), "the script in the outer page did not come to its end"
    return dict(json.loads(html.unescape(found.group(1))))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    for method in ("er", "lpr-er"):
        for seed in range(2):
            run = folder / f"{method}-with-quite-a-long-name-{seed}"
            settings = {"capacity": 2000}
            write_run(
                run, method, seed, benchmark="split-cifar100", settings=settings, diagnostics=True
            )
    failed = write_run(
        folder / "failed",
        "er",
        5,
        benchmark="split-cifar100",
        settings={"capacity": 2000},
        stop_after=9,
    )
    (failed / "failure.txt").write_text("RuntimeError: " + "a-word-without-a-break-" * 20)
    write_report([folder], folder / "report.html")
    return folder / "report.html"


@pytest.mark.parametrize("width", [380, 2000])
def test_the_page_works_at_every_width(page: Path, tmp_path: Path, width: int) -> None:
    found = browse(page, tmp_path, width)
    assert found["problems"] == []
    assert found["resources"] == []
    assert found["inner"] == width
    assert found["wide"] == []
    assert found["width"] <= width
    assert found["width_open"] <= width

    assert found["before"] == ["ER", "LPR (ER)"]
    assert found["off"] == ["LPR (ER)"]
    assert found["on"] == ["ER", "LPR (ER)"]
    expected = [1 if name.startswith("ratio") else 2 for name in found["measures"]]
    assert found["drawn"] == expected

    assert found["spoken"].startswith("At ")
    assert "LPR (ER) 0." in found["spoken"]
    assert (found["dots"], found["after_escape"]) == (2, 0)
    assert found["reachable"]
    assert found["unlabelled"] == 0


def test_light_and_dark_follow_the_reader(page: Path, tmp_path: Path) -> None:
    light = browse(page, tmp_path, 800)
    dark = browse(page, tmp_path, 800, "--blink-settings=preferredColorScheme=0")
    assert light["dark"] == "rgb(255, 255, 255)"
    assert dark["dark"] == "rgb(20, 24, 28)"
