"""What is remembered and how it is learned from."""

from proxreplay.replay.averaging import EMA
from proxreplay.replay.learner import Learner
from proxreplay.replay.losses import (
    Derpp,
    DerppSnapshot,
    ErAce,
    Lode,
    Loss,
    Needs,
    derpp,
    derpp_snapshot,
    er,
    er_ace,
    finetune,
    lode,
)
from proxreplay.replay.memory import (
    ClassBalancedMemory,
    Memory,
    ReservoirMemory,
    RingMemory,
    UnlimitedMemory,
)

__all__ = [
    "EMA",
    "ClassBalancedMemory",
    "Derpp",
    "DerppSnapshot",
    "ErAce",
    "Learner",
    "Lode",
    "Loss",
    "Memory",
    "Needs",
    "ReservoirMemory",
    "RingMemory",
    "UnlimitedMemory",
    "derpp",
    "derpp_snapshot",
    "er",
    "er_ace",
    "finetune",
    "lode",
]
