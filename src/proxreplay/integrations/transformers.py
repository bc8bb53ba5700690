"""A callback for the Trainer of Hugging Face transformers: a rule refreshed on a schedule.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[RefreshCallback(memory)])

Beside every checkpoint of the Trainer it saves its own state as ``proxreplay.safetensors``, so that
``trainer.train(resume_from_checkpoint=True)`` goes on bit by bit.
"""

from pathlib import Path
from typing import Any

import transformers
from transformers import TrainerCallback

from proxreplay.errors import CheckpointError
from proxreplay.integrations.refreshing import Refreshing
from proxreplay.integrations.versions import check_version
from proxreplay.serialization import load_state, save_state

check_version(transformers.__name__)
FILE = "proxreplay.safetensors"


class RefreshCallback(Refreshing, TrainerCallback):
    """Attaches a rule when training begins, refreshes it every so many steps, detaches it.

    The arguments are those of `Refreshing`. ``rule`` is given the Trainer's model.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the rule, or keep that of an earlier training, and attach it to the optimizer."""
        if state.global_step > 0 and self._waiting is None:
            named = args.resume_from_checkpoint
            folder = Path(named) if isinstance(named, str) else _folder(args, state)
            self.resume(folder, state.global_step)
        self.begin(kwargs["model"], kwargs["optimizer"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refresh if that is due; batches that only accumulate gradients are no steps."""
        self.before_step(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the state beside the Trainer's."""
        if args.should_save:
            parts = {"refreshing": self.state_dict(), "step": state.global_step}
            save_state(_folder(args, state) / FILE, parts)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the optimizer as it was."""
        self.end()

    def resume(self, folder: Path | str, step: int | None = None) -> None:
        """Go on from a checkpoint of the Trainer, wherever it is now.

        Args:
            folder: of the checkpoint.
            step: the step that it must be of; None for any.
        """
        file = Path(folder) / FILE
        if not file.exists():
            raise CheckpointError(
                f"RefreshCallback: there is no {file} with the rule's state at step {step}; if the "
                "checkpoint is elsewhere, call resume(folder) of the callback before train()."
            )
        saved = load_state(file)
        if step not in (None, saved["step"]):
            raise CheckpointError(f"{file}: is of step {saved['step']}, not of step {step}.")
        self.load_state_dict(saved["refreshing"])


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
