"""Averaging the weights over time, for prediction only."""

import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from proxreplay.errors import InputError
from proxreplay.models.heads import GrowingHead


class EMA:
    """An exponential moving average of everything a model holds.

        average <- m average + (1 - m) model            after every SGD step

    for parameters and floating buffers (BatchNorm statistics); integer and bool buffers are copied.
    It starts as a copy of the model. When a `GrowingHead` grows, the average gets the new rows of
    the model. It is for prediction: nothing ever trains it or learns from it.

    Args:
        model: what is trained.
        momentum: ``m``, at least 0 and below 1.

    >>> model = nn.Linear(2, 2)
    >>> ema = EMA(model, momentum=0.9)
    >>> with torch.no_grad():
    ...     _ = model.bias.add_(1.0)
    >>> ema.update_()
    >>> torch.allclose(ema.model.bias, model.bias - 0.9)
    True
    """

    def __init__(self, model: nn.Module, momentum: float = 0.999) -> None:
        if not 0 <= momentum < 1:
            raise InputError(f"EMA: momentum={momentum}; give at least 0 and less than 1.")
        self.momentum = momentum
        self.online = model
        self.model = frozen_copy(model).eval()

    @torch.no_grad()
    def update_(self) -> None:
        """Move the average towards the model; call it after every optimizer step."""
        self.follow_growth_()
        floating: tuple[list[Tensor], list[Tensor]] = ([], [])
        for average, online in zip(_tensors(self.model), _tensors(self.online), strict=True):
            if average.is_floating_point():
                floating[0].append(average)
                floating[1].append(online)
            else:
                average.copy_(online)
        torch._foreach_lerp_(*floating, 1 - self.momentum)

    @torch.no_grad()
    def follow_growth_(self) -> None:
        """Give the average the rows a growing head of the model has got, and its activity."""
        for average, online in zip(self.model.modules(), self.online.modules(), strict=True):
            if isinstance(average, GrowingHead) and isinstance(online, GrowingHead):
                average.grow_like(online)
                average.active.copy_(online.active)

    def state_dict(self) -> dict[str, Any]:
        """The average and its momentum."""
        return {"momentum": self.momentum, "model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved average; the momentum must be the same."""
        if state["momentum"] != self.momentum:
            raise InputError(
                f"EMA: momentum={self.momentum}, but the saved average was made with "
                f"{state['momentum']}; use EMA(model, momentum={state['momentum']})."
            )
        self.model.load_state_dict(state["model"])


def frozen_copy(model: nn.Module) -> nn.Module:
    """A copy that has no gradients and asks for none."""
    duplicate = copy.deepcopy(model)
    duplicate.zero_grad(set_to_none=True)
    return duplicate.requires_grad_(False)


def _tensors(model: nn.Module) -> chain[Tensor]:
    return chain(model.parameters(), model.buffers())
