"""Whether all processes hold the same: digests of everything that decides what happens next."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxreplay.batch import Batch
from proxreplay.distributed.processes import Processes
from proxreplay.errors import ProcessError

SHOWN = 5  # names in a message


def compare(processes: Processes, what: str, parts: Mapping[str, Any]) -> None:
    """Raise in all processes, naming the part, unless all hold the same.

    Args:
        processes: that are compared.
        what: the parts are of, for the message.
        parts: by name; nested dicts, lists, tensors, numbers, strings, generators and None.
    """
    if processes.alone:
        return
    mine = dict(digests(parts))
    whole = hashlib.sha256(repr(sorted(mine.items())).encode()).hexdigest()
    if len(set(processes.tell(whole))) == 1:
        return
    everyone = processes.tell(mine)
    for rank, theirs in enumerate(everyone):
        differing = [
            name for name in everyone[0] | theirs if everyone[0].get(name) != theirs.get(name)
        ]
        if differing:
            more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
            raise ProcessError(
                f"{what}: process {rank} of {processes.size} holds something else than process 0 "
                f"in {', '.join(differing[:SHOWN])}{more}. Start all processes with the same code, "
                "settings, seed, weights and data."
            )


def digests(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """A digest of every leaf, by its path."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from digests(one, f"{name}/{key}" if name else str(key))
    elif isinstance(value, torch.Generator):
        yield name, digest(value.get_state())
    elif isinstance(value, Tensor):
        yield name, digest(value)
    elif isinstance(value, Batch):
        yield from digests(vars(value), name)
    elif hasattr(value, "__array__"):
        array = np.asarray(value)
        yield name, _hash(array.tolist() if array.dtype == object else array.tobytes())
    elif isinstance(value, list | tuple) and any(isinstance(v, Tensor | Mapping) for v in value):
        yield from digests(dict(enumerate(value)), name)
    else:
        yield name, _hash(value)


def _hash(value: Any) -> str:
    return hashlib.sha256(value if isinstance(value, bytes) else repr(value).encode()).hexdigest()


def digest(tensor: Tensor) -> str:
    """That of a tensor's dtype, shape and bytes."""
    found = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    found.update(data.numpy().data)
    return found.hexdigest()
