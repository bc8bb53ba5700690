"""The page of a server in a real browser: numbers, buttons, narrow and wide, no console error."""

import html
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from proxreplay.options import DurableOptions
from proxreplay.serving import DurableLearner, page
from proxreplay.serving.access import Access
from proxreplay.serving.api import make_app
from proxreplay.serving.service import Service
from tests.serving.streams import batches, make

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None and os.environ.get("CI") != "true",
    reason="no chromium or chrome was found; with CI=true this is a failure",
)
TOKEN = "a token to write with"

# Goes into the page for the test: it waits for numbers, uses what there is to use, and notes it.
SCRIPT = """
window.problems = [];
addEventListener("error", (e) => problems.push(String(e.message || e.target.src)), true);
addEventListener("unhandledrejection", (e) => problems.push(String(e.reason)));
addEventListener("securitypolicyviolation", (e) => problems.push(e.violatedDirective));
console.error = console.warn = (...words) => problems.push(words.join(" "));
window.confirm = () => true;
const found = { asked: false };
const all = (selector) => [...document.querySelectorAll(selector)];
const until = async (ready) => {
  for (let i = 0; i < 400 && !ready(); i++) await new Promise((done) => setTimeout(done, 25));
};
addEventListener("load", async () => {
  await until(() => !document.getElementById("ask").hidden);
  found.asked = !document.getElementById("ask").hidden;
  document.getElementById("token").value = "TOKEN";
  document.querySelector("#ask button").click();
  await until(() => all("#versions button").length);
  found.headline = document.getElementById("headline").textContent;
  found.classes = all("#classes tr").map((row) => row.cells[0].textContent);
  found.line = document.querySelector("#curve .line") !== null;
  found.versions = all("#versions button").map((button) => button.dataset.to);
  found.wide = all("body *").filter((e) => !e.closest(".scroll, .spoken, svg") &&
    e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 60));
  found.hidden = all("button").filter((e) => e.offsetParent &&
    e.getBoundingClientRect().right > innerWidth + 1).length;
  found.unlabelled = all("input, button, meter, svg").filter((e) =>
    !(e.labels && e.labels.length) &&
    !e.textContent.trim() && !e.getAttribute("aria-label")).length;
  all("#versions button").at(-1).click();
  await until(() => document.getElementById("history").textContent.includes("rollback"));
  found.history = document.getElementById("history").textContent;
  found.resources = performance.getEntriesByType("resource").map((e) => new URL(e.name).host);
  found.problems = problems;
  const out = document.createElement("pre");
  out.id = "found";
  out.textContent = JSON.stringify(found);
  document.body.appendChild(out);
});
"""


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    script = SCRIPT.replace("TOKEN", TOKEN)
    text = page.page().replace("<head>", f"<head><script>{script}</script>", 1)
    policy = page.HEADERS["Content-Security-Policy"]
    allowed = policy.replace("script-src ", f"script-src {page._hash(script)} ")
    monkeypatch.setattr(page, "page", lambda: text)
    monkeypatch.setitem(page.HEADERS, "Content-Security-Policy", allowed)
    durable = DurableLearner(tmp_path / "d", make(), options=DurableOptions(snapshot_every=4))
    for x, y in batches(9):
        durable.learn(x, [f"<b>class {label}</b>" for label in y.tolist()])
    service = Service(durable)
    app = make_app(service, Access(TOKEN[::-1], TOKEN))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", ws="none"))
    listening = server.config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    server.should_exit = True
    thread.join()
    listening.close()


def browse(address: str, folder: Path, width: int) -> dict[str, Any]:
    assert CHROMIUM is not None, "CI=true, but there is no browser; .ci/run installs Debian's"
    command = [
        CHROMIUM,
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update", "--disable-quic"),
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},1400",
        "--timeout=20000",
        "--virtual-time-budget=20000",
        "--dump-dom",
        address,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stdout[-3000:] + done.stderr[-2000:]
    return dict(json.loads(html.unescape(found.group(1))))


@pytest.mark.parametrize("width", [500, 1600])
def test_the_page_shows_what_is_going_on_and_goes_back(
    address: str, tmp_path: Path, width: int
) -> None:
    found = browse(address, tmp_path, width)
    assert found["problems"] == []
    assert set(found["resources"]) == {address.split("/")[2]}
    assert found["asked"]
    assert "examples were predicted right" in found["headline"]
    assert found["classes"]
    assert all(label.startswith("<b>class") for label in found["classes"])
    assert found["line"]
    assert found["versions"] == ["8", "4", "0"]
    assert "rollback to 0: from the page" in found["history"]
    assert found["wide"] == []
    assert found["hidden"] == 0
    assert found["unlabelled"] == 0
