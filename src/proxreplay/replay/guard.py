"""A step that cannot be made leaves no trace."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from proxreplay.batch import Inputs
from proxreplay.errors import DivergenceError, InputError
from proxreplay.proximal.layers.calling import Caller, logits_of
from proxreplay.proximal.layers.capture import untouched


class Guard:
    """Puts a model's buffers and the generators back if anything is raised inside.

    Weights are not looked at: nothing inside may change them.
    """

    def __init__(self, model: nn.Module, generators: Mapping[str, torch.Generator]) -> None:
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        self.generators = generators

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of which nothing is left if anything is raised."""
        self._before = {name: buffer.clone() for name, buffer in self.buffers.items()}
        states = {name: rng.get_state() for name, rng in self.generators.items()}
        try:
            with naming_batch_of_one():
                yield
        except BaseException:
            with torch.no_grad():
                for name, before in self._before.items():
                    self.buffers[name].copy_(before)
            for name, state in states.items():
                self.generators[name].set_state(state)
            raise

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


def _finite(tensor: Tensor) -> bool:
    return bool((tensor.coalesce().values() if tensor.is_sparse else tensor).isfinite().all())


def check_batch_of_one(model: nn.Module, inputs: Inputs, call: Caller | None = None) -> None:
    """Refuse one example that the model cannot be trained on alone; the model is left as it is."""
    with naming_batch_of_one(), untouched(model):
        model.train()
        logits_of(model, inputs, call)


@contextmanager
def naming_batch_of_one() -> Iterator[None]:
    """What torch says about a BatchNorm that sees one example becomes an error with a way out."""
    try:
        yield
    except ValueError as error:
        if "Expected more than 1 value per channel" not in str(error):
            raise
        raise InputError(
            "Learner: BatchNorm cannot be trained on one example alone; give at least two per "
            "batch, or only remember() this one."
        ) from error
