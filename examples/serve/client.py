"""A stream that drifts, a server that is killed, and a client that goes on.

    python examples/serve/client.py

Starts ``proxreplay serve``, streams handwritten digits and then the same digits rotated by 90
degrees: every batch is predicted first and learned when its labels arrive. Accuracy falls when the
digits turn, and recovers. In the middle the server is killed (kill -9) and started again; batches
that got no answer are sent again with the same idempotency key, so each is learned exactly once.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

HERE = Path(__file__).parent
BATCH = 10


def stream(batches: int) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    """Digits as they are, then rotated."""
    digits = load_digits()
    images, labels = digits.images.astype(np.uint8)[:, None], digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    for name, turned in (("upright", images), ("rotated", np.rot90(images, axes=(2, 3)))):
        for i in range(batches):
            rows = order[BATCH * i : BATCH * (i + 1)]
            yield name, turned[rows], labels[rows]


class Server:
    """A server in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start()

    def start(self) -> None:
        """Start it, and wait until it has said where it is."""
        command = [sys.executable, "-m", "proxreplay", "serve", str(self.folder), "--port", "0"]
        command += ["--learner", f"{HERE / 'learner.py'}:make", "--snapshot-every", "50"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        if not self.address:
            raise SystemExit("the server did not start")

    def kill(self) -> None:
        """End it at once, as a power loss would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Ask it to end."""
        self.process.terminate()
        self.process.wait()

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """One request, and its answer."""
        data = json.dumps(body).encode() if body else None
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.address + path, data, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return dict(json.load(answer))


def main(folder: Path, batches: int) -> None:
    server = Server(folder)
    print(f"{server.address}  (a page to look at)")
    try:
        talk(server, batches)
    finally:
        server.stop()


def talk(server: Server, batches: int) -> None:
    kill_at, killed = batches + batches // 2, False
    recent: list[float] = []
    for number, (name, images, labels) in enumerate(stream(batches)):
        if number:
            told = server.ask("predict", inputs=images.tolist())["labels"]
            recent.append(float(np.mean(np.array(told) == labels)))
        batch = {"inputs": images.tolist(), "labels": labels.tolist()}
        if number == kill_at:
            server.kill()
        while True:
            try:
                path = "learn?wait=applied"
                answer = server.ask(path, **batch, idempotency_key=f"batch {number}")
                break
            except urllib.error.HTTPError as error:
                raise SystemExit(error.read().decode()) from error
            except (urllib.error.URLError, ConnectionError):
                before = time.monotonic()
                server.start()
                killed = True
                print(f"killed; answers again after {time.monotonic() - before:.1f} s")
        assert answer["sequence"] == number + 1, "an event is missing, or is there twice"
        if (number + 1) % 20 == 0:
            print(f"event {number + 1:4}  {name}  accuracy {np.mean(recent[-20:]):.2f}")
    assert killed
    print("every batch was learned once")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    parser.add_argument("--batches", type=int, default=100, help="upright, and as many rotated")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as temporary:
        main(given.folder or Path(temporary) / "digits", given.batches)
