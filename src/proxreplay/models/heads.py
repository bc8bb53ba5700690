"""Classifier heads: one that grows with the labels it meets, and the masked logits it gives."""

import math

import torch
from torch import Tensor, nn

INACTIVE_LOGIT = -1000.0


class GrowingHead(nn.Linear):
    """A linear classifier that starts with one output and grows with the labels it meets.

    New rows are drawn from ``U(-1/sqrt(in), 1/sqrt(in))``, torch's default for a Linear. Outputs
    whose label has not been learned yet are inactive: their logits are -1000.
    """

    active: Tensor

    def __init__(self, in_features: int) -> None:
        super().__init__(in_features, 1)
        self.register_buffer("active", torch.zeros(1, dtype=torch.bool))

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
        rows = rows.to(self.weight)
        with torch.no_grad():
            self.weight = nn.Parameter(torch.cat([self.weight, rows[:, :-1]]))
            self.bias = nn.Parameter(torch.cat([self.bias, rows[:, -1]]))
            self.active = torch.cat([self.active, self.active.new_zeros(new)])
        self.out_features = size
        return True

    def activate(self, labels: Tensor) -> None:
        """Let the logits of these labels through from now on."""
        self.active[labels] = True


def make_head(in_features: int, num_classes: int | None) -> nn.Linear:
    """A fixed head with ``num_classes`` outputs, or a growing one for ``None``."""
    if num_classes is None:
        return GrowingHead(in_features)
    return nn.Linear(in_features, num_classes)
