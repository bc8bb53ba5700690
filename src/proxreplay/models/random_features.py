"""Features that nobody trained: random filters, a ReLU and coarse pooling."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proxreplay.options import FloorOptions

KERNEL, POOLED = 5, 4


class RandomFeatures(nn.Module):
    """``pool(relu(conv(x)))`` with random filters on images, ``relu(Wx)`` on vectors.

    Filters are normal, without mean over their pixels, and of norm 1; as many features on vectors
    as on images.

    Args:
        shape: of one input, ``[channels, height, width]`` or ``[features]``.
        filters: how many; on images each gives 4 x 4 features.
    """

    def __init__(self, shape: Sequence[int], filters: int = FloorOptions.filters) -> None:
        super().__init__()
        self.image = len(shape) == 3
        self.features = filters * POOLED**2
        if self.image:
            drawn = torch.randn(filters, shape[0], KERNEL, KERNEL)
            drawn -= drawn.mean(dim=(2, 3), keepdim=True)
        else:
            drawn = torch.randn(self.features, int(torch.tensor(shape).prod()))
        drawn /= drawn.flatten(1).norm(dim=1).view(-1, *[1] * (drawn.ndim - 1))
        self.weight = nn.Parameter(drawn, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Features ``[n, features]``."""
        if not self.image:
            return F.linear(x.reshape(len(x), -1), self.weight).relu()
        responses = F.conv2d(x, self.weight, padding=KERNEL // 2).relu()
        return F.adaptive_avg_pool2d(responses, POOLED).flatten(1)
