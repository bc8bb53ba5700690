"""Hooks that belong to one module: a copy or a pickle of the module does not have them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn


class Watcher:
    """Something that looks at the passes of a model, and may look away."""

    busy = False  # passes are not looked at

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Passes inside are not looked at."""
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before


class ModuleHook:
    """A hook for one module: copies of the module do not have it."""

    def __init__(self, module: nn.Module, then: Callable[..., None], *first: str) -> None:
        self.module = module
        self.then = then
        self.first = first
        if "torch._dynamo" in sys.modules:
            self.then = partial(_uncompiled(), then)

    def __call__(self, module: nn.Module, *rest: Any) -> None:
        """Hand on a call of the module."""
        if module is self.module:
            self.then(*self.first, module, *rest)

    def __reduce__(self) -> tuple[type["_NoHook"], tuple[()]]:
        return _NoHook, ()


@cache
def _uncompiled() -> Callable[..., None]:
    """A call that `torch.compile` does not look into; to make it costs more than many a hook."""

    def call(then: Callable[..., None], *args: Any) -> None:
        then(*args)

    uncompiled: Callable[..., None] = torch.compiler.disable(call)
    return uncompiled


class _NoHook:
    """What a copy has in place of a hook."""

    def __call__(self, *anything: Any) -> None:
        """Nothing."""
