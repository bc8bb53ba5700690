"""What a learner is made of, checked when it is made; and what it gives back."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from proxreplay.errors import InputError
from proxreplay.options import LearnerOptions
from proxreplay.proximal.rules.base import GradientRule
from proxreplay.replay.averaging import EMA
from proxreplay.replay.losses import Loss, needs_of

if TYPE_CHECKING:
    from proxreplay.replay.learner import Learner

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Learned:
    """What `Learner.learn` did; ``float(learned)`` is the loss.

    Args:
        loss: mean over the steps; NaN if the batch was only remembered.
        refreshed: how many examples the rule was refreshed from; None if it was not refreshed.
    """

    loss: float
    refreshed: int | None = None

    def __float__(self) -> float:
        return self.loss


class Observer(Protocol):
    """Looks at the steps of a learner and changes nothing about them."""

    def watch(self, learner: "Learner", loss: Loss) -> Loss:
        """Called once, when the learner is complete; returns the loss that each step calls.

        Args:
            learner: whose steps there are to see.
            loss: its loss, or what an observer before this one has returned.
        """


def check_parts(
    model: nn.Module, rule: GradientRule | None, loss: Loss, averaging: EMA | None
) -> None:
    """See that the parts belong together."""
    _check_of_this_model(model, "averaging", None if averaging is None else averaging.online)
    _check_of_this_model(model, "rule", getattr(rule, "model", None))
    if rule is not None and rule.reference_samples is None and needs_of(loss).draws == 0:
        raise InputError(
            f"Learner: {type(rule).__name__} looks at the replayed examples, but the loss "
            "replays none; give a loss that does, such as er."
        )


def make_optimizer(model: nn.Module, lr: float | None, make: OptimizerFactory | None) -> Optimizer:
    """Plain SGD, or what the user makes of the parameters."""
    if make is None:
        return torch.optim.SGD(model.parameters(), lr=LearnerOptions.lr if lr is None else lr)
    if lr is not None:
        raise InputError(
            f"Learner: lr={lr} and an optimizer, which has a learning rate of its own; give one of "
            "the two."
        )
    return make(model.parameters())


def _check_of_this_model(model: nn.Module, part: str, its_model: nn.Module | None) -> None:
    """A part made for another model would do nothing, without a word."""
    if its_model is None:
        return
    if {id(p) for p in its_model.parameters()} != {id(p) for p in model.parameters()}:
        raise InputError(
            f"Learner: the {part} was made for another model; make it for the one handed in."
        )
