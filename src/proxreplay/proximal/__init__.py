"""The paper's idea: layer inputs, Gram matrices, shrinkage, preconditioned gradients."""

from proxreplay.proximal.agem import AGEM
from proxreplay.proximal.alpha import (
    AdaptiveAlpha,
    ConstantAlpha,
    DecayingAlpha,
    StreamProgress,
    TaskProgress,
)
from proxreplay.proximal.lpr import LPR
from proxreplay.proximal.projection import GPM, SGP
from proxreplay.proximal.recursive import AOP, OWM
from proxreplay.proximal.registry import LinearMap, Part, register_layer
from proxreplay.proximal.rule import GradientRule, GramRule, LayerwiseRule, TreatedLayer
from proxreplay.proximal.strength import Strength
from proxreplay.proximal.view import ProximalUpdate

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
    "LayerwiseRule",
    "LinearMap",
    "Part",
    "ProximalUpdate",
    "StreamProgress",
    "Strength",
    "TaskProgress",
    "TreatedLayer",
    "register_layer",
]
