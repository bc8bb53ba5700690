"""The processes that learn one model together, and what they say to each other.

Everything here is a thin layer over torch.distributed: gloo between CPUs, NCCL between GPUs.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from proxreplay.errors import InputError, ProcessError, ProxreplayError, first_line
from proxreplay.options import count

BUCKET = 1 << 26  # bytes that are packed for one message: more would only cost memory

_Result = TypeVar("_Result")


@dataclass
class Traffic:
    """What was said so far."""

    seconds: float = 0.0  # spent in messages, waiting for the others included
    messages: int = 0  # how many
    payload: int = 0  # bytes that this process has handed to them; what the network carries is more


@dataclass(frozen=True, eq=False)
class Processes:
    """The processes that learn one model together, as one of them sees it.

    `Processes.up` is those of torch's process group; `ALONE` is one process without a group.

    Args:
        rank: the number of this process, from 0. Process 0 is the one that writes.
        size: how many there are.
        replicated: whether every process is handed all examples, the same ones (True), or a share
            of its own (False).
        check_every: stream batches between comparisons of what the processes hold.
        group: torch's process group; None for its default one.
        traffic: what was said so far.
    """

    rank: int = 0
    size: int = 1
    replicated: bool = False
    check_every: int = 100
    group: Any = None
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        count(check_every=self.check_every)

    @classmethod
    def up(cls, group: Any = None, *, replicated: bool = False, check_every: int = 100) -> Self:
        """Those of a process group that is up; arguments as for the class."""
        if not (dist.is_available() and dist.is_initialized()):
            raise InputError(
                "Processes.up: no process group is up; start the program with torchrun and call "
                "torch.distributed.init_process_group() first, or leave processes out."
            )
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise InputError(
                "Processes.up: this process is not in the group; give one that it belongs to."
            )
        return cls(rank, size, replicated, check_every, group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a handle of the running program

    def __reduce__(self) -> tuple[Any, ...]:
        return Processes, ()  # a group does not outlive its program

    @property
    def alone(self) -> bool:
        """Whether there is nobody to talk to."""
        return self.size == 1

    @property
    def writes(self) -> bool:
        """Whether this is the process that writes files."""
        return self.rank == 0

    def holding(self, *, replicated: bool) -> Self:
        """The same processes, handed all examples or shares of their own."""
        return replace(self, replicated=replicated)

    def described(self) -> str:
        """For people to read."""
        held = "all examples" if self.replicated else "its own share of the examples"
        return f"{self.size} processes, this is number {self.rank}; each is given {held}"

    # --- shares -----------------------------------------------------------------------------------

    def shares(self, n: int) -> list[int]:
        """How many of ``n`` examples each process takes: as equal as can be, more for the first."""
        each, rest = divmod(n, self.size)
        return [each + (rank < rest) for rank in range(self.size)]

    def share(self, n: int) -> slice:
        """Which of ``n`` examples this process takes: every so many, so that shares are alike."""
        return slice(self.rank, n, self.size)

    def in_order(self, rows: Tensor) -> Tensor:
        """The rows of all shares, one share after the other, in the order they had before."""
        n = len(rows)
        order = [i for rank in range(self.size) for i in range(rank, n, self.size)]
        whole = torch.empty_like(rows)
        whole[torch.tensor(order, dtype=torch.int64, device=rows.device)] = rows
        return whole

    # --- messages ---------------------------------------------------------------------------------

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Put the sum over all processes in the place of every tensor.

        What has the same dtype and device goes in one message, in pieces of at most `BUCKET` bytes.
        Every process must give tensors of the same shapes in the same order.
        """
        if self.alone:
            return
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for same in kinds.values():
            for bucket in _buckets(same):
                flat = self._sendable(torch.cat([tensor.reshape(-1) for tensor in bucket]))
                with self._talking("sums", flat.nbytes):
                    dist.all_reduce(flat, group=self.group)
                parts = flat.split([tensor.numel() for tensor in bucket])
                for tensor, part in zip(bucket, parts, strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def gather(self, rows: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
        """The rows of all processes, one after the other, on every process.

        Args:
            rows: tensors ``[n, ...]``, of any dtype; ``n`` may differ between processes.
            counts: ``n`` of every process, where that is known.
        """
        if self.alone:
            return list(rows)
        if counts is None:
            counts = self.tell(len(rows[0]))
        width = sum(row.element_size() * row.shape[1:].numel() for row in rows)
        flat = torch.zeros(max(counts) * width, dtype=torch.uint8, device=rows[0].device)
        start = 0
        for row in rows:
            flat[start : start + row.nbytes] = as_bytes(row)
            start += row.nbytes
        flat = self._sendable(flat)
        received = [torch.empty_like(flat) for _ in range(self.size)]
        with self._talking("examples", flat.nbytes):
            dist.all_gather(received, flat, group=self.group)
        return _rows_from(received, counts, rows)

    def broadcast_(self, tensors: Sequence[Tensor], owner: int) -> None:
        """Put what one process has in the place of every tensor, in all processes."""
        if self.alone:
            return
        for bucket in _buckets(tensors):
            flat = self._sendable(torch.cat([as_bytes(tensor) for tensor in bucket]))
            source = owner if self.group is None else dist.get_global_rank(self.group, owner)
            with self._talking("results", flat.nbytes if owner == self.rank else 0):
                dist.broadcast(flat, source, group=self.group)
            parts = flat.split([tensor.nbytes for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(_from_bytes(part, tensor.dtype, tensor.shape))

    def tell(self, value: _Result, at: str = "") -> list[_Result]:
        """What every process says, by number; small plain values.

        Args:
            value: of this process.
            at: where it is; it is an error if another one is somewhere else.
        """
        if self.alone:
            return [value]
        said: list[Any] = [None] * self.size
        with self._talking("notes", 0):
            dist.all_gather_object(said, (at, value), group=self.group)
        for rank, (there, _) in enumerate(said):
            if there != said[0][0]:
                raise ProcessError(
                    f"out of step: process 0 is at {said[0][0]!r} and process {rank} at {there!r}. "
                    "Make the same calls in all processes, also save() and refresh()."
                )
        return [one for _, one in said]

    def from_first(self, value: _Result) -> _Result:
        """What process 0 holds, in all processes."""
        if self.alone:
            return value
        held = [value if self.rank == 0 else None]
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        with self._talking("notes", 0):
            dist.broadcast_object_list(held, source, group=self.group)
        found: Any = held[0]
        return found  # type: ignore[no-any-return]

    def any(self, flag: object) -> bool:
        """Whether something is true in one process at least."""
        if self.alone:
            return bool(flag)
        there = torch.tensor([float(bool(flag))])
        self.sum_([there])
        return bool(there)

    def together(self, what: str, act: Callable[[], _Result]) -> _Result:
        """Do something in all processes; if it fails in one, it fails in all, and says where."""
        if self.alone:
            return act()
        problem: Exception | None = None
        result: Any = None
        try:
            result = act()
        except Exception as error:
            problem = error
        said = self.tell(None if problem is None else f"{type(problem).__name__}: {problem}", what)
        if problem is not None:
            raise problem
        for rank, text in enumerate(said):
            if text is not None:
                raise ProcessError(f"{what} failed in process {rank} of {self.size}: {text}")
        done: _Result = result
        return done

    @contextmanager
    def _talking(self, what: str, payload: int) -> Iterator[None]:
        """Time a message; if the others cannot be reached, say so."""
        start = time.perf_counter()
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, ProxreplayError):
                raise
            raise ProcessError(
                f"process {self.rank} of {self.size}: the others could not be reached for their "
                f"{what} ({first_line(error)}). One was lost, met an error, or has ended because "
                "its stream is shorter; look at what it said last. Then go on from the last "
                "checkpoint."
            ) from error
        finally:
            self.traffic.seconds += time.perf_counter() - start
            self.traffic.messages += 1
            self.traffic.payload += payload

    def _sendable(self, tensor: Tensor) -> Tensor:
        """On a device that the backend can send from."""
        if tensor.device.type == "cpu" and dist.get_backend(self.group) == "nccl":
            return tensor.to(torch.device("cuda", torch.cuda.current_device()))
        return tensor


ALONE = Processes()


def current() -> Processes:
    """The processes of torch's default group, each with its own share; `ALONE` if none is up."""
    if dist.is_available() and dist.is_initialized():
        return Processes.up()
    return ALONE


def start_of(counts: Sequence[int], rank: int) -> int:
    """Where the rows of a process begin."""
    return list(accumulate(counts, initial=0))[rank]


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, uint8 ``[nbytes]``."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _from_bytes(part: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return part.clone().view(dtype).view(shape)  # a copy, as bytes may begin anywhere


def _rows_from(
    received: Sequence[Tensor], counts: Sequence[int], like: Sequence[Tensor]
) -> list[Tensor]:
    """Every tensor with the rows of all processes, from the bytes that each has sent."""
    found: list[list[Tensor]] = [[] for _ in like]
    for flat, n in zip(received, counts, strict=True):
        start = 0
        for parts, row in zip(found, like, strict=True):
            shape = (n, *row.shape[1:])
            size = torch.Size(shape).numel() * row.element_size()
            part = _from_bytes(flat[start : start + size], row.dtype, shape)
            parts.append(part.to(row.device))
            start += size
    return [torch.cat(parts) for parts in found]


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours that go in one message."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
