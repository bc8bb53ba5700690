"""One holder at a time, also across processes; a dead holder holds nothing."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from proxreplay.locking import locked

HOLD = "import sys; from pathlib import Path; from proxreplay.locking import locked\n"
HOLD += "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


def test_a_second_holder_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path):
        assert path.read_text() == str(os.getpid())
        with pytest.raises(BlockingIOError), locked(path):
            pytest.fail("held twice")
    with locked(path):
        pass


def test_another_process_holds_it_until_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == b"held"
        assert path.read_text() == str(holder.pid)
        with pytest.raises(BlockingIOError), locked(path):
            pytest.fail("held twice")
        holder.kill()
        holder.wait()
        with locked(path):
            assert path.read_text() == str(os.getpid())


def test_who_waits_gets_a_file_that_still_exists(tmp_path: Path) -> None:
    path, inside = tmp_path / "lock", threading.Event()

    def wait_for_it() -> None:
        with locked(path, wait=True):
            assert path.exists()
            inside.set()

    with locked(path):
        waiting = threading.Thread(target=wait_for_it)
        waiting.start()
        assert not inside.is_set()
        path.unlink()  # the waiter must not hold the file that is gone
    waiting.join(timeout=30)
    assert inside.is_set()
