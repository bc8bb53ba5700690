"""Who is let in: a batch is judged as the learner will judge it, before it becomes an event."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from proxreplay.batch import Batch
from proxreplay.errors import InputError
from proxreplay.models.heads import GrowingHead
from proxreplay.replay.intake import Intake, Outputs
from proxreplay.replay.losses import SEPARATE
from proxreplay.serving.events import LEARN, REMEMBER, Event, Keys, keys_of

if TYPE_CHECKING:
    from proxreplay.replay.learner import Learner


class Admission:
    """What a learner will have met once everything that was let in is applied.

    A queue may lie between a request and the learner. This is the learner's own `Intake` at the
    end of that queue, so that a wrong request is refused at once and leaves no event.

    Args:
        learner: at rest: nothing is waiting to be applied.
    """

    def __init__(self, learner: "Learner") -> None:
        self._learner = learner
        own = learner.intake
        self._heads = [GrowingHead(1) for _ in learner.heads]
        for mine, its in zip(self._heads, learner.heads, strict=True):
            mine.grow(its.out_features, torch.Generator())
        self._intake = Intake(own.floating, self._heads)
        self._intake.load_state_dict(own.state_dict())
        self._remembered = len(learner.memory) > 0
        self._may_be_alone = False  # one example alone was tried out

    def admit(
        self, x: Any, y: Any, sample_weight: Any, keys: Keys, *, train: bool, token: bytes | None
    ) -> Event:
        """The event of a batch, as for `DurableLearner.learn`; raises as the learner would.

        A ``sample_weight`` of 0 is refused, because keys name every example.
        """
        body: dict[str, Any] = {}

        def check(batch: Batch) -> None:
            self._check(batch)
            if keys is not None:
                body["keys"] = keys_of(keys, len(batch))
            if sample_weight is not None and len(batch) != np.size(sample_weight):
                raise InputError("sample_weight of 0; leave those examples out of the batch.")

        batch = self._intake.admit(x, y, self._try_out, check, sample_weight).batch
        if len(batch) == 0:
            raise InputError("sample_weight is 0 for all examples; there is nothing to learn.")
        self._remembered = True
        for head in self._heads:
            head.grow(int(batch.labels.max()) + 1, torch.Generator())
        known = self._intake.labels
        labels = batch.labels if known.kind == "integers" else known.decode(batch.labels).tolist()
        body |= {"inputs": batch.inputs, "labels": labels}
        if batch.weight is not None:
            body["weights"] = batch.weight
        return Event(LEARN if train else REMEMBER, body, token=token)

    def _try_out(self, inputs: Any) -> Outputs:
        with self._learner._lock:
            return self._learner._try_out(inputs)

    def _check(self, batch: Batch) -> None:
        """As the learner does, but it waits for learning only if it has to try the model out."""
        learner = self._learner
        joined = self._remembered and not isinstance(learner.loss, SEPARATE)
        if len(batch) > 1 or joined or self._may_be_alone:
            return
        with learner._lock:
            learner._check(batch)
        self._may_be_alone = True
