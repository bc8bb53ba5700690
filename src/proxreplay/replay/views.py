"""What a step works on: batches as the model sees them, and what the loss asks for beside them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from proxreplay.batch import Batch, Inputs, merged
from proxreplay.proximal.layers.calling import Caller, logits_of, logits_without_trace
from proxreplay.proximal.layers.capture import as_written
from proxreplay.replay.averaging import EMA, frozen_copy
from proxreplay.replay.losses import Needs
from proxreplay.replay.memory import Memory
from proxreplay.seeding import generator

PURPOSES = (
    *("memory", "head", "incoming-view", "replay", "replay-view"),
    *("reference", "reference-view", "refresh", "refresh-view"),
)
See = Callable[[Inputs, torch.Generator | None], Inputs]


class Views:
    """Draws from a memory and shows batches to a model: ``see`` augments with a generator."""

    def __init__(self, memory: Memory, see: See, device: torch.device, seed: int) -> None:
        self.memory = memory
        self.see = see
        self.device = device
        self.generators = {purpose: generator(seed, purpose) for purpose in PURPOSES}

    def of(self, batch: Batch, purpose: str) -> Batch:
        """A batch as the model sees it, newly augmented."""
        return Batch(
            self.see(batch.inputs, self.generators[f"{purpose}-view"]),
            batch.labels.to(self.device),
            {name: tensor.to(self.device) for name, tensor in batch.extras.items()},
        )

    def draw(self, n: int, purpose: str, times: int = 1) -> Batch | None:
        """Independent draws of ``n`` remembered examples, one after the other in one batch."""
        if len(self.memory) == 0 or n == 0 or times == 0:
            return None
        rng = self.generators[purpose]
        return Batch.joined([self.of(self.memory.sample(n, rng), purpose) for _ in range(times)])

    def to_refresh(self, n: int | None, *, augment: bool) -> Inputs:
        """Inputs of ``n`` remembered examples (all for None) for a refresh."""
        stored = self.memory.inputs(n, self.generators["refresh"])
        return self.see(stored, self.generators["refresh-view"] if augment else None)


@dataclass(eq=False)
class Provider:
    """Gives a loss what it asks for beside the batches (`Needs`): stored logits, a teacher."""

    model: nn.Module
    needs: Needs
    averaging: EMA | None = None
    call: Caller | None = None
    teacher: nn.Module | None = None

    def __post_init__(self) -> None:
        if self.needs.teacher_every is not None:
            self.take_snapshot()

    @property
    def models(self) -> list[nn.Module]:
        """All that a step may call."""
        average = None if self.averaging is None else self.averaging.model
        return [model for model in (self.model, self.teacher, average) if model is not None]

    def replay(self, views: Views, n: int) -> Batch | None:
        """As many draws of ``n`` remembered examples as the loss asks for."""
        replay = views.draw(n, "replay", times=self.needs.draws)
        if replay is None or self.teacher is None:
            return replay
        with torch.no_grad():
            logits = logits_of(self.teacher, replay.inputs, self.call)
            return replay.with_extras(teacher=logits)

    @torch.no_grad()
    def taught(self, batch: Batch, replay: Batch | None) -> tuple[Batch, Batch | None]:
        """Both batches with what the average says about those that the loss asks for."""
        if self.needs.average is None or self.averaging is None:
            return batch, replay
        wanted = [batch] if self.needs.average == "all" else []
        wanted += [] if replay is None else [replay]
        if not wanted:
            return batch, replay
        inputs = merged([b.inputs for b in wanted])
        logits = logits_of(self.averaging.model, inputs, self.call)
        if replay is not None:
            replay = replay.with_extras(average=logits[-len(replay) :])
        if self.needs.average == "all":
            batch = batch.with_extras(average=logits[: len(batch)])
        return batch, replay

    @torch.no_grad()
    def with_logits(self, incoming: Batch, view: Batch) -> Batch:
        """The batch with what the model says about its view, without a trace in its buffers."""
        if not self.needs.stored_logits:
            return incoming
        with as_written():
            logits = logits_without_trace(self.model, view.inputs, self.call)
        return incoming.with_extras(logits=logits)

    def after_batch(self, number: int) -> None:
        """Take a snapshot if one is due after stream batch ``number``."""
        every = self.needs.teacher_every
        if every is not None and number % every == 0:
            self.take_snapshot()

    def take_snapshot(self) -> nn.Module:
        """Make the model as it is now the teacher."""
        self.teacher = frozen_copy(self.model).train()
        return self.teacher
