"""What a learner does about a batch beside learning: checks it, meets its labels, stores it."""

import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from proxreplay.batch import Batch, part
from proxreplay.models.heads import replace_in_optimizer_
from proxreplay.replay.guard import check_batch_of_one
from proxreplay.replay.inputs import InputKind
from proxreplay.replay.intake import Admitted
from proxreplay.replay.losses import SEPARATE, Loss
from proxreplay.replay.memory import Memory
from proxreplay.replay.parts import Learned
from proxreplay.replay.predicting import Predictor
from proxreplay.replay.together import Together
from proxreplay.replay.views import Provider, Views

if TYPE_CHECKING:
    from proxreplay.replay.learner import Learner


class Admitting(Predictor):
    """The part of a `Learner` that lets batches in, meets their labels and stores them."""

    memory: Memory
    loss: Loss
    optimizer: Optimizer
    views: Views
    provider: Provider
    together: Together
    replay_batch: int
    batches_seen: int

    def _admit(self, x: Any, y: Any, sample_weight: Any = None) -> Admitted:
        """Check a batch; if all of it is good, get ready for what is new in it."""
        admitted = self.intake.admit(x, y, self._try_out, self._check, sample_weight)
        if len(admitted.batch) > 0:
            self._meet(admitted.batch.labels)
        return admitted

    def _check(self, batch: Batch) -> None:
        """Refuse one example that BatchNorm would see alone, and what a companion cannot take."""
        if self.companion is not None:
            self.companion.check(self._see(part(batch.inputs, slice(1))))
        joined = 0 if isinstance(self.loss, SEPARATE) else min(self.replay_batch, len(self.memory))
        alone = 1 in self.together.processes.shares(len(batch) + joined)
        if alone and (batch.train or self.provider.needs.stored_logits):
            check_batch_of_one(self.model, self._see(part(batch.inputs, slice(1))), self.call)

    def _meet(self, indices: Tensor) -> None:
        """Grow the head for labels that are new."""
        for head in self.heads:
            before = list(head.parameters())
            if head.grow(int(indices.max()) + 1, self.views.generators["head"]):
                replace_in_optimizer_(self.optimizer, before, list(head.parameters()))
            head.activate(indices)
        if self.averaging is not None:
            self.averaging.meet_(indices.tolist())

    def _remember(self, admitted: Admitted) -> Learned:
        incoming = admitted.batch
        if len(incoming) == 0:
            return Learned(math.nan, admitted.ids(incoming.labels))
        if self.provider.needs.stored_logits:
            self.model.train()
            with self.together.randomness(cast("Learner", self)):
                incoming = self.provider.with_logits(incoming, self.views.of(incoming, "incoming"))
        return Learned(math.nan, self.together.own(admitted.ids(self._store(incoming))))

    def _store(self, incoming: Batch) -> Tensor:
        self._show_companion(incoming)
        ids = self.memory.add(incoming, self.views.generators["memory"])
        self.provider.after_batch(self.batches_seen)
        self.batches_seen += 1
        return ids

    def _show_companion(self, batch: Batch) -> None:
        if self.companion is not None:
            seen = cast(Tensor, self._see(batch.inputs))
            self.companion.observe_(seen, batch.labels, batch.weight)

    def _meet_memory(self) -> None:
        """Get ready for what a memory holds that was filled before."""
        if len(self.memory) == 0:
            return
        one = self.memory.inputs(1, torch.Generator())
        if self.companion is not None:
            self.companion.check(self._see(one))
        self.intake.kind = InputKind.of(one)
        labels = torch.tensor(list(self.memory.class_counts))
        self.intake.check_reach(labels)
        _, self.intake.labels = self.intake.labels.meet(labels)
        self._meet(labels)
        for batch in self.memory.batches():
            self._show_companion(batch)
