"""What is remembered and how it is learned from."""

from proxreplay.replay.learner import Learner
from proxreplay.replay.losses import er
from proxreplay.replay.memory import ClassBalancedMemory

__all__ = ["ClassBalancedMemory", "Learner", "er"]
