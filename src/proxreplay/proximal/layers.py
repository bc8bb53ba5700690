"""How each layer type turns its input into rows ``Z``, and where its parameters live.

One canonical shape serves every layer that is linear in its parameters. With rows
``Z: [groups, rows, d]`` and parameters ``W: [groups, out, d]`` (columns ``[weight | bias]``) it is

    output[g, r] = W[g] z[g, r].

A Linear has one group, a grouped convolution one a group, a BatchNorm one a channel with
``z = (x_hat, 1)``. A layer type contributes one function from its input to ``Z`` (without the bias
column); Gram, shrinkage and preconditioning are shared.
"""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn
from torch.nn import functional as F

from proxreplay.proximal.gram import DenseRows, PatchRows, Rows

RowsFunction = Callable[..., Tensor | Rows]
_Function = TypeVar("_Function", bound=Callable[..., Tensor | Rows])

_LAYERS: dict[type[nn.Module], RowsFunction] = {}


def register_layer(*types: type[nn.Module]) -> Callable[[_Function], _Function]:
    """Teach the gradient rules a layer type.

    The decorated function takes the module and the arguments of its call and returns ``Z`` as
    ``[groups, rows, d]``, so that ``output[g, r] = W[g] z[g, r]`` with ``W`` the module's
    ``weight`` read as ``[groups, out, d]``. A ``bias`` becomes the last column by itself.
    """

    def register(function: _Function) -> _Function:
        for layer_type in types:
            _LAYERS[layer_type] = function
        return function

    return register


def find_layer(module: nn.Module) -> RowsFunction | None:
    """The function registered for the module's type or its nearest ancestor."""
    for ancestor in type(module).__mro__:
        if ancestor in _LAYERS:
            return _LAYERS[ancestor]
    return None


def as_rows(value: Tensor | Rows) -> Rows:
    """A tensor is taken as dense rows."""
    return DenseRows(value) if isinstance(value, Tensor) else value


@register_layer(nn.Linear)
def linear_rows(layer: nn.Linear, x: Tensor) -> Tensor:
    """``z = x``, one row for every leading position."""
    return x.reshape(1, -1, layer.in_features)


@register_layer(nn.Conv2d)
def conv2d_rows(layer: nn.Conv2d, x: Tensor) -> Rows:
    """``z`` = the patch under the kernel, one row for every output position."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    return PatchRows(
        padded,
        (kernel[0], kernel[1]),
        (stride[0], stride[1]),
        (dilation[0], dilation[1]),
        layer.groups,
    )


@register_layer(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batchnorm_rows(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """``z = (x - mean) / sqrt(var + eps)`` with running statistics, one group for every channel."""
    normalised = F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)
    return normalised.transpose(0, 1).reshape(layer.num_features, -1, 1)
