"""What is remembered: examples in preallocated tensors, and who stays when there is no room."""

import heapq
from typing import Any

import torch
from torch import Tensor

from proxreplay.batch import Batch
from proxreplay.errors import InputError


class Storage:
    """Rows of tensors at slots ``0 .. len-1`` without gaps; grows in chunks."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.size = 0

    def append(self, rows: dict[str, Tensor]) -> int:
        """Store one row of every field; returns its slot."""
        if not self.tensors:
            self.tensors = {k: v.new_empty((64, *v.shape)) for k, v in rows.items()}
        slot = self.size
        if slot == len(next(iter(self.tensors.values()))):
            self.tensors = {
                k: torch.cat([v, v.new_empty(v.shape)]) for k, v in self.tensors.items()
            }
        for name, value in rows.items():
            self.tensors[name][slot] = value
        self.size += 1
        return slot

    def remove(self, slot: int) -> int:
        """Fill the slot with the last row; returns the slot that row came from."""
        last = self.size - 1
        if slot != last:
            for tensor in self.tensors.values():
                tensor[slot] = tensor[last]
        self.size = last
        return last


class ClassBalancedMemory:
    """A uniform sample of every class's stream so far, with equal quotas that adapt to new classes.

    Every example gets a weight ~ U(0, 1) on arrival; each class keeps the largest of its weights.
    With ``k`` classes seen, the quota of a class is ``floor(capacity / k)``, plus one for the
    first ``capacity mod k`` labels. Unused quota is not lent to other classes.

    Args:
        capacity: how many examples at the most.

    >>> memory = ClassBalancedMemory(capacity=4)
    >>> rng = torch.Generator().manual_seed(0)
    >>> memory.add(Batch(torch.arange(6).view(6, 1), torch.tensor([0, 0, 0, 0, 0, 7])), rng)
    >>> memory.class_counts
    {0: 2, 7: 1}
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InputError(f"ClassBalancedMemory: capacity={capacity}; give at least 1.")
        self.capacity = capacity
        self._storage = Storage()
        self._heaps: dict[
            int, list[tuple[float, int]]
        ] = {}  # label -> (weight, id), smallest first
        self._slots: dict[int, int] = {}  # id -> slot
        self._ids: list[int] = []  # slot -> id
        self._next_id = 0

    def __len__(self) -> int:
        return self._storage.size

    @property
    def class_counts(self) -> dict[int, int]:
        """How many examples of each class are stored."""
        return {label: len(heap) for label, heap in sorted(self._heaps.items())}

    def quotas(self) -> dict[int, int]:
        """How many examples each class seen so far may keep."""
        share, rest = divmod(self.capacity, len(self._heaps))
        return {label: share + (i < rest) for i, label in enumerate(sorted(self._heaps))}

    def add(self, batch: Batch, generator: torch.Generator) -> None:
        """Offer a batch to the memory; ``generator`` draws the weights."""
        weights = torch.rand(len(batch), generator=generator, dtype=torch.float64).tolist()
        labels = batch.labels.tolist()
        newcomers = set(labels) - set(self._heaps)
        for label in newcomers:
            self._heaps[label] = []
        quotas = self.quotas()
        if newcomers:
            for label, heap in self._heaps.items():
                while len(heap) > quotas[label]:
                    self._forget(heapq.heappop(heap)[1])
        for i, (label, weight) in enumerate(zip(labels, weights, strict=True)):
            heap = self._heaps[label]
            if len(heap) == quotas[label]:
                if not heap or heap[0][0] >= weight:
                    continue
                self._forget(heapq.heappop(heap)[1])
            heapq.heappush(heap, (weight, self._remember(batch, i)))

    def sample(self, n: int, generator: torch.Generator) -> Batch:
        """``n`` examples (all, if fewer are stored), uniformly and without replacement."""
        slots = torch.randperm(len(self), generator=generator)[:n]
        return self._batch(slots)

    def inputs(self, n: int | None = None, generator: torch.Generator | None = None) -> Tensor:
        """The stored inputs, all or a random ``n``, for a refresh."""
        if n is None or n >= len(self):
            return self._batch(torch.arange(len(self))).inputs
        return self._batch(torch.randperm(len(self), generator=generator)[:n]).inputs

    def _batch(self, slots: Tensor) -> Batch:
        fields: dict[str, Any] = {k: v[slots] for k, v in self._storage.tensors.items()}
        return Batch(fields.pop("inputs"), fields.pop("labels"), extras=fields)

    def _remember(self, batch: Batch, i: int) -> int:
        row = {"inputs": batch.inputs[i], "labels": batch.labels[i]}
        row |= {name: tensor[i] for name, tensor in batch.extras.items()}
        identity, self._next_id = self._next_id, self._next_id + 1
        self._slots[identity] = self._storage.append(row)
        self._ids.append(identity)
        return identity

    def _forget(self, identity: int) -> None:
        slot = self._slots.pop(identity)
        self._storage.remove(slot)
        moved = self._ids.pop()
        if moved != identity:
            self._ids[slot] = moved
            self._slots[moved] = slot
