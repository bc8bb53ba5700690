"""The watch rewrites the page when something changed, and only then."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from proxreplay.errors import InputError
from proxreplay.report.page import ReportSummary
from proxreplay.report.watch import watch_report
from tests.report.synthetic import write_run


class Looks(threading.Event):
    """An event whose every wait lets a step happen, and which is set when there are no more."""

    def __init__(self, steps: list[Callable[[], object]]) -> None:
        super().__init__()
        self.steps = steps

    def wait(self, timeout: float | None = None) -> bool:
        if not self.steps:
            return True
        self.steps.pop(0)()
        return False


def test_the_page_follows_the_runs(tmp_path: Path) -> None:
    runs, page = tmp_path / "runs", tmp_path / "report.html"
    written: list[ReportSummary] = []
    seen: list[int] = []

    def count() -> None:
        seen.append(len(written))

    steps: list[Callable[[], object]] = [
        count,  # the folder is not there yet
        lambda: write_run(runs / "a", stop_after=30),
        count,  # first page
        count,  # nothing changed
        lambda: write_run(runs / "a"),
        count,  # complete
    ]
    watch_report([runs], page, stop=Looks(steps), on_write=written.append)
    assert seen == [0, 1, 1, 2]
    assert ["incomplete" in summary.statuses for summary in written] == [True, False]
    assert "data-reload" not in page.read_text().split("<script", 1)[0]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.html"]


def test_an_interval_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="interval=0"):
        watch_report([tmp_path], tmp_path / "r.html", interval=0)
