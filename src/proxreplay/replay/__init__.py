"""What is remembered and how it is learned from."""

from proxreplay.options import AveragingOptions, CompanionOptions
from proxreplay.replay.averaging import EMA
from proxreplay.replay.distillation import Distilled
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
from proxreplay.replay.parts import Learned, Observer

__all__ = [
    "EMA",
    "AveragingOptions",
    "ClassBalancedMemory",
    "CompanionOptions",
    "Derpp",
    "DerppSnapshot",
    "Distilled",
    "ErAce",
    "Learned",
    "Learner",
    "Lode",
    "Loss",
    "Memory",
    "Needs",
    "Observer",
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
