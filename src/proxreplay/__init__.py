"""Online continual learning with Layerwise Proximal Replay."""

from proxreplay.batch import Batch
from proxreplay.proximal import LPR, register_layer
from proxreplay.replay import ClassBalancedMemory, Learner, er

__all__ = ["LPR", "Batch", "ClassBalancedMemory", "Learner", "er", "register_layer"]
__version__ = "0.1.0"
