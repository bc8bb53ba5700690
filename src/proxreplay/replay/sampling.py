"""Uniform samples: of a stream whose length nobody knows, and of a memory."""

import heapq
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Group:
    """The examples that compete for the same places."""

    # (weight, id) of those stored, smallest first
    heap: list[tuple[float, int]] = field(default_factory=list)
    # the largest weight ever turned away. Only larger ones are let in, also where a removal has
    # left room, so that what is stored is always *all* examples above one weight: a uniform sample
    # of those seen and not removed
    bar: float = -math.inf

    def offer(self, weight: float, identity: int, quota: int) -> int | None:
        """Let an example in if its weight is large enough; returns the id that has to go."""
        if weight <= self.bar:
            return identity
        if len(self.heap) < quota:
            heapq.heappush(self.heap, (weight, identity))
            return None
        self.bar, loser = heapq.heappushpop(self.heap, (weight, identity))
        return loser

    def remove(self, ids: set[int]) -> None:
        """Take examples out; a group that nothing is left of starts anew."""
        self.heap = [entry for entry in self.heap if entry[1] not in ids]
        heapq.heapify(self.heap)
        if not self.heap:
            self.bar = -math.inf

    def shrink(self, quota: int) -> list[int]:
        """Turn the smallest weights away until the quota is met; returns their ids."""
        losers = []
        while len(self.heap) > quota:
            self.bar, loser = heapq.heappop(self.heap)
            losers.append(loser)
        return losers


def distinct(n: int, total: int, generator: torch.Generator) -> Tensor:
    """``n`` different numbers of ``0 .. total-1`` (all, if fewer), every ordered choice as likely.

    Draws among the next power of two and leaves out what is too large or was drawn before, which is
    exact and costs ``O(n)`` however large ``total`` is; sorts random keys where ``n`` is near it.

    >>> sorted(distinct(9, 3, torch.Generator()).tolist())
    [0, 1, 2]
    """
    if 2 * n > total:
        keys = torch.rand(total, dtype=torch.float64, generator=generator, device=generator.device)
        return keys.argsort()[:n]
    bits = (total - 1).bit_length()
    found: dict[int, None] = {}
    while len(found) < n:
        shape = (4 * (n - len(found)),)
        draws = torch.randint(1 << bits, shape, generator=generator, device=generator.device)
        found.update(dict.fromkeys(value for value in draws.tolist() if value < total))
    return torch.tensor(list(found)[:n])
