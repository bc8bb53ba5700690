"""Networks and heads."""

from proxreplay.models.heads import GrowingHead
from proxreplay.models.networks import mlp, small_cnn

__all__ = ["GrowingHead", "mlp", "small_cnn"]
