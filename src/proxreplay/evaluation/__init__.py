"""Judging a learner: metrics as pure numbers, and the held-out sets they come from."""

from proxreplay.evaluation.evaluate import Evaluation, evaluate
from proxreplay.evaluation.metrics import (
    Estimate,
    Trajectory,
    average_anytime_accuracy,
    estimate,
    final_accuracy,
    worst_case_accuracy,
)

__all__ = [
    "Estimate",
    "Evaluation",
    "Trajectory",
    "average_anytime_accuracy",
    "estimate",
    "evaluate",
    "final_accuracy",
    "worst_case_accuracy",
]
