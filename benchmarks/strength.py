"""LPR without numbers against ER: learning time on an MLP, a slim ResNet18 and a small transformer.

With ``--threads 1 --cpu`` on a busy machine. The paper's rule (``omega_0 = 1``) stands beside it.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.timing import Claim, interleaved, main
from proxreplay import LPR, ClassBalancedMemory, Learner
from proxreplay.models import mlp, slim_resnet18

MEMORY, BATCHES = 500, 20


class SmallTransformer(nn.Module):
    """Tokens of 4x4 pixels, two encoder layers, mean, head."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, 4, stride=4)
        layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        encoded: Tensor = self.encoder(self.embed(x).flatten(2).mT)
        logits: Tensor = self.head(encoded.mean(1))
        return logits


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP 784-256-256-10": (lambda: mlp(784, 10), (1, 28, 28)),
    "slim ResNet18": (lambda: slim_resnet18(10), (3, 32, 32)),
    "small transformer": (SmallTransformer, (1, 28, 28)),
}


def run() -> list[Claim]:
    claims = []
    for name, (make, shape) in NETWORKS.items():
        rng = torch.Generator().manual_seed(0)
        x = torch.randn(MEMORY + 10 * BATCHES, *shape, generator=rng)
        y = torch.randint(0, 10, (len(x),), generator=rng)

        def learner(
            rule: Callable[[nn.Module], LPR] | None,
            make: Callable[[], nn.Module] = make,
            x: Tensor = x,
            y: Tensor = y,
        ) -> Learner:
            torch.manual_seed(0)
            model = make()
            made = Learner(
                model, ClassBalancedMemory(MEMORY), None if rule is None else rule(model), lr=0.01
            )
            made.remember(x[:MEMORY], y[:MEMORY])
            return made

        def cycle(one: Learner, x: Tensor = x, y: Tensor = y) -> None:
            for inputs, labels in zip(x[MEMORY:].split(10), y[MEMORY:].split(10), strict=True):
                one.learn(inputs, labels)

        learners = {
            "ER": learner(None),
            "LPR": learner(LPR),
            "paper": learner(lambda model: LPR(model, 1.0)),
        }
        times = interleaved(
            {key: lambda one=one: cycle(one) for key, one in learners.items()},  # type: ignore[misc]
            rounds=3,
        )
        claims += [
            Claim(f"{name}: LPR without numbers / ER", times.ratio("LPR", "ER"), "x", 1.3),
            Claim(f"{name}: LPR with omega_0 = 1 / ER", times.ratio("paper", "ER"), "x"),
            Claim(f"{name}: ms per step with ER", 1000 * times.median("ER") / BATCHES / 3, ""),
        ]
    return claims


if __name__ == "__main__":
    main("Strength", run)
