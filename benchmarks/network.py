"""The network of the benchmarks, the library's slim ResNet18, and images for it."""

import torch
from torch import Tensor, nn

from proxreplay.data import Transform
from proxreplay.models import slim_resnet18

CIFAR = Transform(
    255.0, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), crop_padding=4, flip=True
)


def network(width: int = 20, size: int = 32, classes: int | None = 100) -> nn.Module:
    """The network in evaluation mode, channels last."""
    torch.manual_seed(0)
    model = slim_resnet18(classes, width=width, image_size=size).eval()
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def images(n: int, size: int = 32) -> Tensor:
    """Random images as the network sees them, channels last."""
    x = torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(1))
    return x.contiguous(memory_format=torch.channels_last)


def forward(model: nn.Module, x: Tensor, batch: int = 100) -> None:
    """The bare evaluation pass that refreshes are compared with."""
    with torch.no_grad():
        for part in x.split(batch):
            model(part)
