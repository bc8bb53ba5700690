"""A step that cannot be made leaves no trace."""

from collections.abc import Mapping
from types import TracebackType

import torch
from torch import Tensor, nn

from proxreplay.batch import Inputs
from proxreplay.errors import DivergenceError, InputError
from proxreplay.proximal.layers.calling import Caller, logits_of
from proxreplay.proximal.layers.capture import untouched

BATCH_OF_ONE = "Expected more than 1 value per channel"


class Guard:
    """Puts a model's buffers and the generators back if anything is raised inside.

    Weights are not looked at: nothing inside may change them.
    """

    def __init__(self, model: nn.Module, generators: Mapping[str, torch.Generator]) -> None:
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        self.generators = generators

    def __enter__(self) -> None:
        self._before = {name: buffer.clone() for name, buffer in self.buffers.items()}
        self._states = {name: rng.get_state() for name, rng in self.generators.items()}

    def check_finite(self, loss: Tensor) -> None:
        """Refuse a step whose loss, gradients or new buffers hold NaN or infinity."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        tensors = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        tensors += [buffer for buffer in self.buffers.values() if buffer.is_floating_point()]
        norms = torch._foreach_norm(tensors)  # may overflow: then what follows decides
        if _finite(sum((norm.to(loss.device) for norm in norms), start=loss.detach())):
            return
        broken = [
            f"the gradient of '{name}'"
            for name, p in self.parameters.items()
            if p.grad is not None and not _finite(p.grad)
        ] + [
            f"the buffer '{name}'"
            for name, buffer in self.buffers.items()
            if not _finite(buffer) and _finite(self._before[name])  # a mask may hold infinity
        ]
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
                for name, before in self._before.items():
                    self.buffers[name].copy_(before)
            for name, state in self._states.items():
                self.generators[name].set_state(state)
        self._before, self._states = {}, {}
        if isinstance(error, ValueError) and BATCH_OF_ONE in str(error):
            raise _batch_of_one() from error


def _finite(tensor: Tensor) -> bool:
    return bool((tensor.coalesce().values() if tensor.is_sparse else tensor).isfinite().all())


def check_batch_of_one(model: nn.Module, inputs: Inputs, call: Caller | None = None) -> None:
    """Refuse one example that the model cannot be trained on alone; the model is left as it is."""
    try:
        with untouched(model):
            model.train()
            logits_of(model, inputs, call)
    except ValueError as error:
        if BATCH_OF_ONE in str(error):
            raise _batch_of_one() from error
        raise


def _batch_of_one() -> InputError:
    return InputError(
        "Learner: BatchNorm cannot be trained on one example alone; give at least two per batch, "
        "or only remember() this one."
    )
