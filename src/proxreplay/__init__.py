"""Online continual learning with Layerwise Proximal Replay."""

from typing import TYPE_CHECKING, Any

from proxreplay.batch import Batch
from proxreplay.proximal import LPR, register_layer
from proxreplay.replay import (
    EMA,
    ClassBalancedMemory,
    Derpp,
    DerppSnapshot,
    ErAce,
    Learner,
    Lode,
    ReservoirMemory,
    RingMemory,
    UnlimitedMemory,
    derpp,
    derpp_snapshot,
    er,
    er_ace,
    finetune,
    lode,
)

if TYPE_CHECKING:
    from proxreplay.replay.estimator import ReplayClassifier

__all__ = [
    "EMA",
    "LPR",
    "Batch",
    "ClassBalancedMemory",
    "Derpp",
    "DerppSnapshot",
    "ErAce",
    "Learner",
    "Lode",
    "ReplayClassifier",
    "ReservoirMemory",
    "RingMemory",
    "UnlimitedMemory",
    "derpp",
    "derpp_snapshot",
    "er",
    "er_ace",
    "finetune",
    "lode",
    "register_layer",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``ReplayClassifier`` on first use: it needs scikit-learn, and nothing else here does."""
    if name == "ReplayClassifier":
        from proxreplay.replay.estimator import ReplayClassifier

        return ReplayClassifier
    raise AttributeError(f"module 'proxreplay' has no attribute '{name}'")
