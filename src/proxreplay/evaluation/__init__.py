"""Judging a learner: measures as pure numbers, and the held-out examples they come from."""

from typing import TYPE_CHECKING

from proxreplay.evaluation.estimates import Estimate, PairedDifference, estimate, paired_difference
from proxreplay.evaluation.measures import (
    MEASURES,
    Measure,
    StabilityGap,
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
from proxreplay.evaluation.trajectory import Recorded, Trajectory
from proxreplay.lazy import lazy_names

if TYPE_CHECKING:
    from proxreplay.evaluation.evaluating import Evaluation, evaluate, evaluate_each
    from proxreplay.evaluation.prequential import Score, Step

__all__ = [
    "MEASURES",
    "Estimate",
    "Evaluation",
    "Measure",
    "PairedDifference",
    "Recorded",
    "Score",
    "StabilityGap",
    "Step",
    "Trajectory",
    "average_anytime_accuracy",
    "average_forgetting",
    "backward_transfer",
    "estimate",
    "evaluate",
    "evaluate_each",
    "final_accuracy",
    "paired_difference",
    "stability_gaps",
    "total_variation",
    "variation_of_seen",
    "variation_of_tasks",
    "worst_case_accuracy",
]

# These need torch; reports do not.
_NAMES = {"evaluating": "Evaluation evaluate evaluate_each", "prequential": "Score Step"}
__getattr__ = lazy_names(__name__, _NAMES)
