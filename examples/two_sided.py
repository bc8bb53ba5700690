"""Three parameters, four rules: what each leaves of a gradient.

    python examples/two_sided.py docs/images/two-sided.png

One input, three outputs with a weight each, and a fixed read-out: the first output decides what the
network says, the second plays a small part, the third none. All three see the same input, so a rule
that looks at inputs alone must treat them alike.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proxreplay import LPR, KroneckerLPR
from proxreplay.options import StepOptions
from proxreplay.proximal import GPM

MATTERS = (3.0, 0.5, 0.0)  # how much each output counts for the logits
NEWEST = StepOptions(every=1, rebuild=1, decay=0.0, incoming=1.0)


def network() -> nn.Sequential:
    """Three trained parameters, two classes."""
    torch.manual_seed(0)
    layer, readout = nn.Linear(1, 3, bias=False), nn.Linear(3, 2, bias=False)
    readout.weight = nn.Parameter(
        torch.stack([torch.tensor(MATTERS), -torch.tensor(MATTERS)]), requires_grad=False
    )
    return nn.Sequential(layer, readout).train()


def left(rule: str) -> Tensor:
    """The share that a rule leaves of a gradient that moves one parameter alone, ``[3]``."""
    model, x = network(), torch.randn(64, 1, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    made: LPR | GPM | KroneckerLPR | None = None
    if rule == "LPR":
        made = LPR(model, 4.0)
        made.refresh(x)
    elif rule == "GPM":
        made = GPM(model, 1.0)
        made.refresh(x)
    elif rule == "two-sided":
        made = KroneckerLPR(model, 4.0, form="exact", fisher="exact", steps=NEWEST)
        with made.watched():
            F.cross_entropy(model(x), y).backward()
        made.step_()
    weight, shares = model[0].weight, torch.zeros(3)
    for i in range(3):
        weight.grad = torch.zeros_like(weight)
        weight.grad[i] = 1
        if made is not None:
            made.precondition_()
        shares[i] = weight.grad[i, 0]
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path)
    path = parser.parse_args().picture
    shares = {rule: left(rule).tolist() for rule in ("SGD", "LPR", "GPM", "two-sided")}
    for rule, values in shares.items():
        print(f"{rule:10}", *(f"{value:.2f}" for value in values))

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for i, (rule, values) in enumerate(shares.items()):
        axes.bar([k + 0.2 * i - 0.3 for k in range(3)], values, width=0.18, label=rule)
    names = [f"output counts {value:g}" for value in MATTERS]
    axes.set(xticks=range(3), xticklabels=names, ylabel="share of the gradient left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title("Three parameters with the same input")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
