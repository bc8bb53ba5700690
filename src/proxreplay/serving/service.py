"""A durable learner behind a server: one thread learns, predictions never wait for it."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from proxreplay.errors import CheckpointError, InputError, StorageError
from proxreplay.options import ServeOptions
from proxreplay.serving.durable import DurableLearner
from proxreplay.serving.events import Outcome
from proxreplay.serving.follower import Follower
from proxreplay.serving.metrics import Requests, gauge, sample
from proxreplay.serving.published import Prediction, Published

WINDOW = 1000  # examples of the prequential accuracy that is shown
REMEMBERED = 20_000  # outcomes for the page
POINTS = 200  # of its curve
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Numbers:
    """One batch that was learned: how many examples, and how many were predicted before."""

    sequence: int
    judged: int
    hits: int
    loss: float | None


class Service:
    """What a server answers from.

    Args:
        source: a durable learner, whose events are applied on a thread from now on; or a follower,
            which only predicts.
        options: limits.
    """

    def __init__(
        self, source: DurableLearner | Follower, options: ServeOptions | None = None
    ) -> None:
        self.source = source
        self.options = options or ServeOptions()
        self.requests = Requests()
        self.refreshed: tuple[int, int] | None = None  # sequence, examples
        self._numbers: deque[Numbers] = deque(maxlen=REMEMBERED)
        self._window: deque[tuple[int, bool]] = deque(maxlen=WINDOW)
        self._counting = threading.Lock()
        self.current = self._published()
        if isinstance(source, DurableLearner):
            for outcome in source.log.outcomes(REMEMBERED):
                self._count(outcome)
            source.start(self._on_applied)

    @property
    def durable(self) -> DurableLearner:
        """The learner that can be changed; refused where a folder is only followed."""
        if not isinstance(self.source, DurableLearner):
            raise InputError("this server only reads (--read-only); send changes to the writer.")
        return self.source

    def close(self) -> None:
        """Finish the event under way, write a snapshot, and let go of the folder."""
        if isinstance(self.source, DurableLearner):
            try:
                if self.source.failure is None and self.source.applied > self.source.version:
                    self.source.snapshot()
            except (CheckpointError, StorageError) as error:
                log.error("no snapshot was written at the end; the events are kept: %s", error)
            finally:
                self.source.close()

    # --- predicting -------------------------------------------------------------------------------

    def predict(self, inputs: Any) -> Prediction:
        """Predict with the newest copy."""
        self._follow()
        return self.current.predict(inputs)

    def _follow(self) -> None:
        if isinstance(self.source, Follower) and self.source.update():
            self.current = self._published()

    # --- what was learned -------------------------------------------------------------------------

    def _published(self) -> Published:
        source = self.source
        applied = source.applied if isinstance(source, DurableLearner) else source.version
        return Published.of(source.learner, applied, source.version)

    def _on_applied(self, outcome: Outcome) -> None:
        """On the learner thread, after every event: the next predictions know it."""
        self.current = self._published()
        self._count(outcome)

    def _count(self, outcome: Outcome) -> None:
        if outcome.kind not in ("learn", "remember"):
            return
        with self._counting:
            if outcome.refreshed is not None:
                self.refreshed = (outcome.sequence, outcome.refreshed)
            judged = list(zip(outcome.classes, outcome.hits, strict=False))
            self._window.extend(judged)
            hits = sum(hit for _, hit in judged)
            self._numbers.append(Numbers(outcome.sequence, len(judged), hits, outcome.loss))

    @property
    def accuracy(self) -> float | None:
        """Prequential accuracy of the newest examples; None before there are any."""
        with self._counting:
            judged = len(self._window)
            return sum(hit for _, hit in self._window) / judged if judged else None

    def curve(self) -> list[dict[str, Any]]:
        """Accuracy and loss over events, in at most `POINTS` parts of about equal length."""
        with self._counting:
            numbers = [n for n in self._numbers if n.judged]
        size = max(1, -(-len(numbers) // POINTS))
        parts = [numbers[i : i + size] for i in range(0, len(numbers), size)]
        return [
            {
                "sequence": part[-1].sequence,
                "accuracy": sum(n.hits for n in part) / sum(n.judged for n in part),
                "examples": sum(n.judged for n in part),
                "loss": part[-1].loss,
            }
            for part in parts
        ]

    def classes(self) -> list[dict[str, Any]]:
        """By label: examples in the memory, and recall in the window."""
        learner = self.source.learner
        counts = dict(learner.memory.class_counts)
        with self._counting:
            seen = Counter(index for index, _ in self._window)
            hits = Counter(index for index, hit in self._window if hit)
        labels = self.current.predictor.labels
        found = []
        for index, label in enumerate(labels):
            if label is not None and (counts.get(index) or seen[index]):
                recall = hits[index] / seen[index] if seen[index] else None
                row = {"label": label, "memory": counts.get(index, 0), "recall": recall}
                found.append({**row, "judged": seen[index]})
        return found

    def status(self) -> dict[str, Any]:
        """Everything that the page shows."""
        self._follow()
        source = self.source
        durable = source if isinstance(source, DurableLearner) else None
        return {
            "read_only": durable is None,
            "sequence": self.current.sequence,
            "version": self.current.version,
            "logged": durable.log.last if durable else self.current.sequence,
            "queue": durable.waiting if durable else 0,
            "stopped": (durable.failure or durable.stopped) if durable else None,
            "problem": durable.snapshot_failure if durable else None,
            "accuracy": self.accuracy,
            "window": len(self._window),
            "curve": self.curve(),
            "classes": self.classes(),
            "memory": len(source.learner.memory),
            "capacity": source.learner.memory.capacity,
            "versions": self.versions(),
            "history": self.history(),
        }

    def versions(self) -> list[dict[str, Any]]:
        """All snapshots, newest first."""
        if isinstance(self.source, Follower):
            files = self.source.snapshots
            return [
                {"sequence": s, "bytes": files.nbytes(s), "time": 0.0, "good": True}
                for s in files.sequences()
            ]
        return [
            {"sequence": s.sequence, "bytes": s.nbytes, "time": s.time, "good": s.good}
            for s in self.source.versions()
        ]

    def history(self) -> list[dict[str, Any]]:
        """The newest deletions, rollbacks and stops, newest first."""
        if isinstance(self.source, Follower):
            return []
        rows = self.source.history()[:-51:-1]
        return [{"sequence": s, "kind": k, "time": t, "note": note} for s, k, t, note, _ in rows]

    def metrics(self) -> Iterable[str]:
        """Prometheus text, line by line."""
        self._follow()
        yield from self.requests.lines()
        yield from gauge("prequential_accuracy", f"Newest {WINDOW} examples.", self.accuracy)
        yield from gauge("sequence", "Newest event that predictions know.", self.current.sequence)
        yield from gauge("version", "Snapshot or rollback behind it.", self.current.version)
        if isinstance(self.source, DurableLearner):
            durable = self.source
            yield from gauge("events_logged", "Newest event on disk.", durable.log.last)
            yield from gauge("kept_inputs", "Inputs that wait for labels.", len(durable.kept))
            yield from gauge("queue_events", "Events that wait.", durable.waiting)
            yield from gauge("lag_seconds", "Age of the oldest of them.", durable.lag)
            stopped = durable.stopped is not None or durable.failure is not None
            yield from gauge("stopped", "1 if learning is stopped.", int(stopped))
            failed = durable.snapshot_failure is not None
            yield from gauge("snapshot_failed", "1 if the newest snapshot failed.", int(failed))
        refreshed = self.refreshed or (None, None)
        yield from gauge("last_refresh_sequence", "Newest refresh of the rule.", refreshed[0])
        yield from gauge("last_refresh_examples", "What it was made from.", refreshed[1])
        losses = [n.loss for n in list(self._numbers)[-1:] if n.loss is not None]
        yield from gauge("loss", "Of the newest batch.", losses[0] if losses else None)
        yield "# TYPE proxreplay_memory_examples gauge"
        for row in self.classes():
            yield sample("memory_examples", row["memory"], label=row["label"])
