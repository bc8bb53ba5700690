"""How each layer type turns the gradient at its output into a Gram matrix of its own.

With rows ``D: [groups, rows, out]`` of the gradient at ``output[g, r] = W[g] z[g, r]``, what a
two-sided rule needs is ``D'D: [groups, out, out]`` and the number of rows.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from proxreplay.proximal.gram.rows import self_product, widened

OutputRows = Callable[[Any, Tensor], Tensor]
_Function = TypeVar("_Function", bound=OutputRows)
_OUTPUTS: dict[type[nn.Module], OutputRows] = {}


def register_output(*types: type[nn.Module]) -> Callable[[_Function], _Function]:
    """Teach two-sided rules how the output of a layer type is laid out.

    The decorated function takes the module and the gradient at its output, examples first, and
    returns it as ``[groups, rows, out]``, so that ``output[g, r] = W[g] z[g, r]`` with the groups
    that `register_layer` knows. Layers without one are treated from the inputs' side alone.
    """

    def register(function: _Function) -> _Function:
        _OUTPUTS.update(dict.fromkeys(types, function))
        return function

    return register


def find_output(module: nn.Module) -> OutputRows | None:
    """What is registered for the module's type or its nearest ancestor."""
    found = (_OUTPUTS[ancestor] for ancestor in type(module).__mro__ if ancestor in _OUTPUTS)
    return next(found, None)


def gradient_gram(D: Tensor) -> Tensor:
    """``D'D: [groups, out, out]`` of rows ``[groups, rows, out]``."""
    D = widened(D)
    if D.shape[2] == 1:
        return D.square().sum(dim=1, keepdim=True)
    return self_product(D)


@register_output(nn.Linear)
def linear_output(layer: nn.Linear, gradient: Tensor) -> Tensor:
    """One row for every leading position."""
    return gradient.reshape(1, -1, gradient.shape[-1])


@register_output(_ConvNd)
def convolution_output(layer: _ConvNd, gradient: Tensor) -> Tensor:
    """One row for every position, one group for every group of channels."""
    if gradient.ndim == len(layer.kernel_size) + 1:
        gradient = gradient[None]
    last = gradient.movedim(1, -1).reshape(-1, layer.groups, layer.out_channels // layer.groups)
    return last.transpose(0, 1)


@register_output(_BatchNorm, nn.GroupNorm)
def channel_output(layer: nn.Module, gradient: Tensor) -> Tensor:
    """One group for every channel."""
    return gradient.movedim(1, -1).flatten(0, -2).T[:, :, None]  # as memory lies, channels last


@register_output(_InstanceNorm)
def instancenorm_output(layer: _InstanceNorm, gradient: Tensor) -> Tensor:
    """One group for every channel; examples may be missing."""
    single = gradient.ndim < layer._get_no_batch_dim() + 1
    return channel_output(layer, gradient[None] if single else gradient)


@register_output(nn.LayerNorm, nn.RMSNorm)
def element_output(layer: nn.LayerNorm | nn.RMSNorm, gradient: Tensor) -> Tensor:
    """One group for every element of ``normalized_shape``."""
    elements = gradient.shape[-len(layer.normalized_shape) :].numel()
    return gradient.reshape(-1, elements).T[:, :, None]
