"""One run made by several processes, as torchrun starts them; process 0 writes (docs/scale.md)."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import proxreplay
from proxreplay.distributed import Processes
from proxreplay.errors import InputError, ProcessError, first_line
from proxreplay.experiments.config import RunConfig, differences
from proxreplay.experiments.environment import code_digest

TIMEOUT = timedelta(minutes=5)  # for a process that is silent but not gone, which is seen at once


def started_together() -> bool:
    """Whether torchrun, or something like it, has started this process beside others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """A process group between the processes that torchrun started; nothing for one alone.

    On the device of the run: NCCL between GPUs, gloo between CPUs.
    """
    if not started_together() or dist.is_initialized():
        yield
        return
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but no process group could be made "
            f"({first_line(error)}); start with torchrun --nproc-per-node N, or unset it."
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_same_start(processes: Processes, config: RunConfig) -> None:
    """Refuse, in all processes, another code or configuration in one of them."""
    if processes.alone:
        return
    if config.diagnostics.gradients_every is not None:
        raise InputError(
            "diagnostics.gradients_every: not with several processes, where no one has the "
            "gradients of all examples apart; leave it out, or make the run with one."
        )
    versions = {"proxreplay": proxreplay.__version__, "torch": torch.__version__}
    mine: dict[str, Any] = {"versions": versions, "code": code_digest()}
    said = processes.tell({**mine, "config": config.to_dict()})
    for rank, theirs in enumerate(said):
        other = RunConfig("", "").with_values(theirs["config"])
        first = RunConfig("", "").with_values(said[0]["config"])
        found = [*differences(other, first)]
        if theirs["versions"] != said[0]["versions"]:
            found.append(f"{theirs['versions']} instead of {said[0]['versions']}")
        elif theirs["code"] != said[0]["code"]:
            found.append("another source code of proxreplay")
        if found:
            raise ProcessError(
                f"process {rank} of {processes.size} was started with something else than process "
                f"0 ({'; '.join(found)}). Start all with the same command and the same code."
            )


def evaluated_together(
    processes: Processes, logits: Callable[[Tensor], Mapping[str, Tensor]], x: Tensor
) -> Mapping[str, Tensor]:
    """Logits by predictor for all inputs, of which each process has computed a share."""
    if processes.alone:
        return logits(x)
    n = len(x)
    share = x[processes.share(n)]
    mine = dict(logits(share if len(share) else x[:1]))
    own = [one[: len(share)] for one in mine.values()]
    rows = processes.gather(own, processes.shares(n))
    return dict(zip(mine, map(processes.in_order, rows), strict=True))


class NoJournal:
    """The records of a process that does not write."""

    path = Path(os.devnull)

    def check(self, known: Any) -> None:
        """Nothing."""

    def __enter__(self) -> "NoJournal":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def write(self, record: dict[str, Any]) -> None:
        """Nothing."""

    def secure(self) -> dict[str, Any]:
        """Nothing that anybody will read."""
        return {"length": 0, "sha256": ""}
