"""Online continual learning with Layerwise Proximal Replay."""

from typing import TYPE_CHECKING

from proxreplay.lazy import lazy_names

if TYPE_CHECKING:
    from proxreplay.batch import Batch
    from proxreplay.evaluation.prequential import prequential
    from proxreplay.proximal import LPR, KroneckerLPR, register_layer
    from proxreplay.replay import (
        EMA,
        AveragingOptions,
        ClassBalancedMemory,
        CompanionOptions,
        Derpp,
        DerppSnapshot,
        Distilled,
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
    from proxreplay.replay.estimator import ReplayClassifier

__all__ = [
    "EMA",
    "LPR",
    "AveragingOptions",
    "Batch",
    "ClassBalancedMemory",
    "CompanionOptions",
    "Derpp",
    "DerppSnapshot",
    "Distilled",
    "ErAce",
    "KroneckerLPR",
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
    "prequential",
    "register_layer",
]
__version__ = "0.1.0"

# On first use, so that commands that need no torch answer at once.
_HOMES = dict.fromkeys(__all__, "proxreplay.replay") | {
    "Batch": "proxreplay.batch",
    "KroneckerLPR": "proxreplay.proximal",
    "LPR": "proxreplay.proximal",
    "prequential": "proxreplay.evaluation.prequential",
    "register_layer": "proxreplay.proximal",
    "ReplayClassifier": "proxreplay.replay.estimator",
}
__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
