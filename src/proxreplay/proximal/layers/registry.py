"""The canonical shape of a layer, and which function brings each layer type into it.

Every layer that is linear in its parameters is written once, with rows ``Z: [groups, rows, d]``
and parameters ``W: [groups, out, d]`` (columns ``[weight | bias]``), as

    output[g, r] = W[g] z[g, r] (+ whatever does not depend on W).

A Linear has one group, a grouped convolution one per group, a BatchNorm one per channel with
``z = (x_hat, 1)``. A layer type contributes one function from its input to ``Z`` (without the bias
column) and, where its parameters are not simply ``weight`` and ``bias``, a `LinearMap` that says
where they live. Gram, shrinkage and preconditioning are shared.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, TypeVar

from torch import Tensor, nn

from proxreplay.errors import InputError
from proxreplay.proximal.gram.rows import DenseRows, Rows

RowsResult = Tensor | Rows | Mapping[str, Tensor | Rows]
RowsFunction = Callable[..., RowsResult]
_Function = TypeVar("_Function", bound=RowsFunction)


@dataclass(frozen=True)
class Part:
    """A parameter, or some of its leading rows, read as a matrix ``[groups, out, width]``."""

    parameter: str  # name inside the module, with dots for one that sits in a submodule
    start: int = 0  # first leading index that belongs to the map
    stop: int | None = None  # leading index after the last one; None for all
    # the parameter is stored as [in, out, *kernel] with the kernel reversed, as transposed
    # convolutions do, instead of [out, in, *kernel]
    swap: bool = False
    # the columns are (*kernel, in), as `PatchRows` have them, instead of (in, *kernel). Where
    # memory is in channels_last order nothing is then copied
    last: bool = False

    @property
    def whole(self) -> bool:
        """Whether all of the parameter belongs to the map."""
        return self.start == 0 and self.stop is None

    def read(self, tensor: Tensor, groups: int, width: int) -> Tensor:
        """The tensor (a parameter or its gradient) as ``[groups, out, width]``."""
        part = tensor if self.whole else tensor[self.start : self.stop]
        inputs = 1
        if self.swap:
            part = part.unflatten(0, (groups, -1)).transpose(1, 2)
            part = part.flip(tuple(range(3, part.ndim)))
            inputs = 2
        if self.last:
            part = part.movedim(inputs, -1)
        return part.reshape(groups, -1, width)

    def write_(self, tensor: Tensor, matrix: Tensor) -> None:
        """Put a matrix ``[groups, out, width]`` back where `read` took it from."""
        part = tensor if self.whole else tensor[self.start : self.stop]
        if self.last or self.swap:
            groups, out, _ = matrix.shape
            kernel = part.shape[2:]
            if self.last:
                matrix = matrix.reshape(groups, out, *kernel, -1).movedim(-1, 2)
            else:
                matrix = matrix.reshape(groups, out, -1, *kernel)
            if self.swap:
                matrix = matrix.flip(tuple(range(3, matrix.ndim))).transpose(1, 2)
            matrix = matrix.flatten(0, 1)
        part.copy_(matrix.reshape(part.shape))


@dataclass(frozen=True)
class LinearMap:
    """Where the parameters of one linear map live; a part that does not exist is left out."""

    weight: Part | None = Part("weight")  # None if the map has a bias only
    bias: Part | None = Part("bias")  # becomes the last column
    # the map picks rows of the weight, as an Embedding does: a group is a row, and its Gram the
    # number of times that it is picked
    lookup: bool = False


MapsFunction = Callable[[Any], Mapping[str, LinearMap] | str]


@dataclass(frozen=True)
class Layer:
    """What is known of a layer type."""

    # (module, *args, **kwargs) -> Z for one call, or one per map, by the map's name
    rows: RowsFunction
    # the module's linear maps by name; a layer that is one map calls it "". A module that cannot be
    # treated has a reason instead
    maps: MapsFunction


FORWARD = {"forward", "_conv_forward", "_apply_instance_norm"}  # what rows functions stand for
_LAYERS: dict[type[nn.Module], Layer] = {}
_NAMED: dict[str, Layer] = {}

# By a framework's name, the module that registers its layers. It is imported when a model first
# holds a class of that framework, which is imported then; nothing here imports a framework.
ADAPTERS = {"transformers": "proxreplay.integrations.transformers_layers"}


def register_layer(
    *types: type[nn.Module] | str, maps: LinearMap | MapsFunction | None = None
) -> Callable[[_Function], _Function]:
    """Teach the gradient rules a layer type, and those derived from it that share its ``forward``.

    The decorated function takes the module and the arguments of its call, under the names that
    ``forward`` gives them, and returns ``Z`` as ``[groups, rows, d]``, so that
    ``output[g, r] = W[g] z[g, r]`` with ``W`` the module's ``weight`` read as ``[groups, out, d]``.
    A ``bias`` becomes the last column by itself.

    Args:
        types: the module types; or the full names of classes that are not to be imported, such as
            ``"package.module.Class"``, in which ``*`` stands for anything.
        maps: where the parameters live, if not in ``weight`` and ``bias``; a function from the
            module to named maps if the layer holds several, whose rows are then returned by name.
    """
    of = maps if callable(maps) else _always(maps or LinearMap())

    def register(function: _Function) -> _Function:
        for layer_type in types:
            if isinstance(layer_type, str):
                _NAMED[layer_type] = Layer(function, of)
            else:
                _LAYERS[layer_type] = Layer(function, of)
        return function

    return register


def find_layer(module: nn.Module) -> Layer | None:
    """What is registered for the module's type or its nearest ancestor."""
    return next(filter(None, map(_registered, type(module).__mro__)), None)


def _registered(kind: type) -> Layer | None:
    """What is registered for a class itself, by type or by name."""
    if kind in _LAYERS:
        return _LAYERS[kind]
    package = kind.__module__.partition(".")[0]
    if package in ADAPTERS:
        import_module(ADAPTERS[package])
    elif package in ("builtins", "torch"):
        return None
    name = f"{kind.__module__}.{kind.__qualname__}"
    return next((_NAMED[pattern] for pattern in _NAMED if fnmatchcase(name, pattern)), None)


def overriding(module: nn.Module) -> str | None:
    """Why a module cannot be treated as the registered type it derives from, if it cannot.

    With a ``forward`` of its own its rows may be others. A class that knows better says
    ``treated_as = nn.Linear``.
    """
    for ancestor in type(module).__mro__:
        if _registered(ancestor) is not None or "treated_as" in vars(ancestor):
            return None
        if own := FORWARD & vars(ancestor).keys():
            break
    found = (kind for kind in type(module).__mro__ if _registered(kind) is not None)
    base = next(found, None)
    if base is None:
        return None
    name = type(module).__name__
    return (
        f"{_full_name(ancestor)} overrides {min(own)} of {_full_name(base)}, so it may compute "
        f"something else. Teach it with register_layer({name}); or, if {name} is linear in the "
        f"same rows, say so with {name}.treated_as = {_full_name(base)}."
    )


def _full_name(kind: type) -> str:
    """With the module, since a class may be called like the one it derives from."""
    public = kind.__module__.startswith("torch.nn.modules.")
    return f"{'torch.nn' if public else kind.__module__}.{kind.__qualname__}"


def rows_by_map(result: RowsResult) -> dict[str, Rows]:
    """What a rows function returned, by the name of the map; a tensor is taken as dense rows."""
    named = result if isinstance(result, Mapping) else {"": result}
    return {name: _as_rows(value) for name, value in named.items()}


def _as_rows(value: Tensor | Rows) -> Rows:
    if not isinstance(value, Tensor):
        return value
    if value.ndim != 3:
        raise InputError(
            f"register_layer: a rows function returned a tensor of shape {tuple(value.shape)}; "
            "rows are [groups, rows, d]."
        )
    return DenseRows(value)


def _always(one: LinearMap) -> MapsFunction:
    return lambda module: {"": one}
