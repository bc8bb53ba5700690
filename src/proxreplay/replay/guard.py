"""A step that cannot be made leaves no trace."""

import math
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from proxreplay.errors import DivergenceError, InputError
from proxreplay.proximal.layers.capture import untouched

BATCH_OF_ONE = "Expected more than 1 value per channel"


class Guard:
    """Puts a model's buffers and the generators back if anything is raised inside.

    Args:
        model: its weights are not looked at: nothing inside may change them.
        generators: by purpose.
    """

    def __init__(self, model: nn.Module, generators: Mapping[str, torch.Generator]) -> None:
        self.model = model
        self.generators = generators

    def __enter__(self) -> Self:
        named = self.model.named_buffers()
        self._buffers = {name: (buffer, buffer.clone()) for name, buffer in named}
        self._states = {name: rng.get_state() for name, rng in self.generators.items()}
        return self

    def check_finite(self, loss: Tensor) -> None:
        """Refuse a step whose loss, gradients or new buffers hold NaN or infinity."""
        found = {
            f"the gradient of '{name}'": p.grad.coalesce().values() if p.grad.is_sparse else p.grad
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }
        before = {f"the buffer '{name}'": kept for name, (_, kept) in self._buffers.items()}
        found |= {f"the buffer '{name}'": now for name, (now, _) in self._buffers.items()}
        floating = [t for t in found.values() if t.is_floating_point() and t.numel() > 0]
        largest = torch._foreach_norm(floating, math.inf)
        if _finite(torch.cat([x.detach().reshape(1) for x in (loss, *largest)])):
            return
        broken = [
            name
            for name, tensor in found.items()
            if not _finite(tensor) and _finite(before.get(name, loss.new_zeros(())))
        ]  # a mask may well hold infinity
        if not broken and _finite(loss):
            return
        also = f", and {broken[0]} is not finite" if broken else ""
        raise DivergenceError(
            f"Learner: the loss of this step is {float(loss.detach()):g}{also}; the step was not "
            "made. Lower the learning rate, or look at the size of the inputs; go on from an "
            "earlier saved state if the weights are too large already."
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            with torch.no_grad():
                for buffer, before in self._buffers.values():
                    buffer.copy_(before)
            for name, state in self._states.items():
                self.generators[name].set_state(state)
        del self._buffers, self._states
        if isinstance(error, ValueError) and BATCH_OF_ONE in str(error):
            raise _batch_of_one() from error


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def check_batch_of_one(model: nn.Module, inputs: Tensor) -> None:
    """Refuse one example that the model cannot be trained on alone; the model is left as it is."""
    try:
        with untouched(model):
            model.train()
            model(inputs)
    except ValueError as error:
        if BATCH_OF_ONE in str(error):
            raise _batch_of_one() from error
        raise


def _batch_of_one() -> InputError:
    return InputError(
        "Learner: BatchNorm cannot be trained on one example alone; give at least two per batch, "
        "or only remember() this one."
    )
