"""The paper's idea: layer inputs, Gram matrices, shrinkage, preconditioned gradients."""

from proxreplay.proximal.layers import register_layer
from proxreplay.proximal.lpr import LPR

__all__ = ["LPR", "register_layer"]
