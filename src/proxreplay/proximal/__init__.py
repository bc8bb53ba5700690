"""The paper's idea: layer inputs, Gram matrices, shrinkage, preconditioned gradients."""

from proxreplay.proximal.layers.outputs import register_output
from proxreplay.proximal.layers.registry import LinearMap, Part, register_layer
from proxreplay.proximal.rules.agem import AGEM
from proxreplay.proximal.rules.alpha import (
    AdaptiveAlpha,
    ConstantAlpha,
    DecayingAlpha,
    StreamProgress,
    TaskProgress,
)
from proxreplay.proximal.rules.base import GradientRule
from proxreplay.proximal.rules.gpm import GPM, SGP
from proxreplay.proximal.rules.grams import GramRule
from proxreplay.proximal.rules.kronecker import KroneckerLPR
from proxreplay.proximal.rules.layerwise import LayerwiseRule, TreatedLayer
from proxreplay.proximal.rules.lpr import LPR
from proxreplay.proximal.rules.owm import AOP, OWM
from proxreplay.proximal.shrinkage.strength import RelativeStrength, Strength
from proxreplay.proximal.shrinkage.view import ProximalUpdate

__all__ = [
    "AGEM",
    "AOP",
    "GPM",
    "LPR",
    "OWM",
    "SGP",
    "AdaptiveAlpha",
    "ConstantAlpha",
    "DecayingAlpha",
    "GradientRule",
    "GramRule",
    "KroneckerLPR",
    "LayerwiseRule",
    "LinearMap",
    "Part",
    "ProximalUpdate",
    "RelativeStrength",
    "StreamProgress",
    "Strength",
    "TaskProgress",
    "TreatedLayer",
    "register_layer",
    "register_output",
]
