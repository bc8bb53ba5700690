"""Networks and heads."""

from proxreplay.models.heads import GrowingHead
from proxreplay.models.networks import load_network, mlp, small_cnn
from proxreplay.models.resnets import resnet18, slim_resnet18

__all__ = ["GrowingHead", "load_network", "mlp", "resnet18", "slim_resnet18", "small_cnn"]
