"""Applying an event to a learner: live and when it is replayed, with the same result."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from proxreplay.errors import DivergenceError, ProxreplayError
from proxreplay.serving.events import LEARN, Event, Outcome

if TYPE_CHECKING:
    from proxreplay.replay.learner import Learner


def learn_(learner: "Learner", sequence: int, event: Event, *, prequential: bool) -> Outcome:
    """Learn or remember a batch; what the learner refuses, it refuses each time.

    Args:
        learner: that is changed.
        sequence: of the event.
        event: from `events.learning`.
        prequential: whether to predict the batch first.
    """
    inputs, labels = event.body["inputs"], event.body["labels"]
    change = learner.learn if event.kind == LEARN else learner.remember
    weights = {"sample_weight": event.body["weights"]} if "weights" in event.body else {}
    try:
        hits = predicted(learner, inputs, labels) if prequential else ()
        learned = change(inputs, labels, **weights)
    except ProxreplayError as error:
        diverged = isinstance(error, DivergenceError)
        return Outcome(sequence, event.kind, refused=str(error), diverged=diverged)
    return Outcome(
        sequence,
        event.kind,
        loss=learned.loss if event.kind == LEARN else None,
        ids=learned.ids,
        classes=tuple(learner.intake.labels.find(labels).tolist()),
        hits=hits,
        refreshed=learned.refreshed,
    )


def predicted(learner: "Learner", inputs: Any, labels: Any) -> tuple[bool, ...]:
    """Whether each label is what the learner predicts now; empty while it knows no label."""
    known = learner.intake.labels
    if known.kind == "unknown" or not known.met:
        return ()
    truth = labels.tolist() if isinstance(labels, Tensor) else labels
    return tuple(a == b for a, b in zip(learner.predict(inputs).tolist(), truth, strict=True))


def forget_(learner: "Learner", sequence: int, event: Event) -> Outcome:
    """Delete examples from the memory of a learner."""
    try:
        removed = learner.forget(**event.body)
    except ProxreplayError as error:
        return Outcome(sequence, event.kind, refused=str(error))
    return Outcome(sequence, event.kind, removed=removed)
