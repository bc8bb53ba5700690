"""Diagnostics during a run: they look, and change nothing about what the run computes."""

from typing import Any

from torch import Tensor

from proxreplay.batch import Batch
from proxreplay.data import Stream
from proxreplay.evaluation.diagnostics import (
    GradientRatios,
    Ratios,
    RepresentationDrift,
    shrinkage_spectrum,
    spectrum_record,
)
from proxreplay.evaluation.prequential import Score, predictions_of
from proxreplay.experiments.config import DiagnosticsSettings
from proxreplay.experiments.results import Record
from proxreplay.proximal.rules.layerwise import LayerwiseRule
from proxreplay.replay import Learner, Loss
from proxreplay.replay.floors import Floor


class Diagnostics:
    """What is switched on for a run, and what it has seen: an observer of the learner.

    Drift follows the representation of the test examples of the stream's first task.
    """

    learner: Learner | None = None  # a floor has nothing to look at

    def __init__(self, settings: DiagnosticsSettings, stream: Stream) -> None:
        self.settings = settings
        self.stream = stream
        self.drift: RepresentationDrift | None = None
        self.gradients: GradientRatios | None = None
        self._ratios: list[Ratios] = []
        self.score = Score() if settings.prequential else None
        self._predictions: list[Any] = []

    def watch(self, learner: Learner, loss: Loss) -> Loss:
        """Begin to look; returns the loss of the learner, with its gradients looked at if asked."""
        self.learner = learner
        settings = self.settings
        if settings.drift is not None:
            inputs = learner.view(self.stream.tasks[0].test.inputs)
            drift = RepresentationDrift(learner.model, inputs, mode=settings.drift)
            self.drift = drift.attach(learner.optimizer)
        if settings.gradients_every is None or learner.rule is None:
            return loss
        self.gradients = GradientRatios(
            learner.model,
            learner.rule,
            self._ratios.append,
            every=settings.gradients_every,
            optimizer=learner.optimizer,
        )
        return self.gradients.around(loss)

    def before_batch(self, learner: Learner | Floor, batch: Batch) -> None:
        """Predict a stream batch that is to be learned next, if asked."""
        if self.score is not None:
            began = learner.batches_seen > 0
            self._predictions = predictions_of(learner, batch.inputs, len(batch), began=began)

    def after_batch(self, moment: Record, labels: Tensor, *, evaluated: bool) -> list[Record]:
        """What is worth recording after a stream batch with these labels."""
        records = [{**ratios.record(), **moment} for ratios in self._ratios]
        self._ratios.clear()
        if self.score is not None:
            self.score.update(labels.tolist(), self._predictions)
            records.append({**self.score.record(), **moment})
        if self.drift is not None and evaluated:
            records.append({**self.drift.record(), **moment})
        return records

    def at_end(self, moment: Record) -> list[Record]:
        """What is worth recording when the stream is over."""
        learner = self.learner
        rule = None if learner is None else learner.rule
        records: list[Record] = []
        if self.settings.spectrum and learner is not None and isinstance(rule, LayerwiseRule):
            spectra = shrinkage_spectrum(learner.model, rule, list(rule.layers))
            records.append({**spectrum_record(spectra), **moment})
        if self.score is not None:
            recall = sorted(self.score.recall.items())
            records.append({"kind": "recall", "recall": [list(pair) for pair in recall], **moment})
        return records

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what is recorded next."""
        return {
            "drift": None if self.drift is None else self.drift.state_dict(),
            "calls": None if self.gradients is None else self.gradients.calls,
            "prequential": None if self.score is None else self.score.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        if self.drift is not None:
            self.drift.load_state_dict(state["drift"])
        if self.gradients is not None:
            self.gradients.calls = state["calls"]
        if self.score is not None:
            self.score = Score.from_state(state["prequential"])
