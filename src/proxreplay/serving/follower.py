"""A reader of a folder that another process learns in: it follows the snapshots."""

import logging
import threading
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray
from torch import Tensor

from proxreplay.errors import CheckpointError
from proxreplay.replay.learner import Learner
from proxreplay.serving.folder import load_newest
from proxreplay.serving.snapshots import Snapshots

log = logging.getLogger(__name__)


class Follower:
    """Predicts with the newest intact snapshot of a folder; never writes, never locks.

    Args:
        folder: of a `DurableLearner`.
        learner: composed as the one that is followed; its state is replaced.
    """

    def __init__(self, folder: Path | str, learner: Learner) -> None:
        self.folder = Path(folder)
        self.learner = learner
        self.snapshots = Snapshots(self.folder)
        self.version = -1
        self._updating = threading.Lock()
        self.update()
        if self.version < 0:
            raise CheckpointError(f"{self.folder}: there is no intact snapshot to follow.")

    @classmethod
    def open(cls, folder: Path | str, *parts: Any, **further: Any) -> Self:
        """Follow a folder without a learner at hand, see `Learner.load`."""
        return cls(folder, load_newest(Path(folder), *parts, **further))

    def update(self) -> bool:
        """Take over a newer snapshot if there is one; says whether there was."""
        with self._updating:
            for sequence in self.snapshots.sequences():
                if sequence <= self.version:
                    return False
                try:
                    state = self.snapshots.load(sequence)
                except CheckpointError as error:  # damaged, or removed by the writer meanwhile
                    log.warning("%s", error)
                    continue
                self.learner.load_state_dict(state)
                self.version = sequence
                return True
            return False

    def predict(self, x: Any) -> NDArray[Any]:
        """See `Learner.predict`."""
        return self.learner.predict(x)

    def predict_proba(self, x: Any) -> Tensor:
        """See `Learner.predict_proba`."""
        return self.learner.predict_proba(x)
