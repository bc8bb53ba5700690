"""A few of the kills of `tests.serving.kills`, which makes 200 when it is run by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.lossy import sqlite_library

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(
    sqlite_library() is None, reason="Python's sqlite3 has SQLite inside; its writes are not seen"
)
def test_a_server_that_is_killed_loses_nothing_and_learns_nothing_twice() -> None:
    command = [sys.executable, "-m", "tests.serving.kills", "--kills", "3", "--every", "3"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equals the twin's") == 1
