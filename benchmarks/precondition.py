"""Preconditioning all gradients, exactly, against the training step that it belongs to."""

import torch
from torch.nn import functional as F

from benchmarks.network import images, network
from benchmarks.timing import Claim, interleaved, main
from proxreplay import LPR


def run() -> list[Claim]:
    model, x = network(), images(20)
    labels = torch.arange(20)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    lpr = LPR(model, omega_0=4.0, beta=2.0)
    lpr.refresh(images(100))
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()

    times = interleaved({"step": step, "precondition": lpr.precondition_}, rounds=30)
    share = 100 * times.ratio("precondition", "step")
    return [
        Claim("exact preconditioning / training step of 10 + 10 images", share, "%", target=15.0),
        Claim("milliseconds of a training step", 1e3 * times.median("step"), ""),
        Claim("milliseconds of preconditioning", 1e3 * times.median("precondition"), ""),
    ]


if __name__ == "__main__":
    main("Preconditioning", run)
