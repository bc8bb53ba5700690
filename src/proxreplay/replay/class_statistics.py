"""Statistics of classes, and the linear heads that follow from them in closed form."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from proxreplay.models.random_features import RandomFeatures
from proxreplay.options import FloorOptions

Rows = tuple[Tensor, Tensor]  # weight [classes, d] and bias [classes]
TOGETHER = 256  # rows that are added to a scatter at once: one by one, it is read and written often


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
        self.counts = grown(self.counts, size) + torch.bincount(labels.cpu(), minlength=size)

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
        self.sums = grown(self.sums.reshape(-1, z.shape[1]), size).index_add(0, y, z)
        self.counts = grown(self.counts, size) + torch.bincount(y, minlength=size)

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
        self.squares = torch.zeros(0, dtype=torch.float64)  # sums of squared weights
        self._scatter = torch.zeros(0, 0, dtype=torch.float64)
        self._recent = torch.zeros(0, 0, dtype=torch.float64)  # rows that are not in it yet

    def features(self, shape: Sequence[int]) -> nn.Module:
        """Random convolutional ones."""
        return RandomFeatures(shape, self.options.filters)

    def observe_(self, features: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Move the means; the scatter around them stays exact.

        For a class with n examples of mean m so far and k new ones of mean b:
        ``S += sum (z - b)(z - b)' + n k / (n + k) (b - m)(b - m)'``. ``weights [n]``, all above 0,
        say how much each example counts.
        """
        z, y = features.double().cpu(), labels.cpu()
        w = z.new_ones(len(y)) if weights is None else weights.double().cpu()
        size, d = max(len(self.counts), int(y.max()) + 1), z.shape[1]
        means, counts = grown(self.means.reshape(-1, d), size), grown(self.counts, size)
        present, own = y.unique(return_inverse=True)
        n, k = counts[present], z.new_zeros(len(present)).index_add(0, own, w)
        sums = z.new_zeros(len(present), d).index_add(0, own, z * w[:, None])
        centres = sums / k[:, None]
        moved = centres - means[present]
        within = (z - centres[own]) * w.sqrt()[:, None]
        between = (moved * (n * k / (n + k)).sqrt()[:, None])[n > 0]
        self._recent = torch.cat([self._recent.reshape(-1, d), within, between])
        if len(self._recent) >= TOGETHER:
            self.fold_()
        self.means = means.index_add(0, present, moved * (k / (n + k))[:, None])
        self.counts = counts.index_add(0, present, k)
        self.squares = grown(self.squares, size).index_add(0, y, w * w)

    @property
    def examples(self) -> Tensor:
        """Of each class, ``(sum w)^2 / sum w^2``: so many of equal weight tell as much."""
        return (self.counts.square() / self.squares).nan_to_num(0.0)

    def state_dict(self) -> dict[str, Tensor]:
        """Means, counts, the scatter and what is to be added to it."""
        own = {"means": self.means, "counts": self.counts, "squares": self.squares}
        return {**own, "scatter": self._scatter, "recent": self._recent}

    def load_state_dict_(self, state: dict[str, Tensor]) -> None:
        """Go on from there; earlier versions added every row at once, and kept no squares."""
        self.means, self.counts, self._scatter = (state[k] for k in ("means", "counts", "scatter"))
        self._recent = state.get("recent", self._scatter[:0])
        self.squares = state.get("squares", self.counts)  # as of weights that are all 1

    @property
    def scatter(self) -> Tensor:
        """Of all examples around the means of their classes, ``[d, d]``."""
        recent = self._recent
        if self._scatter.numel() == 0:
            return recent.T @ recent
        return torch.addmm(self._scatter, recent.T, recent)

    def fold_(self) -> None:
        """Add the rows of the last examples to the scatter, and keep them no longer."""
        self._scatter, self._recent = self.scatter, self._recent[:0].clone()  # a view keeps all

    def forget_(self, label: int) -> None:
        """Leave a class out from here on.

        What it has brought to the scatter is not known by itself, so that is made smaller in
        proportion: the covariance stays as it is.
        """
        if label < len(self.counts) and self.counts[label] > 0:
            left = 1 - self.counts[label] / self.counts.sum()
            self._scatter, self._recent = self.scatter * left, self._recent[:0].clone()
            kept = (self.means.clone(), self.counts.clone(), self.squares.clone())
            for tensor in kept:
                tensor[label] = 0
            self.means, self.counts, self.squares = kept

    def covariance(self) -> Tensor:
        """Within classes, shrunk towards a multiple of the identity, ``[d, d]``."""
        d, s = self.means.shape[1], self.options.shrinkage
        covariance = self.scatter / self.counts.sum()
        shrunk = covariance * (1 - s)
        shrunk.diagonal().add_((s * covariance.trace() / d).clamp_min(1e-12))
        return shrunk

    def rows(self) -> Rows:
        """The linear discriminants."""
        centre = self.means[self.counts > 0].mean(dim=0)
        factor = torch.linalg.cholesky(self.covariance())
        solved = torch.cholesky_solve(torch.vstack([self.means, centre]).T, factor).T
        lengths = (solved * torch.vstack([self.means, centre])).sum(dim=1)
        return solved[:-1] - solved[-1], -(lengths[:-1] - lengths[-1]) / 2


def grown(rows: Tensor, size: int) -> Tensor:
    """With rows of zeros at the end, ``size`` in all."""
    return torch.cat([rows, rows.new_zeros(size - len(rows), *rows.shape[1:])])
