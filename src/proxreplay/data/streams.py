"""A stream: batches in the order in which they arrive, with a position to save and restore."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from torch import Tensor

from proxreplay.batch import Batch
from proxreplay.data.datasets import Examples
from proxreplay.data.scenarios import SHORT_LAST, ShortLast
from proxreplay.errors import InputError
from proxreplay.options import LearnerOptions, count, one_of


@dataclass(frozen=True)
class Subset:
    """Some rows of `Examples`, in an order of their own; inputs are copied only when asked for."""

    source: Examples
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, places: slice) -> Examples:
        return self.source[self.rows[places]]

    @property
    def inputs(self) -> Tensor:
        """Inputs ``[n, ...]``: gathered at each call, not kept."""
        return self.source[self.rows].inputs

    @property
    def labels(self) -> Tensor:
        """Labels ``[n]``, without touching the inputs."""
        return self.source.labels[self.rows]


@dataclass(frozen=True)
class Task:
    """One part of the stream, and the examples that the learner is judged on."""

    name: str  # for people to read
    train: Subset  # the examples that arrive, in order of arrival
    validation: Subset  # judges the learner during the stream
    test: Subset  # judges it at the end


class Stream:
    """An iterator over batches with a position that can be saved and restored exactly.

    The learner is handed inputs and labels only; ``task`` and ``position`` are for the evaluator.

    Args:
        tasks: in order of arrival.
        batch_size: examples per batch.
        short_last: what happens to a task's last batch if it is short: ``buffer_only`` remembers it
            without SGD steps (as in the paper's experiments), ``train`` treats it like any other,
            ``drop`` leaves it out.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        batch_size: int = LearnerOptions.batch_size,
        short_last: ShortLast = SHORT_LAST,
    ) -> None:
        count(batch_size=batch_size)
        one_of(get_args(ShortLast), short_last=short_last)
        self.tasks = list(tasks)
        self.batch_size = batch_size
        self.short_last = short_last
        self.position = 0
        self._starts = [
            (t, start)
            for t, task in enumerate(self.tasks)
            for start in range(0, len(task.train), batch_size)
            if short_last != "drop" or start + batch_size <= len(task.train)
        ]

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.position >= len(self):
            raise StopIteration
        at = self.position
        t, start = self._starts[at]
        some = self.tasks[t].train[start : start + self.batch_size]
        batch = Batch(some.inputs, some.labels, task=t, position=at, train=self._trained(at))
        self.position += 1
        return batch

    def _trained(self, position: int) -> bool:
        t, start = self._starts[position]
        full = start + self.batch_size <= len(self.tasks[t].train)
        return full or self.short_last == "train"

    @property
    def trained_batches(self) -> int:
        """How many batches of the whole stream SGD steps are made on."""
        return sum(self._trained(position) for position in range(len(self)))

    def task_at(self, position: int) -> int:
        """The task that the batch at a position comes from."""
        if not 0 <= position < len(self):
            raise InputError(
                f"Stream: position {position} of {len(self)} batches; give 0 to {len(self) - 1}."
            )
        return self._starts[position][0]

    def ends_task(self, position: int) -> bool:
        """Whether the batch at a position is the last one of its task."""
        t = self.task_at(position)
        return position == len(self) - 1 or self.task_at(position + 1) != t

    def arriving(self, t: int) -> Subset:
        """The examples of a task that arrive: all, but for a short last batch that is dropped."""
        train = self.tasks[t].train
        batches = sum(task == t for task, _ in self._starts)
        return Subset(train.source, train.rows[: batches * self.batch_size])

    def fingerprint(self) -> str:
        """A digest of what arrives and in which order; two streams share it only if they agree."""
        digest = hashlib.sha256(f"{self.batch_size}/{self.short_last}".encode())
        for task in self.tasks:
            for tensor in (task.train.rows, task.train.labels):
                digest.update(f"/{len(tensor)}/".encode())
                digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()[:16]

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, and which stream it is."""
        return {"position": self.position, "fingerprint": self.fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; the state of another stream is refused.

        A state without ``fingerprint`` is taken as a bare position.
        """
        position = state["position"]
        if not isinstance(position, int) or not 0 <= position <= len(self):
            raise InputError(
                f"Stream: position {position!r} cannot be restored; this stream has positions 0 to "
                f"{len(self)}."
            )
        if state.get("fingerprint", self.fingerprint()) != self.fingerprint():
            raise InputError(
                "Stream: the saved position belongs to another stream; build it from the same "
                "data with the same seed, tasks and batch size."
            )
        self.position = position
