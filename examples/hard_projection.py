"""The paper's Appendix B as a picture: what each rule leaves of the replay gradient.

    python examples/hard_projection.py docs/images/hard-projection.png

A network learns the bundled digits. Then rules are made from remembered examples, and the gradient
of the replay loss, on ten other examples, goes through them: with more and more examples behind the
rule, and with more and more of the directions that 500 examples use in the basis.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proxreplay import LPR
from proxreplay.data import Transform, digits
from proxreplay.models import mlp
from proxreplay.proximal import GPM, GramRule
from proxreplay.seeding import generator

SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
ENERGIES = (0.5, 0.8, 0.9, 0.95, 0.97, 0.99, 0.995, 0.999, 0.9999, 1.0)
TRIALS = 5
Rule = Callable[[nn.Module], GramRule]

RULES: dict[str, tuple[Rule, str, str]] = {
    "LPR, omega_0 = 0.25": (lambda model: LPR(model, 0.25), "#9ecae1", "-"),
    "LPR, omega_0 = 1": (lambda model: LPR(model, 1.0), "#4292c6", "-"),
    "LPR, omega_0 = 4": (lambda model: LPR(model, 4.0), "#084594", "-"),
    "hard projection (GPM), 97 % of energy": (lambda model: GPM(model, 0.97), "#fd8d3c", "--"),
    "hard projection (GPM), all directions": (lambda model: GPM(model, 1.0), "#d94801", "--"),
}


def trained_model(inputs: Tensor, labels: Tensor) -> nn.Module:
    """A network after a few passes over the digits."""
    torch.manual_seed(0)
    model = mlp(64, 10, hidden=(100, 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model


def left(model: nn.Module, rule: GramRule, memory: Tensor, x: Tensor, y: Tensor) -> float:
    """``||G Lambda|| / ||G||`` over all parameters, ``G`` the replay gradient."""
    rule.refresh(memory)
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    before = gradient(model).norm()
    rule.precondition_()
    return float(gradient(model).norm() / before)


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


class Bench:
    """The trained network, and what rules leave of its replay gradients."""

    def __init__(self) -> None:
        data = digits().train
        self.inputs = Transform(scale=16, mean=(0.305,), std=(0.376,))(data.inputs)
        self.labels = data.labels
        self.model = trained_model(self.inputs, self.labels)

    def left(self, make: Rule, size: int) -> tuple[float, float]:
        """Means over trials: the share of the gradient left, and of directions closed (GPM)."""
        shares, closed = [], []
        for trial in range(TRIALS):
            order = torch.randperm(len(self.inputs), generator=generator(trial, "memory"))
            replayed = order[-10:]
            rule = make(self.model)
            batch = self.inputs[replayed], self.labels[replayed]
            shares.append(left(self.model, rule, self.inputs[order[:size]], *batch))
            if isinstance(rule, GPM):
                width = sum(layer.d for layer in rule.layers.values())
                closed.append(sum(rule.rank.values()) / width)
        return sum(shares) / TRIALS, sum(closed) / TRIALS


def draw(bench: Bench, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left_axes, right_axes) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for name, (make, color, style) in RULES.items():
        values = [bench.left(make, size)[0] for size in SIZES]
        print(f"{name:40}", *(f"{value:.2f}" for value in values))
        left_axes.plot(SIZES, values, style, color=color, label=name, marker="o", markersize=4)
        if name.startswith("LPR"):
            right_axes.axhline(values[SIZES.index(500)], color=color, label=name)
    points = [bench.left(lambda m, e=energy: GPM(m, e), 500) for energy in ENERGIES]
    print(
        "closed", *(f"{k:.2f}" for _, k in points), "left", *(f"{share:.2f}" for share, _ in points)
    )
    shares, closed = zip(*points, strict=True)
    right_axes.plot(closed, shares, "--", color="#d94801", marker="o", markersize=4)
    left_axes.set(
        xscale="log",
        xlabel="remembered examples the rule is made from",
        ylabel="share of the replay gradient left",
        title="with more examples",
    )
    right_axes.set(
        xlabel="share of all directions in the basis (500 examples)", title="with a larger basis"
    )
    for axes in (left_axes, right_axes):
        axes.set_ylim(-0.02, 1.0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left_axes.legend(frameon=False, fontsize=8)
    figure.suptitle("Hard projection takes the replay gradient away; LPR does not")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path)
    draw(Bench(), parser.parse_args().picture)


if __name__ == "__main__":
    main()
