"""Online continual learning with Layerwise Proximal Replay."""

from typing import TYPE_CHECKING

from proxreplay.lazy import lazy_names

if TYPE_CHECKING:
    from proxreplay.batch import Batch as Batch
    from proxreplay.evaluation.prequential import prequential as prequential
    from proxreplay.proximal import LPR as LPR
    from proxreplay.proximal import KroneckerLPR as KroneckerLPR
    from proxreplay.proximal import register_layer as register_layer
    from proxreplay.replay import EMA as EMA
    from proxreplay.replay import AveragingOptions as AveragingOptions
    from proxreplay.replay import ClassBalancedMemory as ClassBalancedMemory
    from proxreplay.replay import CompanionOptions as CompanionOptions
    from proxreplay.replay import Derpp as Derpp
    from proxreplay.replay import DerppSnapshot as DerppSnapshot
    from proxreplay.replay import Distilled as Distilled
    from proxreplay.replay import ErAce as ErAce
    from proxreplay.replay import Learner as Learner
    from proxreplay.replay import Lode as Lode
    from proxreplay.replay import ReservoirMemory as ReservoirMemory
    from proxreplay.replay import RingMemory as RingMemory
    from proxreplay.replay import UnlimitedMemory as UnlimitedMemory
    from proxreplay.replay import derpp as derpp
    from proxreplay.replay import derpp_snapshot as derpp_snapshot
    from proxreplay.replay import er as er
    from proxreplay.replay import er_ace as er_ace
    from proxreplay.replay import finetune as finetune
    from proxreplay.replay import lode as lode
    from proxreplay.replay.estimator import ReplayClassifier as ReplayClassifier

__version__ = "0.1.0"

# On first use, so that commands that need no torch answer at once.
_NAMES = {
    "batch": "Batch",
    "evaluation.prequential": "prequential",
    "proximal": "LPR KroneckerLPR register_layer",
    "replay": "EMA AveragingOptions ClassBalancedMemory CompanionOptions Derpp DerppSnapshot "
    "Distilled ErAce Learner Lode ReservoirMemory RingMemory UnlimitedMemory "
    "derpp derpp_snapshot er er_ace finetune lode",
    "replay.estimator": "ReplayClassifier",
}
__all__ = " ".join(_NAMES.values()).split()
__getattr__ = lazy_names(__name__, _NAMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
