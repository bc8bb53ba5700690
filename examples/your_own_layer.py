"""Teach LPR a layer it does not know: one small function.

LPR treats every layer that is linear in its parameters. A function says which rows ``Z`` a call of
the layer multiplies its weight with; everything else (bias, Gram, inverse, state) is shared. Run it
with ``python examples/your_own_layer.py``.
"""

import torch
from torch import Tensor, nn

from proxreplay import LPR, register_layer
from proxreplay.proximal import LinearMap, Part


class FourierLinear(nn.Module):
    """A linear layer on cosines and sines of its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(outputs, 2 * inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def features(self, x: Tensor) -> Tensor:
        """What the weight is multiplied with."""
        return torch.cat([x.cos(), x.sin()], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        """Linear in the features."""
        return nn.functional.linear(self.features(x), self.weight, self.bias)


class LayerScale(nn.Module):
    """One factor a channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Scale the last dimension."""
        return x * self.gamma


@register_layer(FourierLinear)
def fourier_rows(layer: FourierLinear, x: Tensor) -> Tensor:
    """``z = (cos x, sin x)``: one group, a row for every leading position; bias comes by itself."""
    return layer.features(x).reshape(1, -1, layer.weight.shape[1])


@register_layer(LayerScale, maps=LinearMap(weight=Part("gamma"), bias=None))
def scale_rows(layer: LayerScale, x: Tensor) -> Tensor:
    """``z = x``: a group for every channel, with one column each."""
    return x.reshape(-1, len(layer.gamma)).T[:, :, None]


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(FourierLinear(3, 8), LayerScale(8), nn.ReLU(), nn.Linear(8, 2))
    lpr = LPR(model, omega_0=4.0)
    lpr.refresh(torch.randn(50, 3))
    for layer in lpr.layers.values():
        print(f"{layer.kind:14} d = {layer.d}, groups = {layer.groups}, omega = {layer.omega:.3f}")
    assert not lpr.untreated


if __name__ == "__main__":
    main()
