"""A companion of the network: streaming LDA on random features, which cannot forget.

    log p(c | x) = log p_networks(c | x) + w a log p_companion(c | x),  normalised

See docs/companion.md for what it is worth.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from proxreplay.batch import Inputs
from proxreplay.errors import InputError
from proxreplay.models.random_features import POOLED, RandomFeatures
from proxreplay.options import CompanionOptions
from proxreplay.replay.class_statistics import TOGETHER, SharedCovariance, grown
from proxreplay.seeding import seeded

STRENGTHS = (0.0, *(2.0 ** (k / 2) for k in range(-10, 2)))  # a: how far its word is taken
PER_INPUT = 4  # features at most, for each number of an input
GROWTH = 1.1  # examples, in those of the last inverse, after which the next one is made
ENOUGH = 10  # examples of a class, before its further ones are used for judging
WORST = 3.0  # of a loss, in those of guessing: one grave error outweighs no more than that
RATE = 0.01  # of a batch in the moving averages of losses
LARGEST = 1e15  # number or weight: what is beyond counts as that, and squares stay finite
KEPT = ("weight", "bias", "_inverse", "_centre", "_inverted_at", "losses", "judged")  # when saved


class Companion:
    """Class means and one covariance of random features; every example is looked at once.

    How far its word is taken, ``a``, is the number among `STRENGTHS` that would have predicted the
    labels of the stream best lately, each before the companion saw it. 0 is among them: where it
    does not help, it gets out of the way. Examples of classes with fewer than 10 so far are not
    judged.

    The covariance is inverted again when there are 10 % more examples; the rows of the classes that
    a batch brings are made anew with every batch. Tensors are replaced, never changed in place.

    Args:
        options: its weight ``w`` and what it is made of.
        seed: of the random features, which are drawn when the first batch tells the shape.
    """

    def __init__(self, options: CompanionOptions, seed: int = 0) -> None:
        self.options = options
        self.seed = seed
        self.statistic = SharedCovariance(options)
        self.features: RandomFeatures | None = None
        self.shape: tuple[int, ...] | None = None  # of one input
        self.known = torch.zeros(0, dtype=torch.int64)  # indices of the classes that have come
        self.weight = torch.zeros(0, 0)  # [classes, d]
        self.bias = torch.zeros(0)
        self.losses = torch.zeros(len(STRENGTHS), dtype=torch.float64)  # in those of guessing
        self.judged = 0  # batches that `losses` are of
        self._inverse = torch.zeros(0, 0)  # of the covariance
        self._centre = torch.zeros(0, dtype=torch.float64)
        self._inverted_at = 0.0  # examples

    def __repr__(self) -> str:
        known, d = len(self.known), self.weight.shape[1]
        return (
            f"LDA of {known} classes on {d} random features, taken to the power {self.strength:.2g}"
        )

    @property
    def strength(self) -> float:
        """``a``, from 0 (nothing is known in its favour) on."""
        return STRENGTHS[int(self.losses.argmin())] if self.judged else 0.0

    def check(self, inputs: Inputs) -> None:
        """Refuse inputs, as the model sees them, that have no random features."""
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            found = str(inputs.dtype) if isinstance(inputs, Tensor) else type(inputs).__name__
            raise InputError(
                f"Learner: a companion looks at images or vectors of floating-point numbers, but "
                f"the inputs are {found}; leave it out (companion=None, or companion.weight=0)."
            )

    @torch.no_grad()
    def observe_(self, inputs: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Judge itself by examples, and take them in.

        Args:
            inputs: ``[n, ...]``, as the model sees them.
            labels: ``[n]``, indices of outputs.
            weights: how much each example counts, ``[n]``; None for all the same.
        """
        if self.features is None:
            self._draw_(tuple(inputs.shape[1:]), inputs)
        z = self._seen(inputs)
        self._judge_(z, labels.to(z.device))
        counted = None if weights is None else weights.clamp_max(LARGEST)
        self.statistic.observe_(z, labels, counted)
        self._follow_(labels.cpu().unique())

    @torch.no_grad()
    def logits(self, inputs: Tensor, outputs: int) -> Tensor:
        """Logarithms of probabilities, ``[n, outputs]``, at least in single precision.

        It is neutral about unknown classes, and about inputs too large for it.
        """
        known, dtype = self.known, _precise(inputs.dtype)
        if len(known) == 0:
            return torch.zeros(len(inputs), outputs, dtype=dtype, device=inputs.device)
        own = self._scores(self._seen(inputs)).log_softmax(dim=1)
        neutral = own.new_full((len(inputs), outputs), -math.log(len(known)))
        own = own.where(own.isfinite().all(dim=1, keepdim=True), neutral[:, :1])
        return neutral.index_copy(1, known.to(own.device), own).to(dtype)

    def joined(self, networks: Tensor, own: Tensor) -> Tensor:
        """Logarithms of the probabilities of both; logits ``[n, outputs]`` of each are given."""
        joint = networks.log_softmax(dim=1) + self.options.weight * self.strength * own
        return joint.log_softmax(dim=1)

    def forget_(self, label: int) -> None:
        """Know nothing of a class any more."""
        self.statistic.forget_(label)
        self.known = self._met()
        self._inverted_at = min(self._inverted_at, float(self.statistic.counts.sum()))
        self._centre = self.statistic.means[self.known].sum(dim=0) / max(1, len(self.known))
        self.weight, self.bias = torch.zeros_like(self.weight), torch.zeros_like(self.bias)
        if len(self.known):
            self._follow_(self.known)

    def _draw_(self, shape: Sequence[int], like: Tensor) -> None:
        filters = math.ceil(PER_INPUT * math.prod(shape) / POOLED**2)
        with seeded(self.seed, "companion"):
            drawn = RandomFeatures(shape, min(self.options.filters, filters))
        self.features, self.shape = drawn.to(like.device, _precise(like.dtype)), tuple(shape)

    def _seen(self, inputs: Tensor) -> Tensor:
        """Features ``[n, d]``."""
        assert self.features is not None
        features = self.features.to(inputs.device)
        numbers = inputs.to(features.weight).nan_to_num(0.0).clamp(-LARGEST, LARGEST)
        z: Tensor = features(numbers)
        return z

    def _met(self) -> Tensor:
        return self.statistic.counts.nonzero().flatten()

    def _scores(self, z: Tensor) -> Tensor:
        known = self.known.to(self.weight.device)
        return F.linear(z, self.weight[known].to(z), self.bias[known].to(z))

    def _judge_(self, z: Tensor, labels: Tensor) -> None:
        """Take in how well each strength predicts examples that have not been observed."""
        known, examples = self.known, self.statistic.examples.to(z.device)
        enough = labels < len(examples)
        enough[enough.clone()] &= examples[labels[enough]] >= ENOUGH
        if len(known) < 2 or not bool(enough.any()):
            return
        scores = self._scores(z[enough]).double()
        column = torch.searchsorted(known.to(z.device), labels[enough])
        guessing = math.log(len(known))
        losses = torch.stack(
            [F.cross_entropy(a * scores, column, reduction="none") for a in STRENGTHS]
        )
        new = (losses / guessing).clamp_max(WORST).mean(dim=1).cpu()
        if bool(new.isfinite().all()):
            self.judged += 1
            self.losses = self.losses + max(RATE, 1 / self.judged) * (new - self.losses)

    def _follow_(self, changed: Tensor) -> None:
        """Make the rows of classes anew: of those that changed, or of all with a new inverse."""
        statistic, total = self.statistic, float(self.statistic.counts.sum())
        self.known = self._met()
        if total >= GROWTH * self._inverted_at:
            factor = torch.linalg.cholesky(statistic.covariance())
            self._inverse = torch.cholesky_inverse(factor).float()
            self._centre = statistic.means[self.known].mean(dim=0)
            self._inverted_at, changed = total, self.known
        size, d = statistic.means.shape
        weight, bias = grown(self.weight.reshape(-1, d), size), grown(self.bias, size)
        apart, both = (statistic.means[changed] + s * self._centre for s in (-1, 1))
        rows = apart.float() @ self._inverse
        weight[changed] = rows
        bias[changed] = -(rows.double() * both).sum(dim=1).float() / 2
        self.weight, self.bias = weight, bias

    def nbytes(self, classes: int) -> int:
        """What it holds at most with so many classes, once a batch has told the shape."""
        d = self.weight.shape[1]
        of_classes = (d + 2) * 8 + (d + 1) * 4 + 8  # means and sums; rows and bias; known
        shared = d * d * (8 + 4) + (TOGETHER - 1) * d * 8 + d * 8  # scatter and inverse; rows; mean
        filters = 0 if self.features is None else self.features.weight.nbytes
        return classes * of_classes + shared + filters + self.losses.nbytes

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what it says next."""
        features = {} if self.features is None else {"features": self.features.weight.detach()}
        return {
            "options": {k: getattr(self.options, k) for k in ("filters", "shrinkage", "weight")},
            "shape": None if self.shape is None else list(self.shape),
            **features,
            **{f"statistic.{k}": v for k, v in self.statistic.state_dict().items()},
            **{name.removeprefix("_"): getattr(self, name) for name in KEPT},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.features = self.shape = None
        if state["shape"] is not None:
            self._draw_(state["shape"], state["features"])
            assert self.features is not None
            self.features.load_state_dict({"weight": state["features"]})
        own = {k.removeprefix("statistic."): v for k, v in state.items() if "statistic." in k}
        self.statistic.load_state_dict_(own)
        self.known = self._met()
        for name in KEPT:
            setattr(self, name, state[name.removeprefix("_")])


def _precise(dtype: torch.dtype) -> torch.dtype:
    """Features are not computed in half precision."""
    return torch.float64 if dtype == torch.float64 else torch.float32
