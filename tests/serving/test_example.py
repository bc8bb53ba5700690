"""The example of a server: a process of the command line, kill -9, and a client that goes on."""

import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[2] / "examples" / "serve" / "client.py"


def test_a_server_is_killed_and_every_batch_is_learned_once() -> None:
    command = [sys.executable, str(CLIENT), "--batches", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "killed; answers again" in done.stdout
    assert done.stdout.endswith("every batch was learned once\n")
