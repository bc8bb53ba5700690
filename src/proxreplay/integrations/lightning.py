"""A callback for Lightning: a rule that is refreshed on a schedule.

    trainer = Trainer(callbacks=[RefreshCallback(memory, every=30)])

Its state is part of Lightning's checkpoints, so that a resumed fit goes on bit by bit.
"""

import sys
from typing import TYPE_CHECKING, Any

from proxreplay.errors import InputError
from proxreplay.integrations.refreshing import Refreshing
from proxreplay.integrations.versions import check_version

OLD_NAME = "pytorch_lightning"
if not TYPE_CHECKING and OLD_NAME in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback  # the trainer is of that name too

    check_version(OLD_NAME)
else:
    import lightning
    from lightning.pytorch import Callback

    check_version(lightning.__name__)


class RefreshCallback(Refreshing, Callback):
    """Attaches a rule when a fit begins, refreshes it every so many optimizer steps, detaches it.

    The arguments are those of `Refreshing`. ``rule`` is given the LightningModule, which is called
    with what ``inputs`` makes of a batch; for a network inside it,
    ``rule=lambda module: LPR(module.net)``.
    """

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the rule, or keep that of an earlier fit, and attach it to the optimizer."""
        if len(trainer.optimizers) != 1:
            raise InputError(
                f"RefreshCallback: {type(pl_module).__name__} has {len(trainer.optimizers)} "
                "optimizers; with several, call step_() of a rule yourself before their steps."
            )
        self.begin(pl_module, trainer.optimizers[0])

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        """Refresh if that is due; batches that only accumulate gradients are no steps."""
        self.before_step(trainer.global_step)

    def on_fit_end(self, *args: Any) -> None:
        """Leave the optimizer as it was."""
        self.end()

    on_exception = on_fit_end
