"""What several processes save and what they say to each other.

``python -m benchmarks.processes`` learns batches of 64 + 64 with the slim ResNet18 in one process
and in two, one thread each, and measures one refresh: time, share of it spent in messages, and
bytes sent, counted by the kernel for every TCP connection of the process, against the model of
docs/scale.md. With ``--cpu`` times are CPU time of each process, in all of its threads: what they
would take on free cores, apart from waiting for each other.
"""

import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from proxreplay import LPR, Learner
from proxreplay.distributed import Processes, current
from proxreplay.distributed import processes as messages
from proxreplay.models import slim_resnet18

INCOMING, REPLAY, SAMPLES, BATCHES, WARM = 64, 64, 200, 6, 2
BYTES_SENT = 120 + 80  # where tcpi_bytes_sent is in Linux's struct tcp_info


def sent_bytes() -> int:
    """Bytes that all TCP connections of this process have sent so far."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    if len(info) >= BYTES_SENT + 8:
                        total += struct.unpack_from("Q", info, BYTES_SENT)[0]
        except OSError:
            continue
    return total


def refresh_model(rule: LPR, size: int) -> dict[str, float]:
    """Bytes that one process sends in a refresh, on average: the model of docs/scale.md."""
    layers = rule.layers.values()
    triangles = sum(8 * one.groups * one.d * (one.d + 1) // 2 for one in layers)
    factors = sum(one.bytes for one in layers)
    return {"sums": 2 * (size - 1) / size * triangles, "factors": (size - 1) / size * factors}


def measure(cpu: bool) -> dict[str, float]:
    """Times and bytes of this process."""
    clock = time.process_time if cpu else time.perf_counter
    messages.time = SimpleNamespace(perf_counter=clock)  # type: ignore[assignment]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    processes = current().holding(replicated=True)
    model = slim_resnet18(100)
    rule = LPR(model, omega_0=4.0, beta=2.0, tolerance=0.0)
    learner = Learner(
        *(model, None, rule),
        lr=0.05,
        steps_per_batch=1,
        replay_batch=REPLAY,
        refresh_every=None,
        refresh_samples=SAMPLES,
        processes=processes,
    )
    x, y = torch.rand(INCOMING, 3, 32, 32), torch.randint(0, 100, (INCOMING,))
    for _ in range(WARM):
        learner.learn(x, y)
    found = {}
    for name, repeats, act in (
        ("refresh", 2, learner.refresh),
        ("learn", BATCHES, lambda: learner.learn(x, y)),
    ):
        processes.wait()
        before, sent, start = processes.traffic.seconds, sent_bytes(), clock()
        for _ in range(repeats):
            act()
        found[f"{name} seconds"] = (clock() - start) / repeats
        found[f"{name} in messages"] = (processes.traffic.seconds - before) / repeats
        found[f"{name} bytes"] = (sent_bytes() - sent) / repeats
    for name, size in refresh_model(rule, processes.size).items():
        found[f"model {name}"] = size
    found["gradient bytes"] = 4 * sum(p.numel() for p in model.parameters())
    return found


def start(rank: int, size: int, store: str, cpu: bool) -> None:
    """One of the processes."""
    if size > 1:
        where, patience = f"file://{store}", timedelta(minutes=5)
        dist.init_process_group("gloo", where, patience, world_size=size, rank=rank)
        Processes.up()
    print(json.dumps(measure(cpu)), flush=True)
    if size > 1:
        dist.destroy_process_group()


def main() -> None:
    """Print one column for each number of processes."""
    columns = {}
    for size in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.processes"]
            workers = [
                subprocess.Popen(
                    [*command, *sys.argv[1:], str(rank), str(size), f"{folder}/store"],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for rank in range(size)
            ]
            said = [json.loads(worker.communicate()[0]) for worker in workers]
        columns[size] = {name: sum(one[name] for one in said) / size for name in said[0]}
        for name in ("learn", "refresh"):  # the slower process decides
            columns[size][f"{name} seconds"] = max(one[f"{name} seconds"] for one in said)
    for name in columns[1]:
        print(f"{name:22} " + "  ".join(f"{column[name]:14.4f}" for column in columns.values()))
    for name in ("learn", "refresh"):
        one, two = (columns[size][f"{name} seconds"] for size in (1, 2))
        share = columns[2][f"{name} in messages"] / two
        print(f"{name}: two processes are {one / two:.2f} times as fast, {share:.0%} in messages")


if __name__ == "__main__":
    if len(sys.argv) >= 4:
        start(int(sys.argv[-3]), int(sys.argv[-2]), sys.argv[-1], "--cpu" in sys.argv)
    else:
        main()
