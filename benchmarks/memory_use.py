"""The memory that LPR takes, against what ``plan`` says."""

import gc
from pathlib import Path

from benchmarks.network import forward, images, network
from benchmarks.timing import Claim, main
from proxreplay import LPR


def resident() -> int:
    """Bytes of this process that are in memory; 0 where the system does not say."""
    gc.collect()
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return 1024 * int(line.split()[1])


def run() -> list[Claim]:
    model, x = network(), images(100)
    lpr = LPR(model, 4.0, 2.0)
    plan = lpr.plan(x[:1], samples=2000)
    lpr.refresh(x)  # what torch and the allocator keep for themselves is taken before
    lpr._put_in_force({}, {})
    forward(model, x)
    before = resident()
    lpr.refresh(x)
    grown = resident() - before
    factors = sum(layer.bytes for layer in lpr.layers.values())
    return [
        Claim("bytes of the factors / plan", factors / plan.bytes, "x", 1.1),
        Claim(
            "growth of the process by a refresh / plan (as the system counts)", grown / plan.bytes
        ),
        Claim("megabytes that the plan says", plan.bytes / 1e6, ""),
    ]


if __name__ == "__main__":
    main("Memory use", run)
