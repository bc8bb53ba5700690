"""A server under load that is killed again and again, on a disk that loses what was not synced.

    python -m tests.serving.kills --kills 200

Every round: a server is started (forked from this process, so that it starts at once), threads
send batches over HTTP, and at a random moment it is killed with SIGKILL. Then everything that it
had not synced is lost, torn or zeroed (`tests.serving.lossy`), and the next server starts on what
is left. A batch without an answer is sent again with the same idempotency key. Every third batch is
predicted under an id first, and its labels follow without the inputs, also after a kill. In the end
every acknowledged batch must be in the log once, under the sequence that was acknowledged, and the
learner must be bit for bit the one that learned the same batches without a disk.
"""

import argparse
import http.client
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn

from proxreplay.options import DurableOptions, ServeOptions
from proxreplay.serving import DurableLearner
from proxreplay.serving.access import Access
from proxreplay.serving.api import make_app
from proxreplay.serving.service import Service
from proxreplay.serving.timeline import fingerprint
from tests.disk import Disk, after_power_loss
from tests.serving.lossy import Lossy, read_journal
from tests.serving.streams import batches, make

OPTIONS = DurableOptions(snapshot_every=7, keep_snapshots=3, keep_events=10**6)
CLIENTS = 3
LATER = 10  # predictions that wait for their labels


@dataclass
class Told:
    """What clients know: the sequence of every batch, and every id, that was acknowledged."""

    sequences: dict[int, int] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    later: list[int] = field(default_factory=list)
    next: int = 0
    again: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> int:
        """A batch to send: one that got no answer, or a new one."""
        with self.lock:
            if self.again:
                return self.again.pop()
            if len(self.later) > LATER:
                return self.later.pop(0)
            self.next += 1
            return self.next - 1


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batches(1, seed=number)[0]


def serve(folder: Path, journal: Path, pipe: int) -> None:
    """In a child: serve until killed."""
    with Lossy(folder, journal)():
        service = Service(DurableLearner(folder / "d", make(), options=OPTIONS), ServeOptions())
        server = uvicorn.Server(
            uvicorn.Config(make_app(service, Access()), port=0, log_level="critical")
        )
        listening = server.config.bind_socket()
        listening.listen(50)
        os.write(pipe, listening.getsockname()[1].to_bytes(4, "little"))
        server.run(sockets=[listening])


def client(port: int, told: Told, stop: threading.Event) -> None:
    """Send batches, some of them first to be predicted, until the server is gone."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)

    def post(path: str, body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    while not stop.is_set():
        number = told.take()
        x, y = batch(number)
        inputs, labels = {"inputs": x.tolist()}, {"labels": y.tolist()}
        by_id = number % 3 == 0 and number > 20  # something is known by then
        given = {"id": str(number)} if by_id else inputs | {"keys": str(number)}
        try:
            if by_id and number not in told.kept:
                status, answer = post("/predict", inputs | {"id": str(number)})
                assert status == 200, answer
                told.kept.add(number)
                if number % 2:  # labels take their time
                    told.later.append(number)
                    continue
            status, answer = post("/learn", given | labels | {"idempotency_key": f"batch {number}"})
        except (OSError, http.client.HTTPException, ValueError):
            with told.lock:
                if number not in told.sequences:
                    told.again.append(number)
            return
        assert status == 202, answer
        with told.lock:
            known = told.sequences.setdefault(number, answer["sequence"])
            assert known == answer["sequence"]


def wait_for_a_moment(told: Told, rng: random.Random) -> None:
    """A random moment: while it starts, or some answers later, in the middle of what follows."""
    if rng.random() < 0.15:
        time.sleep(rng.uniform(0, 1))
        return
    enough, patience = len(told.sequences) + rng.randrange(1, 25), time.monotonic() + 30
    while len(told.sequences) < enough and time.monotonic() < patience:
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.05))


def one_round(folder: Path, place: Path, told: Told, rng: random.Random) -> Path:
    """Start, load, kill, lose; returns the folder as it is afterwards."""
    disk = Disk.of(folder)
    journal = place / "journal"
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            serve(folder, journal, writing)
        finally:
            os._exit(1)
    os.close(writing)
    port = int.from_bytes(os.read(reading, 4), "little")
    os.close(reading)
    assert port, "the server did not start; its message is above"
    stop = threading.Event()
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, port, told, stop) for _ in range(CLIENTS)]
        wait_for_a_moment(told, rng)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        stop.set()
    for done in clients:
        done.result()  # raises what a client did not expect
    left = place / f"round-{rng.getrandbits(32):08x}"
    recorded = read_journal(disk, journal)
    after_power_loss(recorded, len(recorded.operations), rng).write_to(left)
    return left


def verify(folder: Path, told: Told) -> tuple[int, str]:
    """Every acknowledged batch once, and the state that learning them gives."""
    with DurableLearner(folder / "d", make(), options=OPTIONS) as durable:
        twin, seen = make(), {}
        for sequence in range(1, durable.log.last + 1):
            number = int(durable.log.event(sequence).body["keys"][0])
            assert number not in seen, f"batch {number} was learned twice"
            seen[number] = sequence
            twin.learn(*batch(number))
        for number in told.kept - seen.keys():
            with durable.kept.taken(str(number)) as (_, inputs):
                assert torch.equal(inputs, batch(number)[0])
        for number, sequence in told.sequences.items():
            assert seen.get(number) == sequence, f"batch {number} was acknowledged and is lost"
        live = durable.fingerprint()
        assert live == fingerprint(twin), "the state differs from the undisturbed twin's"
        return len(seen), live


def main(kills: int, seed: int, every: int) -> int:
    """Returns how many batches were learned."""
    torch.set_num_threads(1)
    make().learn(*batch(0))  # warm, before forking
    rng, told = random.Random(seed), Told()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        folder = place / "start"
        folder.mkdir()
        for kill in range(1, kills + 1):
            left = one_round(folder, place, told, rng)
            shutil.rmtree(folder)
            folder = left
            if kill % every == 0 or kill == kills:
                shutil.copytree(folder, place / "look")
                learned, state = verify(place / "look", told)
                shutil.rmtree(place / "look")
                print(
                    f"{kill} kills, {time.monotonic() - began:.0f} s: {len(told.kept)} ids and "
                    f"{len(told.sequences)} batches acknowledged, {learned} in the log, each once; "
                    f"state {state[:12]} equals the twin's",
                    flush=True,
                )
    return learned


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=20, help="kills between looks")
    given = parser.parse_args()
    sys.exit(0 if main(given.kills, given.seed, given.every) else 1)
