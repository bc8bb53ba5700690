"""How a network was built, kept beside it: a saved learner can then be loaded without code.

Only proxreplay's own networks have a recipe; names in a file never decide which code is imported.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import nn

from proxreplay.errors import InputError

_P = ParamSpec("_P")
_Network = TypeVar("_Network", bound=nn.Module)

_BUILDERS: dict[str, Callable[..., nn.Module]] = {}
_KEPT_AS = "_proxreplay_recipe"


def recorded(build: Callable[_P, _Network]) -> Callable[_P, _Network]:
    """Keep name and arguments of a builder with every network it builds."""
    signature = inspect.signature(build)

    @functools.wraps(build)
    def building(*args: _P.args, **kwargs: _P.kwargs) -> _Network:
        network = build(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = {k: list(v) if isinstance(v, tuple) else v for k, v in bound.arguments.items()}
        setattr(network, _KEPT_AS, {"network": build.__name__, "arguments": arguments})
        return network

    _BUILDERS[build.__name__] = building
    return building


def recipe_of(network: nn.Module) -> dict[str, Any] | None:
    """How a network was built; None if proxreplay did not build it.

    >>> from proxreplay.models import mlp
    >>> recipe_of(mlp(64))
    {'network': 'mlp', 'arguments': {'in_features': 64, 'num_classes': None, 'hidden': [256, 256]}}
    """
    recipe: dict[str, Any] | None = getattr(network, _KEPT_AS, None)
    return recipe


def build_again(recipe: dict[str, Any]) -> nn.Module:
    """A fresh network from a recipe."""
    name = recipe.get("network")
    if name not in _BUILDERS:
        raise InputError(f"'{name}' is not one of proxreplay's networks: {', '.join(_BUILDERS)}.")
    return _BUILDERS[name](**recipe["arguments"])
