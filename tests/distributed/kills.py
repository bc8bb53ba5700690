"""Two processes make a run and one of them is killed; the run is resumed and compared.

``python -m tests.distributed.kills FOLDER KILLS [METHOD]`` prints what happened as JSON. The
processes are forked from one that has imported everything, so that a start takes no time. Each
keeps a part of the memory.
"""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist

from proxreplay.experiments.configure import configure
from proxreplay.experiments.interrupt import stop_on_signals
from proxreplay.experiments.run import Interrupted, RunOptions, RunProgress, run

SETTINGS = {
    **{"steps_per_batch": 1, "eval_every": 4, "refresh.every": 2, "capacity": 20},
    **{"stream.first": 2, "stream.limit": 100, "batch_size": 10},
    **{"sharded": True},
}
METHOD = sys.argv[3] if __name__ == "__main__" and len(sys.argv) == 4 else "lpr-der"
FORK = multiprocessing.get_context("fork")
PATIENCE = 200  # seconds that a survivor may take on a busy machine


@dataclass(frozen=True)
class Blow:
    """What happens to a process: a signal, some time after so many stream batches."""

    rank: int
    position: int
    number: int = signal.SIGKILL
    delay: float = 0.0

    def __call__(self, progress: RunProgress) -> None:
        if progress.position == self.position and self.number != signal.SIGKILL:
            os.kill(os.getpid(), self.number)
        elif progress.position == self.position:
            Timer(self.delay, os.kill, (os.getpid(), self.number)).start()
        elif progress.position == self.position + 3 and self.number == signal.SIGKILL:
            time.sleep(PATIENCE)  # until the blow comes: the run does not end before


def work(folder: Path, rank: int, size: int, store: Path, every: int, blow: Blow | None) -> None:
    sys.stdout = sys.stderr = (folder.parent / f"{store.stem}-{rank}.txt").open("w", buffering=1)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=PATIENCE)
    where = f"file://{store}"
    if size > 1:
        dist.init_process_group("gloo", where, timeout, world_size=size, rank=rank)
    config = configure("split-digits", METHOD, SETTINGS, {})
    with stop_on_signals() as stop:
        try:
            on_progress = blow if blow is not None and blow.rank == rank else lambda progress: None
            run(
                config,
                folder,
                RunOptions(checkpoint_every=every),
                stop=stop,
                on_progress=on_progress,
            )
        except Interrupted:
            sys.exit(stop.exit_code or 143)


def start(
    folder: Path, name: str, size: int = 2, every: int = 2, blow: Blow | None = None
) -> list[Any]:
    store = folder.parent / f"{name}.store"
    workers = [
        FORK.Process(target=work, args=(folder, rank, size, store, every, blow))
        for rank in range(size)
    ]
    for worker in workers:
        worker.start()
    return workers


def finish(workers: list[Any]) -> list[int | None]:
    for worker in workers:
        worker.join(PATIENCE)
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    return codes


def contents(folder: Path) -> dict[str, str]:
    names = ("config.yaml", "records.jsonl", "result.json")
    return {n: (folder / n).read_text() if (folder / n).exists() else "missing" for n in names}


def kill_and_resume(root: Path, number: int, whole: dict[str, str]) -> Any:
    rng = random.Random(number)
    folder, victim, position = root / f"killed-{number}", rng.randrange(2), rng.randrange(1, 17)
    blow = Blow(victim, position, delay=rng.uniform(0, 0.2))
    workers = start(folder, f"kill-{number}", blow=blow)
    workers[victim].join(PATIENCE)
    since = time.monotonic()
    codes = finish(workers)
    took = time.monotonic() - since
    said = (root / f"kill-{number}-{1 - victim}.txt").read_text()
    checkpoints = len(list((folder / "checkpoint").glob("*")))
    resumed = finish(start(folder, f"resume-{number}"))
    return {
        "victim": victim,
        "moment": [position, round(blow.delay, 3)],
        "codes": codes,
        "survivor_seconds": round(took, 2),
        "said": said.strip().splitlines()[-1:] and said.strip().splitlines()[-1],
        "checkpoints": checkpoints,
        "resumed": resumed,
        "same": contents(folder) == whole,
    }


def stop_and_resume_alone(root: Path) -> Any:
    """A request to stop reaches one process; all save and stop. One process goes on."""
    folder = root / "stopped"
    codes = finish(start(folder, "stop", every=1000, blow=Blow(1, 7, signal.SIGTERM)))
    saved = len(list((folder / "checkpoint").glob("*")))
    alone = finish(start(folder, "alone", size=1))
    lines = contents(folder)["records.jsonl"].splitlines()
    return {"codes": codes, "saved": saved, "alone": alone, "lines": len(lines)}


def main() -> None:
    root, kills = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    short = {**SETTINGS, "stream.first": 1, "stream.limit": 20}
    run(configure("split-digits", METHOD, short, {}), root / "first")  # imports everything
    codes = finish(start(root / "whole", "whole"))
    whole = contents(root / "whole")
    found = [kill_and_resume(root, number, whole) for number in range(kills)]
    stopped = stop_and_resume_alone(root)
    lines = len(whole["records.jsonl"].splitlines())
    print(json.dumps({"whole": codes, "lines": lines, "kills": found, "stopped": stopped}))


if __name__ == "__main__":
    main()
