"""Choosing layers by name or by type, with an answer to misspelt names."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

from torch import nn

from proxreplay.errors import InputError
from proxreplay.proximal.layers.registry import find_layer

Selector = str | type[nn.Module]
T = TypeVar("T")


def join(*names: str) -> str:
    """Names with dots between them; empty ones are left out."""
    return ".".join(name for name in names if name)


def check_selectors(model: nn.Module, selectors: Iterable[Selector], option: str) -> None:
    """Refuse names that no module has and types that no module is, with the nearest valid name."""
    modules = dict(model.named_modules())
    names = {*modules, *(site for site in _map_names(modules))} - {""}
    for selector in selectors:
        if isinstance(selector, str):
            if selector not in names:
                near = get_close_matches(selector, names, n=1)
                hint = f"did you mean '{near[0]}'?" if near else f"names are {sorted(names)}."
                raise InputError(f"{option}: the model has no module '{selector}'; {hint}")
        elif not any(isinstance(module, selector) for module in modules.values()):
            kinds = sorted({type(module).__name__ for module in modules.values()})
            raise InputError(
                f"{option}: the model has no {selector.__name__}; its types are {kinds}."
            )


def selected(selectors: Iterable[Selector], name: str, module: nn.Module) -> bool:
    """Whether one of the selectors is the module's type or the name of it or of what holds it."""
    return any(
        name == selector or name.startswith(f"{selector}.")
        if isinstance(selector, str)
        else isinstance(module, selector)
        for selector in selectors
    )


def override_of(overrides: Mapping[Selector, T], name: str, module: nn.Module, default: T) -> T:
    """The value for one layer: by the longest name that fits, else by its nearest type."""
    names = [key for key in overrides if isinstance(key, str) and selected([key], name, module)]
    if names:
        return overrides[max(names, key=len)]
    for ancestor in type(module).__mro__:
        if ancestor in overrides:
            return overrides[ancestor]
    return default


def _map_names(modules: Mapping[str, nn.Module]) -> Iterable[str]:
    for name, module in modules.items():
        layer = find_layer(module)
        maps = module._parameters if layer is None else layer.maps(module)
        if not isinstance(maps, str):
            yield from (join(name, one) for one in maps)
