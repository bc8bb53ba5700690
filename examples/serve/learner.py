"""A learner for handwritten digits, for `proxreplay serve FOLDER --learner ...:make`."""

from proxreplay import LPR, ClassBalancedMemory, Learner
from proxreplay.data import Transform
from proxreplay.models import mlp
from proxreplay.seeding import seeded


def make() -> Learner:
    with seeded(0, "model"):
        model = mlp(in_features=64)
    return Learner(
        model,
        ClassBalancedMemory(200),
        LPR(model, omega_0=1.0),
        transform=Transform(scale=16.0),  # grey values from 0 to 16
    )
