"""The network of the benchmarks, and images for it.

A private copy of the slim ResNet18 (METHODS A.6), so that timings do not move with the library's.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """``relu(residual + shortcut)``."""
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


class SlimResNet18(nn.Module):
    """ResNet18 with 20/40/80/160 channels and no max-pooling, for 32x32 images."""

    def __init__(self, classes: int = 100, width: int = 20, size: int = 32) -> None:
        super().__init__()
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        blocks = []
        for stage in range(4):
            blocks.append(Block(widths[stage], widths[stage + 1], 1 if stage == 0 else 2))
            blocks.append(Block(widths[stage + 1], widths[stage + 1], 1))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(8 * width * (size // 32) ** 2, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.blocks(F.relu(self.bn1(self.conv1(x))))
        return self.head(F.avg_pool2d(x, 4).flatten(1))


def network(width: int = 20, size: int = 32) -> SlimResNet18:
    """The network in evaluation mode, channels last."""
    torch.manual_seed(0)
    model = SlimResNet18(width=width, size=size).eval()
    return model.to(memory_format=torch.channels_last)


def images(n: int, size: int = 32) -> Tensor:
    """Random images, channels last."""
    x = torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(1))
    return x.contiguous(memory_format=torch.channels_last)


def forward(model: nn.Module, x: Tensor, batch: int = 100) -> None:
    """The bare evaluation pass that refreshes are compared with."""
    with torch.no_grad():
        for part in x.split(batch):
            model(part)
