"""The training step through ``torch.compile``, for those who ask for it."""

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from proxreplay.errors import InputError
from proxreplay.models.heads import GrowingHead


def compile_(model: nn.Module, device: torch.device) -> None:
    """Let ``torch.compile`` take over the largest parts of a model that have no growing head.

    With a growing head in it, a part would be compiled again each time the head grows.

    Args:
        model: compiled in place; it keeps its parameters and names.
        device: where it is.
    """
    check_compiler(device)
    for part in parts_that_stay(model):
        part._compiled_call_impl = torch.compile(_calling(part))  # as Module.compile does


def _calling(part: nn.Module) -> Callable[..., Any]:
    """A call of a module from code that is not torch's own, which torch would not compile."""
    return lambda *args, **kwargs: part._call_impl(*args, **kwargs)


def parts_that_stay(model: nn.Module) -> Iterator[nn.Module]:
    """The largest submodules without a growing head inside."""
    if not any(isinstance(module, GrowingHead) for module in model.modules()):
        yield model
    else:
        for child in model.children():
            yield from parts_that_stay(child)


def check_compiler(device: torch.device) -> None:
    """Refuse where torch would find nothing to compile with, before anything is learned."""
    if device.type != "cpu":
        return
    named = os.environ.get("CXX")
    candidates = [named] if named else ["g++", "clang++"]
    if not any(shutil.which(candidate) for candidate in candidates):
        raise InputError(
            f"compile=True needs a C++ compiler, but there is no {' or '.join(candidates)}; "
            "install one, name it in CXX, or leave compile=False."
        )
