"""Load on a server over the loopback: predictions per second with and without learning.

    python -m benchmarks.serving --network mlp
    python -m benchmarks.serving --network slim_resnet18 --batches 2
    python -m benchmarks.serving --soak 3600
    python -m benchmarks.serving --soak 3600 --predict-rate 600 --learn-rate 2.5

The server is a process of its own; the clients are threads of this one that keep their connections.
Quiet and learning phases take turns, so that other load on the machine meets both alike. A soak
predicts and learns at half of the measured rates, or at those given, and prints every minute what
it reached, with the server's memory, file handles and threads.
"""

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HERE = "benchmarks/serving.py"
PREDICT, LEARN = "/predict", "/learn?wait=applied"


def learner(network: str) -> Any:
    """The learner that is served: digits on an MLP, or colour images on a slim ResNet18."""
    from proxreplay import LPR, Learner
    from proxreplay.data import Transform
    from proxreplay.models import mlp, slim_resnet18
    from proxreplay.seeding import seeded

    with seeded(0, "model"):
        images = network == "slim_resnet18"
        model = slim_resnet18(None, in_channels=3, image_size=32) if images else mlp(64)
    scale = 255.0 if images else 16.0
    return Learner(model, rule=LPR(model, omega_0=1.0), transform=Transform(scale=scale))


def mlp() -> Any:
    return learner("mlp")


def slim_resnet18() -> Any:
    return learner("slim_resnet18")


@dataclass
class Load:
    """Clients of a server.

    Args:
        port: of the server.
        shape: of one input.
        most: values of inputs are below this.
    """

    port: int
    shape: tuple[int, ...]
    most: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        inputs = rng.integers(0, self.most, (64, 10, *self.shape)).tolist()
        labels = rng.integers(0, 10, (64, 10)).tolist()
        self.predictions = [json.dumps({"inputs": batch[:1]}) for batch in inputs]
        pairs = zip(inputs, labels, strict=True)
        self.batches = [json.dumps({"inputs": x, "labels": y}) for x, y in pairs]

    def client(self, path: str, bodies: list[str], rate: float, stop: threading.Event) -> None:
        """Send one request after the other, so many per second (0: as fast as it goes).

        Each is due at a time of its own: what came late is made up for, so the rate is kept.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        number, began = 0, time.perf_counter()
        while not stop.is_set():
            start = time.perf_counter()
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, bodies[number % len(bodies)], headers)
            answer = connection.getresponse()
            answer.read()
            assert answer.status < 400, answer.status
            self.seconds[path].append(time.perf_counter() - start)
            number += 1
            if rate:
                stop.wait(max(0.0, began + number / rate - time.perf_counter()))
        connection.close()

    def first(self) -> None:
        """Learn something, so that there is something to predict."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        for body in self.batches[:5]:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", LEARN, body, headers)
            assert connection.getresponse().read()
        connection.close()

    @contextmanager
    def clients(self, learn: float | None, predict: float, connections: int) -> Iterator[None]:
        """Clients at work; ``learn`` batches per second, None for none, 0 for all it can."""
        stop = threading.Event()
        clients = [(PREDICT, self.predictions, predict / connections, stop)] * connections
        if learn is not None:
            clients.append((LEARN, self.batches, learn, stop))
        threads = [threading.Thread(target=self.client, args=client) for client in clients]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def taken(self) -> dict[str, list[float]]:
        """The seconds of the requests since the last call."""
        seconds, self.seconds = self.seconds, defaultdict(list)
        return seconds

    def run(self, seconds: float, learn: float | None) -> dict[str, list[float]]:
        """One phase of predictions as fast as they go."""
        with self.clients(learn, predict=0.0, connections=1):
            time.sleep(seconds)
        return self.taken()


def start(network: str, folder: Path, threads: int) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "proxreplay", "serve", str(folder), "--port", "0"]
    command += ["--learner", f"{HERE}:{network}", "--threads", str(threads)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline().strip().rsplit(":", 1)[1].strip("/"))


def told(name: str, times: list[float], seconds: float) -> str:
    p50, p99 = np.percentile(times, [50, 99]) * 1000
    return f"{name} {len(times) / seconds:8.1f}/s   p50 {p50:7.2f} ms   p99 {p99:7.2f} ms"


def compare(load: Load, seconds: float, rounds: int, rate: float) -> tuple[float, float]:
    """Predictions with and without learning, in turns; returns the rates of both."""
    quiet: list[float] = []
    busy: list[float] = []
    learned: list[float] = []
    for _ in range(rounds):
        quiet += load.run(seconds, None)[PREDICT]
        phase = load.run(seconds, rate)
        busy += phase[PREDICT]
        learned += phase[LEARN]
    total = seconds * rounds
    print(told("predict, no learning      ", quiet, total))
    print(told("predict, while learning   ", busy, total))
    print(told("learn (10 examples)       ", learned, total))
    ratio = np.percentile(busy, 99) / np.percentile(quiet, 99)
    print(f"p99 while learning / without: {ratio:.2f}", flush=True)
    return len(busy) / total, len(learned) / total


def soak(load: Load, process: int, seconds: float, predict: float, learn: float) -> None:
    """A load for a long time; two connections predict, so that one slow answer holds up only one.

    The times that are kept are those of one line, so that the client does not grow either.
    """
    began = line = time.monotonic()
    with load.clients(learn, predict, connections=2):
        while line - began < seconds:
            time.sleep(min(seconds / 20, 60))
            times, now = load.taken(), time.monotonic()
            status = Path(f"/proc/{process}/status").read_text()
            facts = dict(fact.split(":", 1) for fact in status.splitlines() if ":" in fact)
            files = len(list(Path(f"/proc/{process}/fd").iterdir()))
            memory, threads = facts["VmRSS"].strip(), facts["Threads"].strip()
            print(f"{now - began:6.0f} s  memory {memory}, {files} files, {threads} threads")
            for name, path in (("predict", PREDICT), ("learn", LEARN)):
                print(" " * 9 + told(f"{name:7}", times[path], now - line), flush=True)
            line = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=["mlp", "slim_resnet18"], default="mlp")
    parser.add_argument("--seconds", type=float, default=10, help="per phase")
    parser.add_argument("--rounds", type=int, default=3, help="of both phases")
    parser.add_argument(
        "--batches", type=float, default=5, help="learned per second; 0: all it can"
    )
    parser.add_argument("--soak", type=float, help="seconds")
    half = "per second in the soak (default: half of what was measured)"
    parser.add_argument("--predict-rate", type=float, help=f"predictions {half}")
    parser.add_argument("--learn-rate", type=float, help=f"batches {half}")
    given = parser.parse_args()
    shape, most = ((3, 32, 32), 256) if given.network == "slim_resnet18" else ((1, 8, 8), 17)
    with tempfile.TemporaryDirectory() as folder:
        process, port = start(given.network, Path(folder) / "d", 1)
        try:
            load = Load(port, shape, most)
            load.first()  # something is learned, and everything is warm
            predict, learn = given.predict_rate, given.learn_rate
            if not given.soak or predict is None or learn is None:
                measured = compare(load, given.seconds, given.rounds, given.batches)
                predict = measured[0] / 2 if predict is None else predict
                learn = measured[1] / 2 if learn is None else learn
            if given.soak:
                soak(load, process.pid, given.soak, predict, learn)
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
