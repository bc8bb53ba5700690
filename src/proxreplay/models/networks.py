"""Small networks; every one ends in ``head``, which grows when ``num_classes`` is None."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from proxreplay.models.heads import make_head


def mlp(
    in_features: int, num_classes: int | None = None, hidden: Sequence[int] = (256, 256)
) -> nn.Sequential:
    """A multi-layer perceptron with ReLU on flattened inputs."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    width = in_features
    for i, size in enumerate(hidden, start=1):
        layers[f"linear{i}"] = nn.Linear(width, size)
        layers[f"relu{i}"] = nn.ReLU()
        width = size
    layers["head"] = make_head(width, num_classes)
    return nn.Sequential(layers)


def small_cnn(
    in_channels: int = 1, num_classes: int | None = None, widths: Sequence[int] = (32, 64)
) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU blocks with stride 2 after the first, then a global average."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    width = in_channels
    for i, size in enumerate(widths, start=1):
        stride = 1 if i == 1 else 2
        layers[f"conv{i}"] = nn.Conv2d(width, size, 3, stride=stride, padding=1, bias=False)
        layers[f"norm{i}"] = nn.BatchNorm2d(size)
        layers[f"relu{i}"] = nn.ReLU()
        width = size
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["head"] = make_head(width, num_classes)
    return nn.Sequential(layers)
