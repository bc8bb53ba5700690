"""How a model is called with inputs of any form, and where its logits are."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from proxreplay.errors import InputError

Caller = Callable[[nn.Module, Any], Any]
"""From a model and inputs to its output: logits, or an object with ``logits``."""


def with_arguments(model: nn.Module, inputs: Any) -> Any:
    """Call a model: a tensor is its argument, a tuple its arguments, a dict its keywords."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def logits_of(model: nn.Module, inputs: Any, call: Caller | None = None) -> Tensor:
    """What a model says about inputs, ``[n, classes]``.

    Args:
        model: any module.
        inputs: a tensor, or a dict or tuple of tensors.
        call: how the model is called; None for `with_arguments`.
    """
    output = with_arguments(model, inputs) if call is None else call(model, inputs)
    logits = logits_in(output)
    if logits is None:
        raise InputError(
            f"{type(model).__name__} gives a {type(output).__name__} without logits; say how to "
            "get them: call=lambda model, inputs: model(**inputs)[0]."
        )
    return logits


def logits_in(output: Any) -> Tensor | None:
    """The logits in what a model gives: a tensor, or an object or dict with ``logits``."""
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else None
    logits = getattr(output, "logits", logits)
    return logits if isinstance(logits, Tensor) else None


class Called(nn.Module):
    """A model as losses call it, ``model(inputs) -> logits``, for inputs of any form.

    Args:
        model: shares its parameters.
        call: see `logits_of`.

    >>> import torch
    >>> both = Called(nn.Bilinear(2, 3, 4))
    >>> both((torch.ones(5, 2), torch.ones(5, 3))).shape
    torch.Size([5, 4])
    """

    def __init__(self, model: nn.Module, call: Caller | None = None) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, inputs: Any) -> Tensor:
        """The logits, ``[n, classes]``."""
        return logits_of(self.model, inputs, self.call)


def logits_without_trace(model: nn.Module, inputs: Any, call: Caller | None = None) -> Tensor:
    """As `logits_of`, on copies of the buffers: running statistics stay as they are."""
    buffers = {f"model.{name}": buffer.clone() for name, buffer in model.named_buffers()}
    logits: Tensor = functional_call(Called(model, call), buffers, (inputs,))
    return logits
