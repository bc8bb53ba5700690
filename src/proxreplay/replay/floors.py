"""Floors: classifiers that learn no weights, for judging what a method's training is worth.

Each is fixed features and a linear head whose rows follow in closed form from a statistic of the
stream or of the memory.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proxreplay.batch import Batch
from proxreplay.models.heads import GrowingHead
from proxreplay.models.random_features import RandomFeatures
from proxreplay.options import FloorOptions
from proxreplay.replay.memory import Memory
from proxreplay.replay.parts import Learned
from proxreplay.replay.predicting import Predictor, Transform, changing, locked
from proxreplay.seeding import generator
from proxreplay.serialization import save_state

Rows = tuple[Tensor, Tensor]  # weight [classes, d] and bias [classes]


class Statistic(ABC):
    """What a floor keeps of the examples, and the rows of the head that follow from it."""

    from_memory = False  # whether `rows` follow from remembered examples instead

    def features(self, shape: Sequence[int]) -> nn.Module:
        """From inputs ``[n, *shape]`` to features ``[n, d]``; the inputs themselves by default."""
        return nn.Flatten()

    @abstractmethod
    def observe_(self, features: Tensor, labels: Tensor) -> None:
        """Take in examples: features ``[n, d]`` and labels ``[n]``."""

    @abstractmethod
    def rows(self) -> Rows:
        """The head as of now; rows of classes that never came are arbitrary."""

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that was kept."""
        return {k: v for k, v in vars(self).items() if isinstance(v, Tensor)}

    def load_state_dict_(self, state: dict[str, Tensor]) -> None:
        """Go on from there."""
        vars(self).update(state)


class ClassCounts(Statistic):
    """The most frequent class so far: ``score_c = log(n_c / n)``, whatever the input is."""

    def __init__(self) -> None:
        self.counts = torch.zeros(0, dtype=torch.float64)
        self.width = torch.tensor(0)

    def observe_(self, features: Tensor, labels: Tensor) -> None:
        """Count."""
        self.width = torch.tensor(features.shape[1])
        size = max(len(self.counts), int(labels.max()) + 1)
        self.counts = _grown(self.counts, size) + torch.bincount(labels.cpu(), minlength=size)

    def rows(self) -> Rows:
        """Zero weights and logarithms of frequencies."""
        frequencies = self.counts / self.counts.sum()
        return torch.zeros(len(self.counts), int(self.width)), frequencies.clamp_min(1e-30).log()


class ClassMeans(Statistic):
    """The nearest mean: ``score_c = (m_c . x - |m_c|^2 / 2) / d``.

    It is largest where ``|x - m_c|`` is least; the division by d changes no decision.
    """

    from_memory = True

    def __init__(self) -> None:
        self.sums = torch.zeros(0, 0, dtype=torch.float64)
        self.counts = torch.zeros(0, dtype=torch.float64)

    def observe_(self, features: Tensor, labels: Tensor) -> None:
        """Add up."""
        z, y = features.double().cpu(), labels.cpu()
        size = max(len(self.counts), int(y.max()) + 1)
        self.sums = _grown(self.sums.reshape(-1, z.shape[1]), size).index_add(0, y, z)
        self.counts = _grown(self.counts, size) + torch.bincount(y, minlength=size)

    def rows(self) -> Rows:
        """Means, and half their squared lengths."""
        means = self.sums / self.counts.clamp_min(1)[:, None]
        d = means.shape[1]
        return means / d, -means.square().sum(dim=1) / (2 * d)


class SharedCovariance(Statistic):
    """Streaming LDA (Hayes and Kanan 2020): running class means and one covariance for all.

    ``score_c = (m_c - m)' P z - (m_c' P m_c - m' P m) / 2`` with the mean m of the class means and
    ``P = ((1 - s) C + s tr(C) / d I)^-1`` with the shrinkage s. C is the exact covariance within
    classes of everything observed; all classes have the same prior.
    """

    def __init__(self, options: FloorOptions = FloorOptions()) -> None:  # noqa: B008 (frozen)
        self.options = options
        self.means = torch.zeros(0, 0, dtype=torch.float64)
        self.counts = torch.zeros(0, dtype=torch.float64)
        self.scatter = torch.zeros(0, 0, dtype=torch.float64)

    def features(self, shape: Sequence[int]) -> nn.Module:
        """Random convolutional ones."""
        return RandomFeatures(shape, self.options.filters)

    def observe_(self, features: Tensor, labels: Tensor) -> None:
        """Move the means; the scatter around them stays exact.

        For a class with n examples of mean m so far and k new ones of mean b:
        ``S += sum (z - b)(z - b)' + n k / (n + k) (b - m)(b - m)'``.
        """
        z, y = features.double().cpu(), labels.cpu()
        size, d = max(len(self.counts), int(y.max()) + 1), z.shape[1]
        means, counts = _grown(self.means.reshape(-1, d), size), _grown(self.counts, size)
        scatter = self.scatter if len(self.scatter) else torch.zeros(d, d, dtype=torch.float64)
        new = torch.bincount(y, minlength=size).double()
        centres = torch.zeros_like(means).index_add(0, y, z) / new.clamp_min(1)[:, None]
        within, moved = z - centres[y], centres - means
        between = moved * (counts * new / (counts + new).clamp_min(1)).sqrt()[:, None]
        self.scatter = scatter + within.T @ within + between.T @ between
        self.means = means + moved * (new / (counts + new).clamp_min(1))[:, None]
        self.counts = counts + new

    def rows(self) -> Rows:
        """The linear discriminants."""
        d, s = self.means.shape[1], self.options.shrinkage
        covariance = self.scatter / self.counts.sum()
        shrunk = covariance * (1 - s)
        shrunk.diagonal().add_((s * covariance.trace() / d).clamp_min(1e-12))
        centre = self.means[self.counts > 0].mean(dim=0)
        factor = torch.linalg.cholesky(shrunk)
        solved = torch.cholesky_solve(torch.vstack([self.means, centre]).T, factor).T
        lengths = (solved * torch.vstack([self.means, centre])).sum(dim=1)
        return solved[:-1] - solved[-1], -(lengths[:-1] - lengths[-1]) / 2


def _grown(rows: Tensor, size: int) -> Tensor:
    """With rows of zeros at the end, ``size`` in all."""
    return torch.cat([rows, rows.new_zeros(size - len(rows), *rows.shape[1:])])


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
