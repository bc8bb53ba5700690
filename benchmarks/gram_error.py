"""The relative error of fast Grams in float32 on the network's own activations."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.network import forward, images, network
from benchmarks.timing import Claim, main
from proxreplay.proximal.gram.patches import PatchRows


def run() -> list[Claim]:
    model = network()
    inputs: dict[str, tuple[nn.Conv2d, Tensor]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d):

            def keep(layer: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                inputs[name] = (layer, args[0])

            layer.register_forward_pre_hook(keep)
    forward(model, images(20))
    return [
        Claim(
            "largest relative error of a Gram against float64 brute force",
            max(_error(layer, x) for layer, x in inputs.values()),
            "",
            target=1e-5,
        )
    ]


def _error(layer: nn.Conv2d, x: Tensor) -> float:
    zeros = tuple((p, p) for p in layer.padding)
    rows = PatchRows(x, layer.kernel_size, layer.stride, layer.dilation, layer.groups, zeros)
    Z = replace(rows, x=x.double()).dense()
    exact = Z.mT @ Z
    return (torch.linalg.norm(rows.gram() - exact) / torch.linalg.norm(exact)).item()


if __name__ == "__main__":
    main("Exactness", run)
