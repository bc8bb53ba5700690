"""Diagnostics during a run: they look, and change nothing about what the run computes."""

from typing import Any

from proxreplay.data import Stream
from proxreplay.evaluation.diagnostics import (
    GradientRatios,
    Ratios,
    RepresentationDrift,
    shrinkage_spectrum,
    spectrum_record,
)
from proxreplay.experiments.config import DiagnosticsSettings
from proxreplay.experiments.results import Record
from proxreplay.proximal.rules.layerwise import LayerwiseRule
from proxreplay.replay import Learner, Loss


class Diagnostics:
    """What is switched on for a run, and what it has seen: an observer of the learner.

    Args:
        settings: what to look at.
        stream: its first task's test examples are those whose representation is followed.
    """

    learner: Learner

    def __init__(self, settings: DiagnosticsSettings, stream: Stream) -> None:
        self.settings = settings
        self.stream = stream
        self.drift: RepresentationDrift | None = None
        self.gradients: GradientRatios | None = None
        self._ratios: list[Ratios] = []

    def watch(self, learner: Learner, loss: Loss) -> Loss:
        """Begin to look; returns the loss of the learner, with its gradients looked at if asked."""
        self.learner = learner
        settings = self.settings
        if settings.drift is not None:
            inputs = learner.view(self.stream.tasks[0].test.inputs)
            self.drift = RepresentationDrift(
                learner.model, inputs, mode="paper" if settings.drift == "paper" else "authors"
            ).attach(learner.optimizer)
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

    def after_batch(self, moment: Record, *, evaluated: bool) -> list[Record]:
        """What is worth recording after a stream batch."""
        records = [{**ratios.record(), **moment} for ratios in self._ratios]
        self._ratios.clear()
        if self.drift is not None and evaluated:
            records.append({**self.drift.record(), **moment})
        return records

    def at_end(self, moment: Record) -> list[Record]:
        """What is worth recording when the stream is over."""
        rule = self.learner.rule
        if not self.settings.spectrum or not isinstance(rule, LayerwiseRule):
            return []
        spectra = shrinkage_spectrum(self.learner.model, rule, list(rule.layers))
        return [{**spectrum_record(spectra), **moment}]

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what is recorded next."""
        return {
            "drift": None if self.drift is None else self.drift.state_dict(),
            "calls": None if self.gradients is None else self.gradients.calls,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        if self.drift is not None:
            self.drift.load_state_dict(state["drift"])
        if self.gradients is not None:
            self.gradients.calls = state["calls"]
