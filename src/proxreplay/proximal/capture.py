"""Layer inputs during a forward pass; hooks, modes, buffers and RNG are always put back."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from proxreplay.errors import InputError

OnCall = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], None]


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluate the model inside; its modes, buffers and the RNG are as before on leaving."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {p.device for p in model.parameters() if p.device.type != "cpu"}
    try:
        with torch.random.fork_rng(devices=[d for d in devices if d.type == "cuda"]):
            model.eval()
            with torch.no_grad():
                yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@contextmanager
def watching(modules: Mapping[str, nn.Module], on_call: OnCall) -> Iterator[None]:
    """Call ``on_call(name, module, args, kwargs)`` before every forward of every module."""
    handles: list[Any] = []
    try:
        for name, module in modules.items():
            handles.append(
                module.register_forward_pre_hook(
                    lambda module, args, kwargs, name=name: on_call(name, module, args, kwargs),
                    with_kwargs=True,
                )
            )
        yield
    finally:
        for handle in handles:
            handle.remove()


def call(model: nn.Module, batch: Any) -> Any:
    """Call the model with a batch: a tensor, a tuple or a dict of its arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def count_samples(batch: Any) -> int:
    """The leading size of the first tensor in a batch."""
    values: Iterable[Any]
    if isinstance(batch, Tensor):
        return len(batch)
    if isinstance(batch, Mapping):
        values = batch.values()
    elif isinstance(batch, tuple | list):
        values = batch
    else:
        values = ()
    for value in values:
        if isinstance(value, Tensor) and value.ndim > 0:
            return len(value)
    raise InputError(
        f"refresh: a batch of type {type(batch).__name__} holds no tensor; give a tensor, a tuple "
        "of arguments or a dict of keyword arguments of the model."
    )
