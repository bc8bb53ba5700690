"""How much of a row's direction OWM and AOP leave free: ``alpha``, and its schedules.

A row ``r`` that is absorbed with ``alpha`` has the strength ``omega = 1 / alpha`` of the proximal
view. The schedules of both methods start at 1 and fall with the progress ``lambda`` of a task or of
the whole stream, which they learn from the number of steps made so far.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from proxreplay.errors import InputError
from proxreplay.options import Count, Fraction, Options, Positive

Alpha = Callable[[nn.Module, Tensor, int], Tensor]
"""From a layer, its rows ``R: [groups, rows, d]`` without the ones of biases, and the number of
steps observed so far, to the alpha of every row, ``[groups, rows]``."""

FLOOR = 1e-8  # rows of nothing but zeros would have an adaptive alpha of 0


@dataclass(frozen=True)
class StreamProgress(Options, prefix="StreamProgress: "):
    """How much of the whole stream is done.

    Args:
        steps: SGD steps in all: stream batches times steps per batch.

    >>> StreamProgress(100)(25)
    0.25
    """

    steps: Count

    def __call__(self, observed: int) -> float:
        """In [0, 1]; 1 for streams that go on for longer."""
        return min(observed / self.steps, 1.0)


@dataclass(frozen=True)
class TaskProgress:
    """How much of the present task is done.

    Args:
        steps: SGD steps per task, one number for all, or one each in their order. Once those are
            over, the last one's length is that of all further tasks.

    >>> [TaskProgress((100, 50))(step) for step in (50, 100, 125)]
    [0.5, 0.0, 0.5]
    """

    steps: int | Sequence[int]

    def __post_init__(self) -> None:
        lengths = self._lengths()
        if not lengths or min(lengths) < 1:
            raise InputError(f"TaskProgress: steps={self.steps}; give at least 1 for every task.")

    def _lengths(self) -> tuple[int, ...]:
        return (self.steps,) if isinstance(self.steps, int) else tuple(self.steps)

    def __call__(self, observed: int) -> float:
        """In [0, 1)."""
        lengths = self._lengths()
        starts = [0, *accumulate(lengths)]
        task = bisect_right(starts, observed) - 1
        if task >= len(lengths):
            return (observed - starts[-1]) % lengths[-1] / lengths[-1]
        return (observed - starts[task]) / lengths[task]


@dataclass(frozen=True)
class ConstantAlpha(Options, prefix="ConstantAlpha: "):
    """The same for every row; very low as the LPR paper describes AOP.

    Args:
        value: greater than 0.
    """

    value: Positive = 1e-3

    def __call__(self, layer: nn.Module, R: Tensor, observed: int) -> Tensor:
        """``value``."""
        return R.new_full(R.shape[:2], self.value)


@dataclass(frozen=True)
class DecayingAlpha(Options, prefix="DecayingAlpha: "):
    """``base ** lambda`` with lambda the progress: OWM's schedule, 1 at first, ``base`` at last.

    Args:
        base: in (0, 1]. The OWM authors have 1e-5 for convolutions; 1e-4, 1e-2 and 0.1 for the
            first, second and third Linear.
        progress: `TaskProgress`, `StreamProgress` or a function of your own.
    """

    base: Fraction
    progress: Callable[[int], float]

    def __call__(self, layer: nn.Module, R: Tensor, observed: int) -> Tensor:
        """``base ** lambda``."""
        return R.new_full(R.shape[:2], self.base ** self.progress(observed))


@dataclass(frozen=True)
class AdaptiveAlpha(Options, prefix="AdaptiveAlpha: "):
    """``(mean(r'r)^2 + Var(r)) ** lambda``: AOP's schedule; ``base ** lambda`` for convolutions.

    The mean is over all entries of the outer product, which is ``mean(r)^2``; the variance is the
    unbiased one over the entries of ``r``.

    Args:
        progress: `TaskProgress` as the AOP authors have it, `StreamProgress` or a function of your
            own; None for ``lambda = 1`` throughout, which needs to know nothing of the stream.
        base: of convolutions.
    """

    progress: Callable[[int], float] | None = None
    base: Fraction = 1e-5

    def __call__(self, layer: nn.Module, R: Tensor, observed: int) -> Tensor:
        """One for every row."""
        progress = 1.0 if self.progress is None else self.progress(observed)
        if isinstance(layer, _ConvNd | _ConvTransposeNd):
            return R.new_full(R.shape[:2], self.base**progress)
        mean_outer = R.mean(dim=2).square()
        variance = torch.var(R, dim=2, correction=min(1, R.shape[2] - 1))
        return (mean_outer.square() + variance).clamp_min(FLOOR) ** progress
