"""The naive twin of LPR: unfold, multiply, invert, written to be plain."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class NaiveLPR:
    """Layerwise Proximal Replay as one would write it down.

    Hooks keep what goes into every layer; patches are unfolded, ones appended for a bias,
    ``Z'Z`` scaled and added up, and ``(I + sum)`` inverted with a general inverse.
    """

    def __init__(self, model: nn.Module, omega_0: float = 4.0, beta: float = 2.0) -> None:
        self.model = model
        self.omega_0 = omega_0
        self.beta = beta
        self.inverses: dict[str, Tensor] = {}

    def refresh(self, x: Tensor, batch: int = 100) -> None:
        """Rebuild every inverse from the images ``x``."""
        sums: dict[str, Tensor] = {}
        layers = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear | nn.Conv2d | nn.BatchNorm2d)
        }
        handles = [
            layer.register_forward_hook(self._hook(name, sums)) for name, layer in layers.items()
        ]
        try:
            with torch.no_grad():
                for part in x.split(batch):
                    self.model(part)
        finally:
            for handle in handles:
                handle.remove()
        for name, total in sums.items():
            eye = torch.eye(total.shape[-1])
            self.inverses[name] = torch.inverse(total / len(x) + eye)

    def _hook(self, name: str, sums: dict[str, Tensor]) -> Callable[..., None]:
        def add(layer: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            Z = _rows(layer, args[0])
            positions = Z.shape[-2] / len(args[0])
            statistic = self.omega_0 / positions**self.beta * (Z.transpose(-1, -2) @ Z)
            sums[name] = sums[name] + statistic if name in sums else statistic

        return add


def _rows(layer: nn.Module, x: Tensor) -> Tensor:
    if isinstance(layer, nn.Conv2d):
        Z = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        Z = Z.transpose(1, 2).reshape(-1, Z.shape[1])
    elif isinstance(layer, nn.BatchNorm2d):
        scale = torch.sqrt(layer.running_var + layer.eps)
        x_hat = (x - layer.running_mean[:, None, None]) / scale[:, None, None]
        Z = x_hat.transpose(0, 1).reshape(x.shape[1], -1, 1)
    else:
        Z = x
    if layer.bias is not None:
        Z = torch.cat([Z, torch.ones(*Z.shape[:-1], 1)], dim=-1)
    return Z
