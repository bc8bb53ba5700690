"""A guard: looks at what becomes of every batch and says when something is wrong."""

from collections import deque
from typing import Any

from proxreplay.options import GuardOptions
from proxreplay.serving.events import RESUME, ROLLBACK, Outcome


class Guard:
    """Watches loss, prequential accuracy and recall over the newest examples.

    Args:
        options: what to watch, and what to do then.

    >>> guard = Guard(GuardOptions(accuracy=0.5, window=2))
    >>> guard.judge(Outcome(1, "learn", classes=(0, 1), hits=(False, False)), ["cat", "dog"])
    'accuracy 0.000 of the newest 2 examples is below 0.5'
    """

    def __init__(self, options: GuardOptions) -> None:
        self.options = options
        self._seen: deque[tuple[int, bool]] = deque(maxlen=options.window)

    @property
    def content(self) -> bool:
        """Whether what was learned is judged: the window is full, or nothing is in it yet."""
        watched = self.options.accuracy is not None or self.options.recall
        return not watched or len(self._seen) in (0, self.options.window)

    def observe(self, outcome: Outcome) -> None:
        """Take note of an event without judging; going back or on starts a new window."""
        if outcome.kind in (ROLLBACK, RESUME):
            self._seen.clear()
        self._seen.extend(zip(outcome.classes, outcome.hits, strict=False))

    def judge(self, outcome: Outcome, labels: list[Any]) -> str | None:
        """Take note of a batch; say what is wrong, or None. ``labels``: see `Predictor.labels`."""
        if outcome.diverged and self.options.finite:
            return f"event {outcome.sequence} diverged: {outcome.refused}"
        self.observe(outcome)
        if len(self._seen) < self.options.window:
            return None
        accuracy = sum(hit for _, hit in self._seen) / len(self._seen)
        if self.options.accuracy is not None and accuracy < self.options.accuracy:
            return (
                f"accuracy {accuracy:.3f} of the newest {len(self._seen)} examples is below "
                f"{self.options.accuracy:g}"
            )
        for label, least in self.options.recall:
            wrong = self._poor_recall(label, least, labels)
            if wrong is not None:
                return wrong
        return None

    def _poor_recall(self, label: Any, least: float, labels: list[Any]) -> str | None:
        names = [str(known) for known in labels]  # all are numbers, or none is
        if str(label) not in names:
            return None
        index = names.index(str(label))
        hits = [hit for seen, hit in self._seen if seen == index]
        if not hits or sum(hits) / len(hits) >= least:
            return None
        return (
            f"recall {sum(hits) / len(hits):.3f} of {label!r} in the newest {len(self._seen)} "
            f"examples ({len(hits)} of that label) is below {least:g}"
        )
