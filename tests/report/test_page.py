"""The page: complete, self-contained, and safe against what stands in files."""

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from proxreplay.errors import DataError
from proxreplay.report.page import write_report, write_tables
from tests.report.synthetic import write_run


class Page(HTMLParser):
    """Elements, attributes and visible text of a page; complains about tags that do not nest."""

    VOID = frozenset({"meta", "link", "img", "input", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data.strip())

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def report(folder: Path, out: Path) -> str:
    write_report([folder], out)
    return out.read_text("utf-8")


def data_of(text: str) -> dict[str, list[dict[str, list[dict[str, object]]]]]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found
    return dict(json.loads(found.group(1)))


def test_everything_is_on_one_page_and_nothing_is_fetched(tmp_path: Path) -> None:
    for method in ("er", "lpr-er"):
        for seed in range(2):
            write_run(
                tmp_path / f"{method}{seed}",
                method,
                seed,
                benchmark="split-cifar100",
                settings={"capacity": 2000, "lpr.omega_0": 3.5},
                diagnostics=True,
            )
    text = report(tmp_path, tmp_path / "report.html")
    page = Page(text)
    for wanted in (
        "ER, LPR (ER) on split-cifar100",
        "4 runs: 4 complete",
        "0.2937",  # the paper's
        "Few seeds",
        "proxreplay run split-cifar100 --method lpr-er --seed 1",
        "--set lpr.omega_0=3.5",
        "Forgetting",
        "Layerwise Proximal Replay",
    ):
        assert wanted in page.text, wanted
    for tag, attributes in page.elements:
        for name in ("src", "href", "action", "data", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    assert "url(" not in text
    assert "@import" not in text
    assert "fetch(" not in text


def test_what_stands_in_files_is_text(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    folder = write_run(
        tmp_path / "run", evil, settings={"benchmark": f"b{evil}", "method": f"lpr-{evil}"}
    )
    (folder / "environment.json").write_text(json.dumps({"processor": evil}))
    failed = write_run(tmp_path / "&lt;b&gt;<i>x", "er", stop_after=5)
    (failed / "failure.txt").write_text(evil)
    text = report(tmp_path, tmp_path / "report.html")
    page = Page(text)
    assert sum(tag == "script" for tag, _ in page.elements) == 2
    assert not any("onerror" in attributes for _, attributes in page.elements)
    assert not any(tag in ("i", "b") for tag, _ in page.elements)
    assert evil in page.text
    labels = [label for section in data_of(text)["sections"] for label in section["labels"]]
    assert f"lpr-{evil}" in labels


def test_the_data_holds_every_measure_with_its_curves(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "lpr-er", diagnostics=True)
    write_run(tmp_path / "b", "er", stop_after=30)
    (section,) = data_of(report(tmp_path, tmp_path / "report.html"))["sections"]
    names = [measure["name"] for measure in section["measures"]]
    assert {"accuracy", "wc_acc", "drift", "ratio_new", "time"} <= set(names)
    by_group = {curve["group"]: curve for curve in section["measures"][0]["curves"]}  # type: ignore[attr-defined]
    assert None in by_group[0]["mean"]  # the unfinished one ends early
    assert None not in by_group[1]["mean"]


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
def test_only_a_page_about_unfinished_runs_reloads(tmp_path: Path, finished: bool) -> None:
    write_run(tmp_path / "a", stop_after=None if finished else 30)
    summary = write_report([tmp_path], tmp_path / "r.html", reload_seconds=7)
    assert ("incomplete" in summary.statuses) is not finished
    text = (tmp_path / "r.html").read_text()
    assert ('data-reload="7"' in text) is not finished
    write_report([tmp_path], tmp_path / "r.html")
    assert "data-reload" not in (tmp_path / "r.html").read_text().split("<script", 1)[0]


def test_a_study_of_only_lost_runs_still_has_a_page(tmp_path: Path) -> None:
    (write_run(tmp_path / "a") / "config.yaml").write_text("- nothing")
    empty = write_run(tmp_path / "b", stop_after=0)
    (empty / "records.jsonl").write_text("")
    page = Page(report(tmp_path, tmp_path / "report.html"))
    assert "Runs without numbers" in page.text
    assert "No run has numbers yet" in page.text


def test_names_that_are_not_utf8_do_not_stop_a_report(tmp_path: Path) -> None:
    name = os.fsdecode(b"run-\xff")
    try:
        folder = write_run(tmp_path / name)
    except OSError:
        pytest.skip("this file system only takes names in UTF-8")
    with (folder / "records.jsonl").open("a") as file:
        file.write('{"kind": "rule", "untreated": {"\\ud800": "x"}}\n')
    for ending in ("html", "md", "tex", "csv"):
        out = tmp_path / f"out.{ending}"
        (write_report if ending == "html" else write_tables)([tmp_path], out)
        assert out.read_text("utf-8")


def test_folders_without_runs_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a run folder holds a config\.yaml"):
        write_report([tmp_path], tmp_path / "report.html")
    with pytest.raises(DataError, match="no such folder"):
        write_report([tmp_path / "typo"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_two_hundred_runs_stay_small_and_show_the_best_first(tmp_path: Path) -> None:
    for i in range(200):
        lr = round(0.01 * (1 + i // 10), 2)
        write_run(tmp_path / str(i), "er", i % 10, batches=10, settings={"lr": lr})
    (tmp_path / "0" / "records.jsonl").write_text("torn")
    summary = write_report([tmp_path], tmp_path / "report.html")
    assert summary.statuses == {"complete": 199, "broken": 1}
    assert (tmp_path / "report.html").stat().st_size < 15e6
    (section,) = data_of((tmp_path / "report.html").read_text())["sections"]
    assert len(section["labels"]) == 20
    assert sum(map(bool, section["shown"])) == 8
