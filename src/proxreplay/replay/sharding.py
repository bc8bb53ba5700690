"""Rows that several processes keep together, a part each: for memories too large for one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from proxreplay.distributed import Processes
from proxreplay.errors import InputError
from proxreplay.replay.storage import Fields, Ids, Storage

EVERYWHERE = ("labels", "id", "position")
CHUNK = 256  # rows that are sent at a time where all are wanted


class ShardedStorage(Storage):
    """A `Storage` whose rows lie in several processes: the one with id ``i`` in ``i mod N``.

    Which rows there are, in which slots, and their labels, all processes know, in the same way as
    if each kept all of it. So the same draws give the same rows. Every process has to make the same
    calls in the same order; `gather` is a message.
    """

    def __init__(self, processes: Processes, device: torch.device | None = None) -> None:
        super().__init__(device)
        self.processes = processes
        self.part = Storage(device)  # what only this process keeps

    @property
    def fields(self) -> Fields:
        """What is stored of every row, here or elsewhere; the tensors only have its layout."""
        return {**self.part.tensors, **self.tensors}

    @property
    def nbytes(self) -> int:
        """Bytes allocated for rows in this process."""
        return super().nbytes + self.part.nbytes

    def exchange(
        self, gone: Ids, ids: Ids = (), rows: Fields | None = None, limit: int | None = None
    ) -> None:
        """As `Storage.exchange`; each process takes its own rows out of all of them."""
        some, rank = rows or {}, self.processes.rank
        own = [i for i, one in enumerate(ids) if self._owner(one) == rank]
        chosen = torch.tensor(own, dtype=torch.int64)
        mine = {name: row[chosen] for name, row in some.items() if name not in EVERYWHERE}
        leaving = [one for one in gone if one in self.part.slots]
        super().exchange(gone, ids, {n: r for n, r in some.items() if n in EVERYWHERE}, limit)
        self.part.exchange(leaving, [ids[i] for i in own], mine)

    def gather(
        self, slots: Tensor | slice, names: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Copies of the rows in some slots, from all processes."""
        found = super().gather(slots, names)
        wanted = [n for n in self.part.tensors if names is None or n in names]
        if not wanted:
            return found
        chosen = self.ids[slots] if isinstance(slots, slice) else [self.ids[s] for s in slots]
        owners = [self._owner(identity) for identity in chosen]
        mine = [i for i, owner in zip(chosen, owners, strict=True) if owner == self.processes.rank]
        if self.processes.alone and len(self.part) < len(self):
            raise InputError(
                "memory: most of its rows are in processes that are not there any more; copy a "
                "memory in parts by its state_dict()."
            )
        here = torch.tensor([self.part.slots[i] for i in mine], dtype=torch.int64)
        counts = [owners.count(rank) for rank in range(self.processes.size)]
        rows = self.processes.gather([*self.part.gather(here, wanted).values()], counts)
        place = torch.tensor(sorted(range(len(owners)), key=owners.__getitem__)).argsort()
        ordered = [row.index_select(0, place.to(row.device)) for row in rows]
        return {**dict(zip(wanted, ordered, strict=True)), **found}

    def everything(self) -> dict[str, Tensor]:
        """All rows for the process that writes; nothing for the others, who need no room for it."""
        parts: list[dict[str, Tensor]] = []
        for start in range(0, len(self), CHUNK):
            part = self.gather(slice(start, min(start + CHUNK, len(self))))
            if self.processes.writes:
                parts.append(part)
        return {name: torch.cat([one[name] for one in parts]) for name in parts[0]} if parts else {}

    def to(self, device: torch.device) -> None:
        """Move all rows to another device."""
        super().to(device)
        self.part.to(device)

    def _owner(self, identity: int) -> int:
        return identity % self.processes.size


def storage_for(processes: Processes | None, device: Any) -> Storage:
    """A storage of this process, or a part of one that several keep together."""
    own = None if device is None else torch.device(device)
    if processes is None or processes.alone:
        return Storage(own)
    return ShardedStorage(processes, own)
