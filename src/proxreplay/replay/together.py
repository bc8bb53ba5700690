"""What a learner does with other processes: one batch, one gradient, one state (docs/scale.md)."""

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from proxreplay.distributed import Processes, compare, current, mean_, shared_calls
from proxreplay.distributed.agreement import digests
from proxreplay.errors import InputError
from proxreplay.proximal.rules.base import GradientRule
from proxreplay.replay.joining import joined
from proxreplay.replay.memory import Memory
from proxreplay.replay.saving import state_of
from proxreplay.seeding import seeded

if TYPE_CHECKING:
    from proxreplay.replay.learner import Learner

END = "end"  # said in place of a batch when a stream is over


class Together:
    """The processes of a learner. Alone, nothing here does anything.

    All of them hold the same memory (or parts of it), generators and weights. Each computes a share
    of every joint batch; what they make of it is the same in all.

    Args:
        processes: None for those of torch's default process group, if one is up, each with its own
            share of the stream.
        rule: which is handed the same examples in all of them.
        memory: the same in all of them, whole or in parts.
    """

    def __init__(
        self, processes: Processes | None, rule: GradientRule | None, memory: Memory
    ) -> None:
        self._given = processes
        self._rule = rule
        parts, size = memory.shared_by, self.processes.size
        if parts.size not in (1, size):
            raise InputError(
                f"Learner: {parts.size} processes keep a part of the memory each, but {size} learn "
                "together; give both the same processes."
            )
        self._compared = False
        self._own = slice(None)  # rows of the joint batch that this process was handed
        self._rows = 0  # of the step under way

    @property
    def processes(self) -> Processes:
        """Those that learn together now."""
        now = current() if self._given is None else self._given
        if self._rule is not None:
            self._rule.among(now.holding(replicated=True))
        return now

    def randomness(self, learner: "Learner") -> AbstractContextManager[None]:
        """Seeds what dropout and the like draw from, by the stream batch: no state to keep.

        Each process draws for its own share.
        """
        rank = self.processes.rank
        purpose = f"model/{learner.batches_seen}" + (f"/{rank}" if rank else "")
        return seeded(learner.seed, purpose, learner.placement.device)

    def joint(self, learner: "Learner", x: Any, y: Any, weight: Any = None) -> tuple[Any, Any, Any]:
        """The stream batch of all processes; checks that they mean the same one."""
        processes = self.processes
        if processes.alone:
            return x, y, weight
        if not self._compared:
            compare(processes, "Learner", held(learner))
            _say_about_norms(learner.model, processes)
            self._compared = True
        given = {"x": x, "y": y, "weight": weight}
        self._check_stream(dict(digests(given)) if processes.replicated else None)
        if not processes.replicated:
            x, y, weight, self._own = joined(processes, x, y, weight)
        return x, y, weight

    def ended(self) -> None:
        """Say that the stream is over; refused if it goes on elsewhere."""
        if not self.processes.alone:
            self._check_stream(END)

    def _check_stream(self, mine: Any) -> None:
        said = self.processes.tell(mine, "learn")
        over = [rank for rank, one in enumerate(said) if one == END]
        if 0 < len(over) < len(said):
            raise InputError(
                f"Learner: the stream of process {over[0]} of {len(said)} is over while others go "
                "on; what was learned so far is kept. Give all processes equally many batches."
            )
        other = next((rank for rank, one in enumerate(said) if one != said[0]), None)
        if other is not None:
            raise InputError(
                f"Learner: process {other} of {len(said)} was handed other examples than process "
                "0, but all are to be handed the same (replicated=True); see that their streams "
                "are the same, or use replicated=False for shares."
            )

    def sharing(self, models: Iterable[nn.Module], rows: int) -> AbstractContextManager[None]:
        """Let calls of these models inside be made by all processes, with a share of rows each."""
        self._rows = rows
        return shared_calls(models, self.processes.holding(replicated=True))

    @torch.no_grad()
    def average_(self, model: nn.Module) -> None:
        """Give every process the gradient of the joint batch, and BatchNorm the same statistics.

        Running statistics become the mean over processes, weighted by their examples.
        """
        processes = self.processes
        if processes.alone:
            return
        norms = [m for m in model.modules() if isinstance(m, _NormBase) and m.training]
        held_by = [b for m in norms for b in (m.running_mean, m.running_var) if b is not None]
        weight = processes.shares(self._rows)[processes.rank] / self._rows
        for buffer in held_by:
            buffer.mul_(weight)
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        own = {name: parameter.grad for name, parameter in parameters.items()}
        for name, gradient in mean_(own, parameters, processes, held_by).items():
            parameters[name].grad = gradient

    def check(self, learner: "Learner") -> None:
        """Compare what all processes hold, if that is due."""
        processes = self.processes
        if not processes.alone and learner.batches_seen % processes.check_every == 0:
            compare(processes, f"after {learner.batches_seen} stream batches", held(learner))

    def own(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Of the ids of a joint batch, those of the examples that this process was handed."""
        return ids if self.processes.replicated or self.processes.alone else ids[self._own]


def held(learner: "Learner") -> dict[str, Any]:
    """Everything that decides what happens next; of remembered examples only which they are."""
    memory = {"ids": learner.memory.ids, "classes": learner.memory.class_counts}
    return {**state_of(learner, memory=False), "memory": memory}


def _say_about_norms(model: nn.Module, processes: Processes) -> None:
    """Say once that BatchNorm sees shares only, which one process would not."""
    norms = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
    ]
    if norms and processes.writes:
        warnings.warn(
            f"Learner: {len(norms)} BatchNorm layers ('{norms[0]}', ...) normalise by the share of "
            "each process in training, so the result is not that of one process. On GPUs use "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model); elsewhere GroupNorm, or "
            "BatchNorm in evaluation mode, has no such difference.",
            stacklevel=2,
        )
