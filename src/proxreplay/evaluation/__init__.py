"""Judging a learner: metrics as pure numbers, and the held-out sets they come from."""

from proxreplay.evaluation.estimates import (
    Estimate,
    PairedDifference,
    estimate,
    paired_difference,
)
from proxreplay.evaluation.evaluate import Evaluation, evaluate
from proxreplay.evaluation.metrics import (
    StabilityGap,
    Trajectory,
    average_anytime_accuracy,
    average_forgetting,
    backward_transfer,
    final_accuracy,
    stability_gaps,
    total_variation,
    variation_of_seen,
    variation_of_tasks,
    worst_case_accuracy,
)

__all__ = [
    "Estimate",
    "Evaluation",
    "PairedDifference",
    "StabilityGap",
    "Trajectory",
    "average_anytime_accuracy",
    "average_forgetting",
    "backward_transfer",
    "estimate",
    "evaluate",
    "final_accuracy",
    "paired_difference",
    "stability_gaps",
    "total_variation",
    "variation_of_seen",
    "variation_of_tasks",
    "worst_case_accuracy",
]
