"""From a data set to a stream: class-incremental, domain-incremental, blurry and i.i.d.

Every scenario draws from generators of its own: one splits off the validation examples, one orders
the rest, so that a change of one leaves the others as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from proxreplay.data.datasets import Dataset, Examples
from proxreplay.data.streams import ShortLast, Stream, Subset, Task
from proxreplay.errors import InputError
from proxreplay.seeding import generator

DomainOrder = Sequence[str] | Literal["stored", "shuffled"]
TaskOf = Callable[[Examples], Tensor]  # the task every example belongs to, [n]; -1 for none


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

    Where the classes cannot be shared equally, the first tasks have one more.

    Args:
        dataset: where it brings no validation examples of its own, the last
            ``validation_fraction`` of a random permutation of each task is set aside.
        tasks: how many; at most one a class.
        seed: decides the order of classes and, independently, of examples.
        batch_size: examples a batch.
        short_last: see `Stream`.
        validation_fraction: of each task's training examples.
    """
    parts = _class_tasks(dataset, tasks, seed, validation_fraction)
    return Stream(_shuffled(parts, seed), batch_size, short_last)


def blurry(
    dataset: Dataset,
    tasks: int,
    seed: int,
    *,
    disjoint: float = 0.5,
    blur: float = 0.1,
    batch_size: int = 10,
    short_last: ShortLast = "buffer_only",
    validation_fraction: float = 0.05,
) -> Stream:
    """No clean boundaries (i-Blurry): some classes leak from their task into all the others.

    A class-incremental stream in which ``round(disjoint * classes)`` random classes stay in their
    task; of every other class ``int(blur * n)`` of its n examples move, each to another task drawn
    at random. Validation and test examples stay with the class's own task.

    Args:
        dataset: as for `class_incremental`.
        tasks: how many; at most one a class.
        seed: decides classes, leaks and order.
        disjoint: fraction of classes that do not leak; 1 gives `class_incremental`.
        blur: fraction of a leaking class's examples that arrive elsewhere.
        batch_size: examples a batch.
        short_last: see `Stream`.
        validation_fraction: of each task's training examples.
    """
    for name, value in (("disjoint", disjoint), ("blur", blur)):
        if not 0 <= value <= 1:
            raise InputError(f"blurry: {name}={value}; give a fraction between 0 and 1.")
    parts = _class_tasks(dataset, tasks, seed, validation_fraction)
    num_classes = len(dataset.classes)
    rng = generator(seed, "blur")
    leaking = torch.randperm(num_classes, generator=rng)[round(disjoint * num_classes) :]
    parts = _leak(parts, leaking, blur, rng)
    return Stream(_shuffled(parts, seed), batch_size, short_last)


def domain_incremental(
    dataset: Dataset,
    seed: int,
    *,
    order: DomainOrder = "stored",
    batch_size: int = 10,
    short_last: ShortLast = "buffer_only",
    validation_fraction: float = 0.05,
) -> Stream:
    """One task a domain (or time bucket); labels mean the same in all of them.

    Args:
        dataset: with domains.
        seed: decides the order of examples and, with ``shuffled``, of domains.
        order: names of domains, each at most once; ``stored`` for the order of
            ``dataset.domains``; ``shuffled``.
        batch_size: examples a batch.
        short_last: see `Stream`.
        validation_fraction: of each task's training examples.
    """
    chosen = _domain_order(dataset, order, seed)
    task_of_domain = torch.full((len(dataset.domains),), -1)
    task_of_domain[chosen] = torch.arange(len(chosen))
    parts = _tasks(
        dataset,
        [dataset.domains[d] for d in chosen],
        lambda examples: task_of_domain[_domains(examples)],
        seed,
        validation_fraction,
    )
    return Stream(_shuffled(parts, seed), batch_size, short_last)


def iid(
    dataset: Dataset,
    seed: int,
    *,
    tasks: int = 1,
    batch_size: int = 10,
    short_last: ShortLast = "buffer_only",
    validation_fraction: float = 0.05,
) -> Stream:
    """The ceiling: all examples in one random order, cut into ``tasks`` parts that look alike.

    Args:
        dataset: any; labels stay as they are.
        seed: decides the parts and the order.
        tasks: random parts of (nearly) equal size, of train, validation and test alike.
        batch_size: examples a batch.
        short_last: see `Stream`.
        validation_fraction: of each task's training examples.
    """
    if tasks < 1:
        raise InputError(f"iid: tasks={tasks}; give at least 1.")
    rng = generator(seed, "parts")
    parts = _tasks(
        dataset,
        [f"part {t}" for t in range(tasks)],
        lambda examples: torch.randperm(len(examples), generator=rng) % tasks,
        seed,
        validation_fraction,
    )
    return Stream(_shuffled(parts, seed), batch_size, short_last)


class Scenario(Protocol):
    """A way to turn data into a stream, as a value that can be declared and compared."""

    def stream(self, dataset: Dataset, seed: int, batch_size: int, short_last: ShortLast) -> Stream:
        """The stream that a seed gives."""


@dataclass(frozen=True)
class ClassIncremental:
    """See `class_incremental`."""

    tasks: int

    def stream(self, dataset: Dataset, seed: int, batch_size: int, short_last: ShortLast) -> Stream:
        """The stream that a seed gives."""
        return class_incremental(
            dataset, self.tasks, seed, batch_size=batch_size, short_last=short_last
        )


@dataclass(frozen=True)
class DomainIncremental:
    """See `domain_incremental`."""

    order: DomainOrder = "stored"

    def stream(self, dataset: Dataset, seed: int, batch_size: int, short_last: ShortLast) -> Stream:
        """The stream that a seed gives."""
        return domain_incremental(
            dataset, seed, order=self.order, batch_size=batch_size, short_last=short_last
        )


@dataclass(frozen=True)
class Blurry:
    """See `blurry`."""

    tasks: int
    disjoint: float = 0.5
    blur: float = 0.1

    def stream(self, dataset: Dataset, seed: int, batch_size: int, short_last: ShortLast) -> Stream:
        """The stream that a seed gives."""
        return blurry(
            dataset,
            self.tasks,
            seed,
            disjoint=self.disjoint,
            blur=self.blur,
            batch_size=batch_size,
            short_last=short_last,
        )


@dataclass(frozen=True)
class IID:
    """See `iid`."""

    tasks: int = 1

    def stream(self, dataset: Dataset, seed: int, batch_size: int, short_last: ShortLast) -> Stream:
        """The stream that a seed gives."""
        return iid(dataset, seed, tasks=self.tasks, batch_size=batch_size, short_last=short_last)


def _class_tasks(dataset: Dataset, tasks: int, seed: int, validation_fraction: float) -> list[Task]:
    """Tasks of equally many classes, relabelled in order of arrival, not yet shuffled."""
    num_classes = len(dataset.classes)
    if not 1 <= tasks <= num_classes:
        raise InputError(
            f"class_incremental: {tasks} tasks cannot share the {num_classes} classes of "
            f"{dataset.name}; give 1 to {num_classes}, best a divisor of {num_classes}."
        )
    order = class_order(num_classes, seed)
    new_label = torch.empty_like(order)
    new_label[order] = torch.arange(num_classes)
    relabelled = replace(
        dataset,
        train=_relabel(dataset.train, new_label),
        test=_relabel(dataset.test, new_label),
        validation=None if dataset.validation is None else _relabel(dataset.validation, new_label),
        classes=tuple(dataset.classes[c] for c in order.tolist()),
    )
    groups = torch.arange(num_classes).tensor_split(tasks)
    names = [", ".join(relabelled.classes[label] for label in group) for group in groups]
    task_of_label = torch.cat([torch.full_like(group, t) for t, group in enumerate(groups)])
    return _tasks(relabelled, names, lambda e: task_of_label[e.labels], seed, validation_fraction)


def _relabel(examples: Examples, new_label: Tensor) -> Examples:
    return replace(examples, labels=new_label[examples.labels])


def _tasks(
    dataset: Dataset, names: Sequence[str], task_of: TaskOf, seed: int, validation_fraction: float
) -> list[Task]:
    """Tasks in stored order, their validation examples split off in task order."""
    if not 0 <= validation_fraction < 1:
        raise InputError(
            f"validation_fraction={validation_fraction}; give a fraction of at least 0, below 1."
        )
    train, test = task_of(dataset.train), task_of(dataset.test)
    validation = None if dataset.validation is None else task_of(dataset.validation)
    rng = generator(seed, "validation")
    tasks = []
    for t, name in enumerate(names):
        arriving = Subset(dataset.train, _where(train == t))
        if dataset.validation is None or validation is None:
            arriving, held_out = _split(arriving, validation_fraction, rng)
        else:
            held_out = Subset(dataset.validation, _where(validation == t))
        tasks.append(Task(name, arriving, held_out, Subset(dataset.test, _where(test == t))))
    return tasks


def _split(subset: Subset, fraction: float, rng: torch.Generator) -> tuple[Subset, Subset]:
    """Set aside the last ``int(fraction * n)`` of a random permutation."""
    rows = subset.rows[torch.randperm(len(subset), generator=rng)]
    kept = len(rows) - int(fraction * len(rows))
    return replace(subset, rows=rows[:kept]), replace(subset, rows=rows[kept:])


def _where(condition: Tensor) -> Tensor:
    return condition.nonzero().squeeze(1)


def _leak(tasks: Sequence[Task], leaking: Tensor, blur: float, rng: torch.Generator) -> list[Task]:
    """Move ``int(blur * n)`` of the n examples of every leaking class to other tasks."""
    if len(tasks) == 1:
        return list(tasks)
    rows = torch.cat([task.train.rows for task in tasks])
    labels = torch.cat([task.train.labels for task in tasks])
    home = torch.cat([torch.full((len(task.train),), t) for t, task in enumerate(tasks)])
    arrives_in = home.clone()
    for label in leaking.tolist():
        places = _where(labels == label)
        moved = places[torch.randperm(len(places), generator=rng)][: int(blur * len(places))]
        away = torch.randint(1, len(tasks), moved.shape, generator=rng)
        arrives_in[moved] = (home[moved] + away) % len(tasks)
    return [
        replace(task, train=replace(task.train, rows=rows[arrives_in == t]))
        for t, task in enumerate(tasks)
    ]


def _shuffled(tasks: Sequence[Task], seed: int) -> list[Task]:
    """The same tasks, each in a random order of arrival."""
    rng = generator(seed, "order")
    return [
        replace(
            task,
            train=replace(
                task.train,
                rows=task.train.rows[torch.randperm(len(task.train), generator=rng)],
            ),
        )
        for task in tasks
    ]


def _domains(examples: Examples) -> Tensor:
    assert examples.domains is not None  # Dataset has checked it
    return examples.domains


def _domain_order(dataset: Dataset, order: DomainOrder, seed: int) -> list[int]:
    names = dataset.domains
    if not names:
        raise InputError(
            f"domain_incremental: {dataset.name} has no domains; use class_incremental or iid, or "
            "arrange the images as <domain>/<class>/<image>."
        )
    if order == "stored":
        return list(range(len(names)))
    if order == "shuffled":
        shuffled = torch.randperm(len(names), generator=generator(seed, "domains"))
        return [int(d) for d in shuffled]
    chosen = [order] if isinstance(order, str) else list(order)
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(names):
        raise InputError(
            f"domain_incremental: order={order!r}; name each of {', '.join(names)} at most once, "
            "or give 'stored' or 'shuffled'."
        )
    return [names.index(name) for name in chosen]
