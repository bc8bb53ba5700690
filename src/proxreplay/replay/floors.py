"""Floors: classifiers that learn no weights, for judging what a method's training is worth.

Each is fixed features and a linear head whose rows follow in closed form from a statistic of the
stream or of the memory.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proxreplay.batch import Batch
from proxreplay.models.heads import GrowingHead
from proxreplay.replay.class_statistics import Statistic
from proxreplay.replay.memory import Memory
from proxreplay.replay.parts import Learned
from proxreplay.replay.predicting import Predictor, Transform, changing, locked
from proxreplay.seeding import generator
from proxreplay.serialization import save_state


class Floor(Predictor):
    """Learns from a stream like a `Learner`, but takes no gradient step.

    Inputs ``[n, *shape]`` are never augmented. A batch that is only to be remembered goes to the
    memory alone. Features are computed on ``device``; the statistic is kept on the CPU.
    """

    rule = None

    def __init__(
        self,
        statistic: Statistic,
        memory: Memory,
        shape: Sequence[int],
        transform: Transform | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        features = statistic.features(shape)
        width = getattr(features, "features", math.prod(shape))
        model = nn.Sequential(features, GrowingHead(width)).requires_grad_(False)
        super().__init__(model, None, transform, device, channels_last=False)
        self.statistic, self.memory, self._features = statistic, memory, features
        self.batches_seen = 0
        self._fresh = statistic.state_dict()
        self._generator, self._head_rows = generator(seed, "memory"), generator(seed, "head")
        self._stale = False

    @changing
    @torch.no_grad()
    def learn(self, x: Any, y: Any = None) -> Learned:
        """Take in one stream batch; there is no loss."""
        incoming = self.intake.admit(x, y, self._try_out).batch
        (head,) = self.heads
        head.grow(int(incoming.labels.max()) + 1, self._head_rows)
        head.activate(incoming.labels)
        if incoming.train and not self.statistic.from_memory:
            self._observe(incoming)
        ids = self.memory.add(incoming, self._generator)
        self.batches_seen += 1
        self._stale = True
        return Learned(math.nan, tuple(ids.tolist()))

    def _observe(self, batch: Batch) -> None:
        self.statistic.observe_(self._features(self._see(batch.inputs)), batch.labels)

    @torch.no_grad()
    def _logits(self, model: nn.Module, x: Any, batch_size: int | None) -> Tensor:
        """As of now: the head is made anew if something came since."""
        if self._stale:
            if self.statistic.from_memory:
                self.statistic.load_state_dict_(self._fresh)
                for batch in self.memory.batches():
                    self._observe(batch)
            weight, bias = self.statistic.rows()
            (head,) = self.heads
            head.weight[: len(weight)] = weight.to(head.weight)
            head.bias[: len(bias)] = bias.to(head.bias)
            self._stale = False
        return super()._logits(model, x, batch_size)

    @locked
    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what happens next, a part each."""
        own = {
            "batches_seen": self.batches_seen,
            "generator": self._generator.get_state(),
            **self.intake.state_dict(),
        }
        kept = {} if self.statistic.from_memory else self.statistic.state_dict()
        parts = {"model": self.model.state_dict(), "memory": self.memory.state_dict()}
        return {"learner": own, "statistic": kept, **parts}

    @changing
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where a floor made in the same way was saved."""
        self.model.load_state_dict(state["model"])
        self.memory.load_state_dict(state["memory"])
        self.statistic.load_state_dict_(state["statistic"])
        own = state["learner"]
        self.batches_seen = own["batches_seen"]
        self._generator.set_state(own["generator"])
        self.intake.load_state_dict(own)
        self._stale = self.batches_seen > 0

    def save(self, path: Path | str) -> None:
        """Write the state to a ``.safetensors`` file."""
        save_state(Path(path), self.state_dict())
