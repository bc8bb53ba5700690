"""Gradients lent to a rule for a moment, as diagnostics of rules need it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def borrowed_gradients(model: nn.Module, gradients: Mapping[str, Tensor]) -> Iterator[None]:
    """Put copies of these gradients, by parameter, in place; on leaving the old ones are back."""
    parameters = dict(model.named_parameters())
    before = {name: parameter.grad for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].detach().clone() if name in gradients else None
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]
