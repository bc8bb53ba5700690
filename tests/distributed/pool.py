"""Processes with a gloo group between them, started once for many checks."""

import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

IMPORTED = ["torch.distributed", "proxreplay.proximal", "proxreplay.experiments.run"]  # only once


class Pool:
    """Calls functions of test modules in all of its processes at once."""

    def __init__(self, size: int, store: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self.pipes, self.workers = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, size, store)
            worker = context.Process(target=_work, args=arguments, daemon=True)
            worker.start()
            theirs.close()
            self.pipes.append(ours)
            self.workers.append(worker)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returns in every process; a failure in one is raised here."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers = [pipe.recv() for pipe in self.pipes]
        problems = [text for fine, text in answers if not fine]
        assert not problems, "\n".join(problems)
        return [value for _, value in answers]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for worker in self.workers:
            worker.join(timeout=20)
            if worker.is_alive():
                worker.kill()
                worker.join()


@contextmanager
def pool(size: int) -> Iterator[Pool]:
    with tempfile.TemporaryDirectory() as folder:
        started = Pool(size, Path(folder) / "store")
        try:
            yield started
        finally:
            started.close()


def _work(pipe: Any, rank: int, size: int, store: Path) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, function(*arguments)))
        except Exception:
            pipe.send((False, f"process {rank}: {traceback.format_exc()}"))
    dist.destroy_process_group()


def problem_of(action: Callable[[], Any]) -> str:
    """The error that an action ends with, as ``Type: message``; it must end with one of ours."""
    from proxreplay.errors import ProxreplayError

    try:
        action()
    except ProxreplayError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")
