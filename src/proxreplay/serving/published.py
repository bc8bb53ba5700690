"""What predictions are made with: a copy of the learner that nothing changes any more."""

import copy
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from proxreplay.errors import StoppedError
from proxreplay.models.heads import GrowingHead
from proxreplay.replay.predicting import Predictor

if TYPE_CHECKING:
    from proxreplay.replay.learner import Learner


@dataclass(frozen=True)
class Prediction:
    """What the model says about some inputs."""

    labels: list[Any]  # the most probable one of every input
    probabilities: list[list[float]]  # [n][classes]
    classes: list[Any]  # the label that each column stands for; None for a forgotten one
    version: int  # sequence of the snapshot or rollback that the model comes from
    sequence: int  # of the newest event that the model has learned


@dataclass(frozen=True)
class Published:
    """A learner at one moment, to predict with."""

    predictor: Predictor  # its own copy of the model, of the average and of the companion
    sequence: int  # of the newest event in it
    version: int  # of the snapshot or rollback behind it

    @classmethod
    def of(cls, learner: "Learner", sequence: int, version: int) -> "Published":
        """A copy of a learner as it is."""
        with learner._lock:
            learner.model.zero_grad(set_to_none=True)  # gradients need not be copied
            model, averaging = copy.deepcopy((learner.model, learner.averaging))
            predictor = Predictor.__new__(Predictor)
            own = {name: getattr(learner, name) for name in ("transform", "channels_last", "call")}
            heads = [module for module in model.modules() if isinstance(module, GrowingHead)]
            intake = copy.copy(learner.intake)
            intake.heads = heads
            vars(predictor).update(
                own,
                model=model.eval(),
                averaging=averaging,
                companion=copy.copy(learner.companion),  # its tensors are replaced, never changed
                placement=learner.placement,
                heads=heads,
                intake=intake,
                _lock=threading.RLock(),
            )
        return cls(predictor, sequence, version)

    def predict(self, x: Any) -> Prediction:
        """Labels and probabilities of inputs ``[n, ...]``.

        Raises:
            InputError: they are not what the model takes, or it knows no label yet.
        """
        predictor = self.predictor
        with predictor._lock, torch.inference_mode():
            probabilities = predictor.predict_proba(x)
            if not bool(probabilities.isfinite().all()):
                raise StoppedError("the model's probabilities are not finite; roll back.")
            labels = predictor.intake.labels.decode(probabilities.argmax(dim=1)).tolist()
        return Prediction(
            labels, probabilities.tolist(), predictor.labels, self.version, self.sequence
        )
