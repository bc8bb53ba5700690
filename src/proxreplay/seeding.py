"""One seed, many independent generators: methods are compared on the same stream and weights."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

alone = threading.RLock()
"""Held by code that borrows torch's global generators, which all threads share."""


def derive_seed(seed: int, purpose: str) -> int:
    """A 63-bit seed for one purpose; different purposes never share a random sequence."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(seed: int, purpose: str) -> torch.Generator:
    """A CPU generator for one purpose (``order``, ``memory``, ``augmentation``, ...)."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose))


@contextmanager
def seeded(seed: int, purpose: str, device: torch.device | None = None) -> Iterator[None]:
    """Run torch code that only knows the global generators, and leave those as they were.

    ``device`` is the only one that is used beside the CPU; None for all there are.
    """
    own = derive_seed(seed, purpose)
    if device is None:
        with torch.random.fork_rng():
            torch.manual_seed(own)
            yield
        return
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        # torch.manual_seed formats a stack trace for every kind of device that is absent.
        torch.default_generator.manual_seed(own)
        if devices:
            torch.cuda.manual_seed(own)
        yield
