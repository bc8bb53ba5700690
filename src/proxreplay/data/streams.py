"""Streams: the order in which examples arrive, and what is set aside to judge the learner."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from proxreplay.batch import Batch
from proxreplay.data.datasets import Dataset, Examples
from proxreplay.errors import InputError
from proxreplay.seeding import generator

ShortLast = Literal["buffer_only", "train", "drop"]


@dataclass(frozen=True)
class Task:
    """One stretch of the stream.

    Args:
        train: the examples that arrive, in order of arrival.
        validation: held out to judge the learner at every moment.
        test: held out for the end.
    """

    train: Examples
    validation: Examples
    test: Examples


class Stream:
    """An iterator over batches with a position that can be saved and restored exactly.

    Args:
        tasks: in order of arrival.
        batch_size: examples a batch.
        short_last: what happens to a task's last batch if it is short: ``buffer_only`` remembers it
            without SGD steps (as in the paper's experiments), ``train`` treats it as any other,
            ``drop`` leaves it out.
    """

    def __init__(
        self, tasks: list[Task], batch_size: int = 10, short_last: ShortLast = "buffer_only"
    ) -> None:
        if batch_size < 1:
            raise InputError(f"Stream: batch_size={batch_size}; give at least 1.")
        self.tasks = tasks
        self.batch_size = batch_size
        self.short_last = short_last
        self.position = 0
        self._slices = [
            (t, start)
            for t, task in enumerate(tasks)
            for start in range(0, len(task.train), batch_size)
            if short_last != "drop" or start + batch_size <= len(task.train)
        ]

    def __len__(self) -> int:
        return len(self._slices)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.position >= len(self):
            raise StopIteration
        t, start = self._slices[self.position]
        examples = self.tasks[t].train[torch.arange(start, self._stop(t, start))]
        full = len(examples) == self.batch_size
        batch = Batch(
            examples.inputs,
            examples.labels,
            task=t,
            position=self.position,
            train=full or self.short_last == "train",
        )
        self.position += 1
        return batch

    def _stop(self, t: int, start: int) -> int:
        return min(start + self.batch_size, len(self.tasks[t].train))

    def task_at(self, position: int) -> int:
        """The task that the batch at a position comes from."""
        return self._slices[position][0]

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position."""
        self.position = int(state["position"])


def class_order(num_classes: int, seed: int) -> Tensor:
    """The paper's order of classes: ``torch.manual_seed(seed); torch.randperm(num_classes)``."""
    return torch.randperm(num_classes, generator=torch.Generator().manual_seed(seed))


def class_incremental(
    dataset: Dataset,
    tasks: int,
    seed: int,
    *,
    batch_size: int = 10,
    short_last: ShortLast = "buffer_only",
    validation_fraction: float = 0.05,
) -> Stream:
    """Tasks of equally many classes; the i-th class in the order of arrival gets label i.

    Args:
        dataset: where it brings no validation examples of its own, the last
            ``validation_fraction`` of a random permutation of each task is set aside.
        tasks: how many; must divide the number of classes.
        seed: decides the order of classes and, independently, of examples.
        batch_size: examples a batch.
        short_last: see `Stream`.
        validation_fraction: of each task's training examples.
    """
    num_classes = len(dataset.classes)
    if tasks < 1 or num_classes % tasks:
        raise InputError(
            f"class_incremental: {tasks} tasks cannot share the {num_classes} classes of "
            f"{dataset.name} equally; choose a divisor of {num_classes}."
        )
    order = class_order(num_classes, seed)
    new_label = torch.empty_like(order)
    new_label[order] = torch.arange(num_classes)
    rng_split, rng_order = generator(seed, "validation"), generator(seed, "order")
    result = []
    for classes in order.view(tasks, -1):
        train = _of_classes(dataset.train, classes, new_label)
        if dataset.validation is None:
            shuffled = torch.randperm(len(train), generator=rng_split)
            kept = len(train) - int(validation_fraction * len(train))
            train, validation = train[shuffled[:kept]], train[shuffled[kept:]]
        else:
            validation = _of_classes(dataset.validation, classes, new_label)
        arrival = torch.randperm(len(train), generator=rng_order)
        test = _of_classes(dataset.test, classes, new_label)
        result.append(Task(train[arrival], validation, test))
    return Stream(result, batch_size, short_last)


def _of_classes(examples: Examples, classes: Tensor, new_label: Tensor) -> Examples:
    chosen = examples[torch.isin(examples.labels, classes).nonzero().squeeze(1)]
    return Examples(chosen.inputs, new_label[chosen.labels])
