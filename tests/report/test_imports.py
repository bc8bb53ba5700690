"""What a report needs, and what it must not need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.synthetic import write_run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("ending", ["html", "md"])
def test_a_report_needs_no_torch(tmp_path: Path, ending: str) -> None:
    for method in ("er", "lpr-er"):
        write_run(tmp_path / method, method)
    out = tmp_path / f"report.{ending}"
    code = (
        "import sys; from proxreplay.cli import app; "
        f"app(['report', {str(tmp_path)!r}, '--out', {str(out)!r}], standalone_mode=False); "
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert out.exists()


@pytest.mark.parametrize("ci", ["true", ""])
def test_without_a_browser_its_tests_fail_in_ci_and_are_skipped_elsewhere(
    tmp_path: Path, ci: str
) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "light_and_dark"]
    done = subprocess.run(
        [*command, "tests/report/test_browser.py"],
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path), "CI": ci},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (1 if ci else 0), done.stdout
    assert ("there is no browser" if ci else "no chromium or chrome was found") in done.stdout
