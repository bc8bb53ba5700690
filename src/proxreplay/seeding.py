"""One seed, many independent generators: methods are compared on the same stream and weights."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(seed: int, purpose: str) -> int:
    """A 63-bit seed for one purpose; different purposes never share a random sequence."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(seed: int, purpose: str) -> torch.Generator:
    """A CPU generator for one purpose (``order``, ``memory``, ``augmentation``, ...)."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose))


@contextmanager
def seeded(seed: int, purpose: str) -> Iterator[None]:
    """Run torch code that only knows the global generator, and leave that one as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(seed, purpose))
        yield
