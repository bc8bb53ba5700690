"""Residual networks: the slim ResNet18 of the paper's experiments, and ResNet18 for 224 pixels."""

import torch
from torch import Tensor, nn

from proxreplay.errors import InputError
from proxreplay.models.heads import make_head
from proxreplay.models.recipes import recorded

POOL = 4  # slim_resnet18 averages over 4x4 windows, whatever the size of the last feature map


class BasicBlock(nn.Module):
    """``relu(bn2(conv2(relu(bn1(conv1(x))))) + shortcut(x))`` with 3x3 convolutions.

    The shortcut is the identity, or a strided 1x1 convolution with BatchNorm where the shape
    changes. Submodules are named as in torchvision.
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """``[n, in_channels, h, w]`` to ``[n, channels, h / stride, w / stride]``."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out)) + shortcut
        result: Tensor = self.relu(out)
        return result


def _stages(width: int) -> list[nn.Sequential]:
    """Four stages of two blocks; each but the first halves the image and doubles the channels."""
    stages, channels = [], width
    for number in range(4):
        into, stride = width * 2**number, 1 if number == 0 else 2
        blocks = BasicBlock(channels, into, stride), BasicBlock(into, into, stride=1)
        stages.append(nn.Sequential(*blocks))
        channels = into
    return stages


class SlimResNet18(nn.Module):
    """ResNet18 with a 3x3 stem, no max-pooling, narrow stages and 4x4 average pooling.

    Build it with `slim_resnet18`.
    """

    def __init__(
        self, num_classes: int | None, in_channels: int, width: int, image_size: int
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1, self.layer2, self.layer3, self.layer4 = _stages(width)
        self.pool = nn.AvgPool2d(POOL)
        self.flatten = nn.Flatten()
        self.head = make_head(slim_features(width, image_size), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``[n, in_channels, image_size, image_size]`` to logits ``[n, classes]``."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.head(self.flatten(self.pool(x)))
        return logits


def slim_features(width: int, image_size: int) -> int:
    """Features before the head: ``8 width (ceil(image_size / 8) // 4)^2``."""
    side = -(-image_size // 8) // POOL
    if side < 1:
        raise InputError(
            f"slim_resnet18: image_size={image_size} leaves nothing to pool; give at least 25 "
            "pixels, or use small_cnn or mlp."
        )
    return 8 * width * side**2


@recorded
def slim_resnet18(
    num_classes: int | None = None, in_channels: int = 3, width: int = 20, image_size: int = 32
) -> SlimResNet18:
    """The paper's network for CIFAR and TinyImageNet, initialised as torch does by default.

    Args:
        num_classes: outputs of a fixed head; None for a head that grows.
        in_channels: of the images.
        width: channels of the first stage; the others have 2, 4 and 8 times as many.
        image_size: side of the square images; 32 gives 160 features, 64 gives 640.

    >>> sum(p.numel() for p in slim_resnet18(num_classes=100).parameters())
    1109240
    """
    return SlimResNet18(num_classes, in_channels, width, image_size)


class ResNet18(nn.Module):
    """ResNet18 for large images, with torchvision's layout, names and initialisation.

    Build it with `resnet18`.
    """

    def __init__(self, num_classes: int | None, in_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1, self.layer2, self.layer3, self.layer4 = _stages(64)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = make_head(512, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Images ``[n, in_channels, height, width]`` to logits ``[n, classes]``."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


@recorded
def resnet18(num_classes: int | None = None, in_channels: int = 3) -> ResNet18:
    """The paper's network for CLEAR; torchvision's weights fit it (the head is ``fc``).

    Args:
        num_classes: outputs of a fixed head; None for a head that grows.
        in_channels: of the images.

    >>> model = resnet18(num_classes=10)
    >>> sum(p.numel() for n, p in model.named_parameters() if not n.startswith("fc."))
    11176512
    """
    return ResNet18(num_classes, in_channels)
