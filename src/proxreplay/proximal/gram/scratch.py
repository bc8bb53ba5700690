"""Memory for what is only needed in between, used again instead of asked for again.

Large tensors that come and go make the operating system hand out fresh pages every time: writing to
those took longer than the products themselves (docs/speed.md). Inside of `reusing`, `scratch` gives
the same memory for the same use.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod

import torch
from torch import Tensor

_Key = tuple[str, torch.dtype, torch.device]
_buffers: ContextVar[dict[_Key, Tensor] | None] = ContextVar("buffers", default=None)


@contextmanager
def reusing() -> Iterator[None]:
    """Keep the memory that `scratch` gives until leaving; inside of another one, until that."""
    if _buffers.get() is not None:
        yield
        return
    token = _buffers.set({})
    try:
        yield
    finally:
        _buffers.reset(token)


def scratch(use: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """A tensor with any values, to be overwritten by the next call for the same use.

    Args:
        use: what it is for; results of two uses are needed at the same time, of one never.
        shape: of the tensor.
        like: gives dtype and device.
    """
    buffers = _buffers.get()
    if buffers is None:
        return like.new_empty(shape)
    key, elements = (use, like.dtype, like.device), prod(shape)
    if key not in buffers or len(buffers[key]) < elements:
        buffers[key] = like.new_empty(elements)
    return buffers[key][:elements].view(*shape)
