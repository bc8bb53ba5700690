"""Where a learner's model lives: device, order of memory (channels_last), ``torch.compile``."""

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from proxreplay.batch import Inputs, each
from proxreplay.errors import InputError
from proxreplay.models.heads import GrowingHead

log = logging.getLogger(__name__)

# Below this many input channels the backward pass of a strided 1x1 convolution in channels_last
# order writes past its buffers on the CPU (seen with torch 2.13: 2 to 7 channels).
_SAFE_CHANNELS = 8


@dataclass(frozen=True)
class Placement:
    """Where a model is and in which form it takes its inputs."""

    device: torch.device  # of the model
    dtype: torch.dtype  # of its parameters; floating inputs are cast to it
    channels_last: bool  # whether 4-d tensors are kept in NHWC order

    @classmethod
    def of(cls, model: nn.Module, device: torch.device | str | None, channels_last: bool) -> Self:
        """The placement a model will have; see `place_`."""
        first = next(model.parameters(), None)
        if first is None:
            raise InputError("Learner: the model has no parameters; there is nothing to learn.")
        target = first.device if device is None else usable_device(device)
        floating = (p.dtype for p in model.parameters() if p.is_floating_point())
        ordered = channels_last and channels_last_is_safe(model, target)
        return cls(target, next(floating, torch.float32), ordered)

    def place_(self, models: Iterable[nn.Module]) -> None:
        """Move models there."""
        for model in models:
            model.to(self.device)
            if self.channels_last:
                # the stubs of torch do not know this overload
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def taken(self, inputs: Inputs) -> Inputs:
        """Inputs on the device of the model."""
        return each(inputs, lambda tensor: tensor.to(self.device))

    def ordered(self, inputs: Inputs) -> Inputs:
        """Inputs in the order of memory that the model is kept in."""
        if not self.channels_last:
            return inputs
        nhwc = torch.channels_last
        return each(inputs, lambda x: x.contiguous(memory_format=nhwc) if x.ndim == 4 else x)


def usable_device(device: torch.device | str) -> torch.device:
    """The device, if torch can use it here."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise InputError(
            f"device={device}: not usable here ({str(error).splitlines()[0]}); give one that torch "
            "has, such as cpu."
        ) from error
    return found


def channels_last_is_safe(model: nn.Module, device: torch.device) -> bool:
    """Whether torch's kernels can be trusted with channels_last for this model and device.

    >>> risky = nn.Conv2d(4, 8, kernel_size=1, stride=2)
    >>> channels_last_is_safe(risky, torch.device("cpu"))
    False
    """
    if device.type != "cpu":
        return True
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and _overruns(module):
            log.info(
                "channels_last is left off: %s is a strided 1x1 convolution with fewer than %d "
                "input channels, which torch's CPU kernel does not handle in that order",
                name or type(module).__name__,
                _SAFE_CHANNELS,
            )
            return False
    return True


def _overruns(layer: nn.Conv2d) -> bool:
    strided = max(layer.stride) > 1 and max(layer.kernel_size) == 1
    return strided and layer.in_channels // layer.groups < _SAFE_CHANNELS


def compile_(model: nn.Module, device: torch.device) -> None:
    """Let ``torch.compile`` take over the largest parts of a model that have no growing head.

    A part with a growing head in it would be compiled again each time the head grows. The model
    keeps its parameters and names.
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
