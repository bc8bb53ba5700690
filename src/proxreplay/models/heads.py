"""Classifier heads: one that grows with the labels it meets, and the masked logits it gives."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

INACTIVE_LOGIT = -1000.0


class GrowingHead(nn.Linear):
    """A linear classifier that starts with one output and grows with the labels it meets.

    New rows are drawn from ``U(-1/sqrt(in), 1/sqrt(in))``, torch's default for a Linear. Outputs
    whose label has not been learned yet are inactive: their logits are -1000. ``load_state_dict``
    takes the size of what it loads.

    >>> head = GrowingHead(4)
    >>> head.grow(3)
    True
    >>> head.activate(torch.tensor([0, 2]))
    >>> head(torch.zeros(1, 4))[0, 1].item()
    -1000.0
    """

    active: Tensor

    def __init__(self, in_features: int) -> None:
        super().__init__(in_features, 1)
        self.register_buffer("active", torch.zeros(1, dtype=torch.bool))

    treated_as = nn.Linear  # by gradient rules: outputs that are masked pass no gradient

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[n, out_features]``."""
        return super().forward(x).masked_fill(~self.active, INACTIVE_LOGIT)

    def grow(self, size: int, generator: torch.Generator | None = None) -> bool:
        """Grow to at least ``size`` outputs; the rows that exist stay. Says whether it grew.

        The parameters are new objects afterwards: an optimizer must be told.
        """
        new = size - self.out_features
        if new <= 0:
            return False
        bound = 1 / math.sqrt(self.in_features)
        rows = torch.empty(new, self.in_features + 1).uniform_(-bound, bound, generator=generator)
        self._append(rows[:, :-1], rows[:, -1], torch.zeros(new, dtype=torch.bool))
        return True

    def grow_like(self, other: "GrowingHead") -> None:
        """Grow to the size of another head by copying its further rows."""
        old = self.out_features
        if other.out_features > old:
            self._append(other.weight[old:], other.bias[old:], other.active[old:])

    def activate(self, labels: Tensor) -> None:
        """Let the logits of these labels through from now on."""
        self.active[labels] = True

    def _append(self, weight: Tensor, bias: Tensor, active: Tensor) -> None:
        self._set_rows(
            torch.cat([self.weight, weight.to(self.weight)]),
            torch.cat([self.bias, bias.to(self.bias)]),
            torch.cat([self.active, active.to(self.active)]),
        )

    def _set_rows(self, weight: Tensor, bias: Tensor, active: Tensor) -> None:
        self.weight = nn.Parameter(weight.detach(), requires_grad=self.weight.requires_grad)
        self.bias = nn.Parameter(bias.detach(), requires_grad=self.bias.requires_grad)
        self.active = active
        self.out_features = len(active)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None and len(weight) != self.out_features:
            size = len(weight)
            self._set_rows(
                self.weight.new_zeros(size, self.in_features),
                self.bias.new_zeros(size),
                self.active.new_zeros(size),
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)


def make_head(in_features: int, num_classes: int | None) -> nn.Linear:
    """A fixed head with ``num_classes`` outputs, or a growing one for ``None``."""
    if num_classes is None:
        return GrowingHead(in_features)
    return nn.Linear(in_features, num_classes)


def replace_in_optimizer_(
    optimizer: Optimizer, old: Sequence[nn.Parameter], new: Sequence[nn.Parameter]
) -> None:
    """Let an optimizer go on with parameters that have other numbers of rows than before.

    State with the shape of the parameter (momentum, Adam's moments) gets zeros for new rows, and
    loses those that are gone.
    """
    swap = {id(a): b for a, b in zip(old, new, strict=True)}
    for group in optimizer.param_groups:
        group["params"] = [swap.get(id(parameter), parameter) for parameter in group["params"]]
    for before, after in zip(old, new, strict=True):
        if before is not after and before in optimizer.state:
            state = optimizer.state.pop(before)
            optimizer.state[after] = {
                name: _fitted(value, before, after) for name, value in state.items()
            }


def _fitted(value: Any, old: Tensor, new: Tensor) -> Any:
    if not isinstance(value, Tensor) or value.shape != old.shape:
        return value
    if len(new) < len(old):
        return value[: len(new)].clone()
    rows = value.new_zeros(len(new) - len(old), *value.shape[1:])
    return torch.cat([value, rows])
