"""Learners of every kind for the tests of saving; run as a script, the new process goes on.

    python saved_learners.py <folder>

loads every learner saved under the folder, lets it learn further, and prints what it did.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proxreplay import (
    EMA,
    LPR,
    ClassBalancedMemory,
    Learner,
    derpp,
    derpp_snapshot,
    er,
    er_ace,
    finetune,
    lode,
)
from proxreplay.data import Transform
from proxreplay.models import small_cnn
from proxreplay.replay.losses import Loss
from proxreplay.seeding import seeded

LOSSES: dict[str, Loss] = {
    "finetune": finetune,
    "er": er,
    "er_ace": er_ace,
    "lode": lode,
    "derpp": derpp,
    "derpp_snapshot": derpp_snapshot,
}
KINDS = ["er", "er+lpr", "er+ema", *(f"{name}+lpr+ema" for name in LOSSES)]
BEFORE, AFTER = 11, 6


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def network() -> nn.Module:
    with seeded(0, "model"):
        return nn.Sequential(small_cnn(1, widths=(4, 6)), nn.Dropout(0.1))


def make(kind: str) -> Learner:
    name, *extras = kind.split("+")
    model = network()
    return Learner(
        model,
        ClassBalancedMemory(12),
        LPR(model, omega_0=4.0) if "lpr" in extras else None,
        loss=LOSSES[name],
        averaging=EMA(model, 0.9) if "ema" in extras else None,
        optimizer=momentum,
        steps_per_batch=2,
        replay_batch=4,
        refresh_every=3,
        refresh_samples=8,
        transform=Transform(scale=255.0, crop_padding=1, flip=True),
        seed=3,
    )


def load(kind: str, folder: Path) -> Learner:
    model = network()
    rule = LPR(model, omega_0=4.0) if "+lpr" in kind else None
    return Learner.load(folder / kind, model, rule=rule, optimizer=momentum)


def learn(learner: Learner, first: int, batches: int) -> list[str]:
    """Learn from a part of a stream that brings new classes; the losses, exactly."""
    losses = []
    for i in range(first, first + batches):
        rng = torch.Generator().manual_seed(i)
        images = torch.randint(0, 256, (6, 1, 8, 8), generator=rng, dtype=torch.uint8)
        labels = torch.randint(0, 2, (6,), generator=rng) + 2 * (i // 5)
        losses.append(learner.learn(images, labels).loss.hex())
    return losses


def digest(learner: Learner) -> str:
    """A checksum of everything that decides what the learner does next."""
    sha = hashlib.sha256()

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                sha.update(str(key).encode())
                visit(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item)
        elif isinstance(value, Tensor):
            sha.update(f"{value.dtype}{list(value.shape)}".encode())
            sha.update(value.detach().contiguous().numpy().tobytes())
        else:
            sha.update(repr(value).encode())

    visit(learner.state_dict())
    return sha.hexdigest()


def go_on(learner: Learner) -> dict[str, Any]:
    before = digest(learner)
    losses = learn(learner, BEFORE, AFTER)
    return {"before": before, "losses": losses, "after": digest(learner)}


if __name__ == "__main__":
    root = Path(sys.argv[1])
    torch.manual_seed(99)
    print(json.dumps({kind: go_on(load(kind, root)) for kind in KINDS}))
