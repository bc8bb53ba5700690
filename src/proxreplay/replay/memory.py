"""What is remembered: who stays when there is no room, and fair draws from those who stayed.

Every memory here follows one rule. An example gets a weight on arrival, belongs to a group, and a
group keeps its ``quota`` largest weights:

    memory          group   weight      quota
    class-balanced  label   U(0, 1)     capacity shared equally by the labels seen
    reservoir       one     U(0, 1)     capacity
    ring            one     arrival     capacity
    unlimited       one     arrival     none
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from numbers import Integral
from operator import index
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from proxreplay.batch import Batch, Inputs, is_input, named, unnamed
from proxreplay.distributed import ALONE, Processes
from proxreplay.errors import InputError
from proxreplay.options import count
from proxreplay.replay.sampling import Group, distinct
from proxreplay.replay.sharding import ShardedStorage, storage_for

RESERVED = ("labels", "id", "position")


class Memory:
    """Examples from the stream that can be replayed, with what was stored beside them.

    Every example ever offered gets an id, counting up from 0. Stored beside inputs, labels and the
    extras of its batch are its ``id`` and its stream ``position`` (that of the batch, or how many
    batches were added before). The extra ``weight`` may come with some batches only: it is 1 for
    all other examples.

    A floating extra may grow in its last size (the logits of a growing head): what was stored
    earlier is padded with NaN. Everything else keeps the dtype and shape of the first batch.

    Args:
        capacity: how many examples at the most.
        capacity_bytes: instead of ``capacity``, how many bytes their rows may take.
        device: where the examples live; None for wherever the first batch is.
        shared_by: processes that keep a part of the examples each (docs/scale.md); None if this
            one keeps all.
    """

    limited: ClassVar[bool] = True

    def __init__(
        self,
        capacity: int | None = None,
        *,
        capacity_bytes: int | None = None,
        device: torch.device | str | None = None,
        shared_by: Processes | None = None,
    ) -> None:
        if self.limited and (capacity is None) == (capacity_bytes is None):
            raise InputError(
                f"{self._name}: capacity={capacity}, capacity_bytes={capacity_bytes}; give one of "
                "them, or take an UnlimitedMemory."
            )
        count(capacity=capacity, capacity_bytes=capacity_bytes)
        self.capacity = capacity
        self.capacity_bytes = capacity_bytes
        self._storage = storage_for(shared_by, device)
        self._groups: dict[int, Group] = {}
        self._quotas: dict[int, int] | None = None  # what the groups were last cut to
        self._counts: Counter[int] = Counter()
        self._next_id = 0
        self._batches = 0
        self._changes = 0

    def _group_of(self, label: int) -> int:
        """The group an example with this label competes in."""
        return 0

    def _weights(self, ids: range, generator: torch.Generator) -> list[float]:
        """The weights of examples that arrive; the larger ones stay."""
        draws = torch.rand(
            len(ids), dtype=torch.float64, generator=generator, device=generator.device
        )
        weights: list[float] = draws.tolist()
        return weights

    def quotas(self) -> dict[int, int]:
        """How many examples each group may keep: the label of a class, or 0 where all are one."""
        if self.capacity is None:
            return {}
        share, rest = divmod(self.capacity, max(1, len(self._groups)))
        return {group: share + (i < rest) for i, group in enumerate(sorted(self._groups))}

    def __len__(self) -> int:
        return len(self._storage)

    def __repr__(self) -> str:
        in_bytes = self.capacity_bytes is not None
        limit = f"capacity{'_bytes' * in_bytes}={self.capacity_bytes or self.capacity}"
        made = f"{self._name}({limit * self.limited})"
        held = f"{len(self)} examples of {len(self._counts)} classes"
        parts = "" if self.shared_by.alone else f" in each of {self.shared_by.size} processes"
        return f"{made}: {held}, {self.nbytes / 1e6:.1f} MB{parts}"

    def __contains__(self, identity: int) -> bool:
        """Whether the example with this id is stored."""
        return identity in self._storage.slots

    def __iter__(self) -> Iterator[Batch]:
        """Every example once, as `batches` of the default size."""
        return self.batches()

    @property
    def shared_by(self) -> Processes:
        """The processes that keep a part of the examples each; `ALONE` if this one keeps all."""
        return self._storage.processes if isinstance(self._storage, ShardedStorage) else ALONE

    @property
    def class_counts(self) -> dict[int, int]:
        """How many examples of each class are stored, by ascending label."""
        return dict(sorted(self._counts.items()))

    @property
    def nbytes(self) -> int:
        """Bytes allocated for the rows of the examples."""
        return self._storage.nbytes

    @property
    def row_nbytes(self) -> int:
        """Bytes of one example, as it is stored; 0 before there is any."""
        return self._storage.row_nbytes(self._storage.fields)

    @property
    def ids(self) -> Tensor:
        """The ids of the examples stored, ``[len]`` int64, in the order of `batches`."""
        return torch.tensor(self._storage.ids, dtype=torch.int64)

    @property
    def next_id(self) -> int:
        """The id that the next example gets."""
        return self._next_id

    def skip_ids(self, next_id: int) -> None:
        """Give out no id below ``next_id`` from now on.

        A memory that went back to an earlier state would give out the ids of the examples that it
        lost once more; ids name examples, also those in copies made before.
        """
        count(0, next_id=next_id)
        self._next_id = max(self._next_id, next_id)

    @torch.no_grad()
    def add(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Offer a batch of ``n`` examples to the memory; its extras are stored with them.

        The generator draws the weights. Returns the ids of the examples, ``[n]`` int64, whether
        they are stored or not.
        """
        if not isinstance(batch, Batch):
            raise InputError(
                f"{self._name}.add: a {type(batch).__name__}; give a Batch(inputs, labels)."
            )
        rows = self._rows(batch)
        self._fit_capacity(rows)
        ids = range(self._next_id, self._next_id + len(batch))
        stored, gone = self._elect(ids, batch.labels.tolist(), self._weights(ids, generator))
        if stored or gone:
            if gone:
                self._counts -= Counter(self._labels_of(gone))
            kept = torch.tensor(stored, dtype=torch.int64) - ids.start
            self._counts.update(batch.labels[kept].tolist())
            chosen = {name: row[kept] for name, row in rows.items()}
            self._storage.exchange(gone, stored, chosen, self.capacity)
        self._next_id = ids.stop
        self._batches += 1
        self._changes += 1
        return torch.arange(ids.start, ids.stop)

    def sample(self, n: int, generator: torch.Generator) -> Batch:
        """``n`` examples (all, if fewer are stored), uniformly and without replacement.

        The extras of the batch are the stored extras, ``id`` and ``position``.
        """
        self._check_not_empty("sample")
        count(n=n)
        return _batch(self._storage.gather(distinct(n, len(self), generator)))

    def inputs(self, n: int | None = None, generator: torch.Generator | None = None) -> Inputs:
        """Copies of the stored inputs, all or a random ``n``, for a refresh."""
        self._check_not_empty("inputs")
        count(n=n)
        rows: Tensor | slice = slice(0, len(self))
        if n is not None and n < len(self):
            if generator is None:
                raise InputError(
                    f"{self._name}.inputs: n={n} without a generator; give one, or n=None for all."
                )
            rows = distinct(n, len(self), generator)
        names = [name for name in self._storage.fields if is_input(name)]
        return unnamed(self._storage.gather(rows, names))

    def batches(self, size: int = 256) -> Iterator[Batch]:
        """Every example once, in batches of ``size``; the memory must not change meanwhile."""
        count(size=size)
        changes = self._changes
        for start in range(0, len(self), size):
            if self._changes != changes:
                raise InputError(
                    f"{self._name}: changed while being iterated over; finish the iteration first."
                )
            yield _batch(self._storage.gather(slice(start, min(start + size, len(self)))))

    def remove(self, ids: Tensor | Iterable[int]) -> int:
        """Delete examples and overwrite their bytes; returns how many of them were stored.

        Ids that are not stored any more are passed over: those examples are gone already. An id
        that was never given out is an error, and then nothing is deleted.

        Where the memory is a uniform sample, what is left is one of everything seen and not
        removed, and the places that became free are filled only as fast as keeps it so.
        """
        return self._delete([i for i in self.given_out(ids) if i in self])

    def given_out(self, ids: Tensor | Iterable[int]) -> set[int]:
        """Ids, whether they are stored any more or not; refused if one was never given out."""
        given = ids.tolist() if isinstance(ids, Tensor) else ids
        try:
            wanted = {index(i) for i in ([given] if isinstance(given, int) else given)}
        except TypeError as error:
            raise InputError(
                f"{self._name}: {ids!r:.80} are no ids; give whole numbers."
            ) from error
        unknown = sorted(i for i in wanted if not 0 <= i < self._next_id)
        if unknown:
            raise InputError(
                f"{self._name}: ids {unknown[:10]} were never given out; the last one was "
                f"{self._next_id - 1}. Nothing was removed."
            )
        return wanted

    def remove_class(self, label: int) -> int:
        """Delete the examples of a class; returns how many were stored.

        Labels here are integers, as stored; `Learner.forget` takes those that users gave.
        """
        if not isinstance(label, Integral):
            raise InputError(
                f"{self._name}.remove_class: {label!r} is no integer, and memories know no names; "
                "delete through the learner: learner.forget(label=...)."
            )
        labels = self._storage.tensors["labels"][: len(self)].tolist() if len(self) else []
        pairs = zip(self._storage.ids, labels, strict=True)
        return self._delete([i for i, other in pairs if other == label])

    def to(self, device: torch.device | str) -> Self:
        """Move the examples to another device."""
        self._storage.to(torch.device(device))
        return self

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what happens next: tensors (copies), numbers and strings."""
        weights = {i: w for group in self._groups.values() for w, i in group.heap}
        return {
            "kind": self._name,
            "capacity": self.capacity,
            "capacity_bytes": self.capacity_bytes,
            "next_id": self._next_id,
            "batches": self._batches,
            "bars": {name: group.bar for name, group in self._groups.items()},
            "weights": torch.tensor(
                [weights.get(i, math.nan) for i in self._storage.ids], dtype=torch.float64
            ),
            "fields": self._storage.everything(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, exactly; the memory must be of the same kind and capacity."""
        capacity = self.capacity if self.capacity_bytes is None else state["capacity"]
        mine = self._name, capacity, self.capacity_bytes
        saved = state["kind"], state["capacity"], state["capacity_bytes"]
        if mine != saved:
            raise InputError(
                f"{self._name}.load_state_dict: (kind, capacity, capacity_bytes) is {mine} but "
                f"{saved} was saved; make the memory as it was."
            )
        fields: dict[str, Tensor] = state["fields"]
        if not fields and len(state["weights"]):
            raise InputError(
                f"{self._name}.load_state_dict: of a memory in parts only process 0 has the whole "
                "state; load what it has saved."
            )
        storage = storage_for(self.shared_by, self._storage.device)
        groups = {name: Group(bar=bar) for name, bar in state["bars"].items()}
        counts: Counter[int] = Counter()
        if fields:
            ids, labels = fields["id"].tolist(), fields["labels"].tolist()
            storage.exchange((), ids, fields, state["capacity"])
            counts.update(labels)
            if groups:
                for i, label, weight in zip(ids, labels, state["weights"].tolist(), strict=True):
                    groups[self._group_of(label)].heap.append((weight, i))
        for group in groups.values():
            heapq.heapify(group.heap)
        self._storage, self._groups, self._counts = storage, groups, counts
        self._quotas = None  # those of before may be for other classes
        self.capacity = state["capacity"]
        self._next_id, self._batches = state["next_id"], state["batches"]
        self._changes += 1

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _check_not_empty(self, action: str) -> None:
        if len(self) == 0:
            raise InputError(f"{self._name}.{action}: nothing is stored; add a batch first.")

    def _rows(self, batch: Batch) -> dict[str, Tensor]:
        """The fields of a batch, checked against what is stored."""
        if batch.labels.dtype != torch.int64:
            raise InputError(f"{self._name}.add: labels of dtype {batch.labels.dtype}; give int64.")
        taken = sorted(name for name in batch.extras if name in RESERVED or is_input(name))
        if taken:
            raise InputError(
                f"{self._name}.add: extras named {taken}; the memory writes those itself. "
                "Rename or drop them."
            )
        n = len(batch)
        position = self._batches if batch.position is None else batch.position
        rows = {
            **named(batch.inputs),
            "labels": batch.labels,
            **batch.extras,
            "id": torch.arange(self._next_id, self._next_id + n),
            "position": torch.full((n,), position),
        }
        return self._storage.checked(rows)

    def _fit_capacity(self, rows: dict[str, Tensor]) -> None:
        """Translate a capacity in bytes to items, anew when the rows have become wider."""
        if self.capacity_bytes is None:
            return
        row_nbytes = self._storage.row_nbytes(rows)
        capacity = self.capacity_bytes // row_nbytes
        if capacity < 1:
            raise InputError(
                f"{self._name}: capacity_bytes={self.capacity_bytes} but one example takes "
                f"{row_nbytes}; give at least that."
            )
        if capacity != self.capacity:
            self.capacity = capacity
            self._quotas = None

    def _elect(
        self, ids: range, labels: list[int], weights: list[float]
    ) -> tuple[list[int], list[int]]:
        """Who of the newcomers stays, and which stored examples go."""
        if self.capacity is None:
            return list(ids), []
        names = [self._group_of(label) for label in labels]
        for name in names:
            if name not in self._groups:
                self._groups[name] = Group()
                self._quotas = None
        gone: list[int] = []
        if self._quotas is None:
            self._quotas = self.quotas()
            for name, group in self._groups.items():
                gone += group.shrink(self._quotas[name])
        losers: set[int] = set()
        for i, name, weight in zip(ids, names, weights, strict=True):
            loser = self._groups[name].offer(weight, i, self._quotas[name])
            if loser is not None:
                losers.add(loser)
        gone += sorted(i for i in losers if i < ids.start)
        return [i for i in ids if i not in losers], gone

    def _labels_of(self, ids: list[int]) -> list[int]:
        slots = torch.tensor([self._storage.slots[i] for i in ids], dtype=torch.int64)
        labels = self._storage.tensors["labels"]
        found: list[int] = labels.index_select(0, slots.to(labels.device)).tolist()
        return found

    def _delete(self, gone: list[int]) -> int:
        """Take stored examples out of their groups and overwrite their rows; says how many."""
        if gone:
            labels, leaving = self._labels_of(gone), set(gone)
            for name in {self._group_of(label) for label in labels} & set(self._groups):
                self._groups[name].remove(leaving)
            self._counts -= Counter(labels)
            self._storage.exchange(gone)
            self._changes += 1
        return len(gone)


class ClassBalancedMemory(Memory):
    """A uniform sample of every class's stream so far, with equal quotas that adapt to new classes.

    With ``k`` classes seen, the quota of a class is ``floor(capacity / k)``, plus one for the first
    ``capacity mod k`` labels in ascending order. Unused quota is not lent to other classes: with
    ``n_c`` examples of class c seen, ``len = sum_c min(n_c, quota_c)`` at every moment. After a
    removal it is at most that.

    >>> memory = ClassBalancedMemory(capacity=4)
    >>> rng = torch.Generator().manual_seed(0)
    >>> memory.add(Batch(torch.arange(6).view(6, 1), torch.tensor([0, 0, 0, 0, 0, 7])), rng)
    tensor([0, 1, 2, 3, 4, 5])
    >>> memory.class_counts
    {0: 2, 7: 1}
    """

    def _group_of(self, label: int) -> int:
        return label

    def remove_class(self, label: int) -> int:
        """Delete a class as if it had never been seen; returns how many examples were stored.

        The other classes share its quota from then on.
        """
        removed = super().remove_class(label)
        if self._groups.pop(label, None) is not None:
            self._quotas = None
        return removed


class ReservoirMemory(Memory):
    """A uniform sample of the whole stream so far, whatever the labels."""


class RingMemory(Memory):
    """The most recent examples; a newcomer takes the place of the oldest."""

    def _weights(self, ids: range, generator: torch.Generator) -> list[float]:
        return [float(i) for i in ids]


class UnlimitedMemory(Memory):
    """Everything that was ever added and not removed."""

    limited = False

    def __init__(
        self, *, device: torch.device | str | None = None, shared_by: Processes | None = None
    ) -> None:
        super().__init__(device=device, shared_by=shared_by)

    def _weights(self, ids: range, generator: torch.Generator) -> list[float]:
        return []


def _batch(fields: dict[str, Tensor]) -> Batch:
    extras = {n: tensor for n, tensor in fields.items() if n != "labels" and not is_input(n)}
    return Batch(unnamed(fields), fields["labels"], extras=extras)
