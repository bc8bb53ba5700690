"""The learner: the paper's Algorithm 1."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from proxreplay.batch import Batch
from proxreplay.errors import InputError
from proxreplay.models.heads import GrowingHead
from proxreplay.proximal.lpr import LPR
from proxreplay.replay.losses import Loss, er
from proxreplay.replay.memory import ClassBalancedMemory
from proxreplay.seeding import generator

Transform = Callable[[Tensor, torch.Generator | None], Tensor]


class Learner:
    """Learns from a stream, a batch at a time, and is ready to predict at every moment.

    Args:
        model: any module from inputs to logits; a `GrowingHead` inside it grows with the labels.
        memory: what is remembered for replay.
        rule: preconditions the gradients, or None for plain SGD.
        loss: the replay loss.
        lr: learning rate of SGD.
        steps_per_batch: SGD steps a stream batch.
        replay_batch: examples replayed a step.
        refresh_every: stream batches between refreshes of the rule.
        refresh_samples: examples of the memory a refresh uses; None for all.
        transform: from stored inputs to what the model sees; a generator switches augmentation on.
        seed: of everything random inside: replay, augmentation, refresh, new rows of the head.

    >>> from proxreplay.models import mlp
    >>> model = mlp(in_features=2)
    >>> learner = Learner(model, rule=LPR(model, omega_0=1.0))
    >>> loss = learner.learn(torch.randn(10, 2), torch.randint(0, 3, (10,)))
    >>> learner.predict(torch.randn(4, 2)).shape
    torch.Size([4])
    """

    def __init__(
        self,
        model: nn.Module,
        memory: ClassBalancedMemory | None = None,
        rule: LPR | None = None,
        *,
        loss: Loss = er,
        lr: float = 0.1,  # eta in the paper
        steps_per_batch: int = 3,  # S in the paper
        replay_batch: int = 10,
        refresh_every: int = 10,  # T in the paper
        refresh_samples: int | None = None,  # n in the paper
        transform: Transform | None = None,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.memory = ClassBalancedMemory(2000) if memory is None else memory
        self.rule = rule
        self.loss = loss
        self.optimizer: Optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        self.steps_per_batch = steps_per_batch
        self.replay_batch = replay_batch
        self.refresh_every = refresh_every
        self.refresh_samples = refresh_samples
        self.transform = transform
        self.batches_seen = 0
        self._heads = [m for m in model.modules() if isinstance(m, GrowingHead)]
        self._rng = {
            purpose: generator(seed, purpose)
            for purpose in ("replay", "memory", "augmentation", "refresh", "refresh-view", "head")
        }

    def learn(self, x: Tensor, y: Tensor) -> float:
        """Learn from one stream batch: S steps, memory update, refresh when due.

        Returns:
            The mean loss over the steps.
        """
        incoming = self._check(x, y)
        self._meet(incoming.labels)
        self.model.train()
        losses = []
        for _ in range(self.steps_per_batch):
            loss = self.loss(self.model, self._view(incoming), self._replay())
            self.optimizer.zero_grad()
            loss.backward()
            if self.rule is not None:
                self.rule.precondition_()
            self.optimizer.step()
            losses.append(loss.detach())
        self.memory.add(incoming, self._rng["memory"])
        self.batches_seen += 1
        if self.rule is not None and self.batches_seen % self.refresh_every == 0:
            self.rule.refresh(self._memorised_inputs())
        return float(torch.stack(losses).mean())

    def remember(self, x: Tensor, y: Tensor) -> None:
        """Put a batch into the memory without learning from it now."""
        incoming = self._check(x, y)
        self._meet(incoming.labels)
        self.memory.add(incoming, self._rng["memory"])

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Logits in evaluation mode, ``[n, classes]``."""
        self.model.eval()
        logits: Tensor = self.model(x if self.transform is None else self.transform(x, None))
        return logits

    def predict(self, x: Tensor) -> Tensor:
        """The most probable label of every input, ``[n]``."""
        return self.logits(x).argmax(dim=1)

    def _replay(self) -> Batch | None:
        if len(self.memory) == 0:
            return None
        return self._view(self.memory.sample(self.replay_batch, self._rng["replay"]))

    def _view(self, batch: Batch) -> Batch:
        if self.transform is None:
            return batch
        return batch.with_inputs(self.transform(batch.inputs, self._rng["augmentation"]))

    def _memorised_inputs(self) -> Tensor:
        inputs = self.memory.inputs(self.refresh_samples, self._rng["refresh"])
        return (
            inputs if self.transform is None else self.transform(inputs, self._rng["refresh-view"])
        )

    def _meet(self, labels: Tensor) -> None:
        """Grow the head for labels that are new."""
        for head in self._heads:
            before = list(head.parameters())
            if head.grow(int(labels.max()) + 1, self._rng["head"]):
                self._replace_parameters_(before, list(head.parameters()))
            head.activate(labels)

    def _replace_parameters_(self, old: list[nn.Parameter], new: list[nn.Parameter]) -> None:
        swap = {id(a): b for a, b in zip(old, new, strict=True)}
        for group in self.optimizer.param_groups:
            group["params"] = [swap.get(id(p), p) for p in group["params"]]

    @staticmethod
    def _check(x: Tensor, y: Tensor) -> Batch:
        if len(x) == 0:
            raise InputError("Learner: an empty batch; give at least one example.")
        if x.is_floating_point() and not torch.isfinite(x).all():
            raise InputError("Learner: inputs hold NaN or infinity; clean them before learning.")
        if y.dtype != torch.int64 or bool((y < 0).any()):
            raise InputError(
                f"Learner: labels of dtype {y.dtype}, smallest {y.min().item()}; "
                "give int64 labels of at least 0."
            )
        return Batch(x, y)
