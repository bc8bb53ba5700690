"""How the examples of a data set are divided into tasks; `scenarios` declares, this computes."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from proxreplay.data.datasets import Dataset, Examples
from proxreplay.data.scenarios import DomainOrder
from proxreplay.data.streams import Subset, Task
from proxreplay.errors import InputError
from proxreplay.seeding import generator


def class_order(num_classes: int, seed: int) -> Tensor:
    """The paper's order of classes: ``torch.manual_seed(seed); torch.randperm(num_classes)``."""
    return torch.randperm(num_classes, generator=torch.Generator().manual_seed(seed))


def class_tasks(dataset: Dataset, tasks: int, seed: int, validation_fraction: float) -> list[Task]:
    """Tasks of equally many classes, relabelled in order of arrival."""
    num_classes = len(dataset.classes)
    if not 1 <= tasks <= num_classes:
        raise InputError(
            f"{tasks} tasks cannot share the {num_classes} classes of {dataset.name}; give 1 to "
            f"{num_classes}, best a divisor of {num_classes}."
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


def mixed(tasks: Sequence[Task], seed: int) -> list[Task]:
    """The same examples in one random order; each task keeps its length and its held-out ones."""
    rows = torch.cat([task.train.rows for task in tasks])
    rows = rows[torch.randperm(len(rows), generator=generator(seed, "mixed"))]
    parts = rows.split([len(task.train) for task in tasks])
    return [_with_rows(task, part) for task, part in zip(tasks, parts, strict=True)]


def leak(
    tasks: list[Task], num_classes: int, disjoint: float, blur: float, seed: int
) -> list[Task]:
    """Move ``int(blur * n)`` of the n examples of every class that leaks to other tasks."""
    rng = generator(seed, "blur")
    leaking = torch.randperm(num_classes, generator=rng)[round(disjoint * num_classes) :]
    if len(tasks) == 1:
        return tasks
    rows = torch.cat([task.train.rows for task in tasks])
    labels = torch.cat([task.train.labels for task in tasks])
    home = torch.cat([torch.full((len(task.train),), t) for t, task in enumerate(tasks)])
    arrives_in = home.clone()
    for label in leaking.tolist():
        places = _where(labels == label)
        moved = places[torch.randperm(len(places), generator=rng)][: int(blur * len(places))]
        away = torch.randint(1, len(tasks), moved.shape, generator=rng)
        arrives_in[moved] = (home[moved] + away) % len(tasks)
    return [_with_rows(task, rows[arrives_in == t]) for t, task in enumerate(tasks)]


def domain_tasks(
    dataset: Dataset, order: DomainOrder, seed: int, validation_fraction: float
) -> list[Task]:
    """One task per chosen domain."""
    chosen = _domain_order(dataset, order, seed)
    task_of_domain = torch.full((len(dataset.domains),), -1)
    task_of_domain[chosen] = torch.arange(len(chosen))

    def task_of(examples: Examples) -> Tensor:
        assert examples.domains is not None  # Dataset has checked it
        return task_of_domain[examples.domains]

    names = [dataset.domains[d] for d in chosen]
    return _tasks(dataset, names, task_of, seed, validation_fraction)


def _domain_order(dataset: Dataset, order: DomainOrder, seed: int) -> list[int]:
    names = dataset.domains
    if not names:
        raise InputError(
            f"{dataset.name} has no domains; use ClassIncremental or IID, or arrange the images "
            "as <domain>/<class>/<image>."
        )
    if order == "stored":
        return list(range(len(names)))
    if order == "shuffled":
        return torch.randperm(len(names), generator=generator(seed, "domains")).tolist()
    chosen = [order] if isinstance(order, str) else list(order)
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(names):
        raise InputError(
            f"DomainIncremental: order={order!r}; name each of {', '.join(names)} at most once, "
            "or give 'stored' or 'shuffled'."
        )
    return [names.index(name) for name in chosen]


def random_tasks(dataset: Dataset, tasks: int, seed: int, validation_fraction: float) -> list[Task]:
    """Random parts of (nearly) equal size."""
    rng = generator(seed, "parts")
    return _tasks(
        dataset,
        [f"part {t}" for t in range(tasks)],
        lambda examples: torch.randperm(len(examples), generator=rng) % tasks,
        seed,
        validation_fraction,
    )


def shuffled(tasks: Sequence[Task], seed: int) -> list[Task]:
    """The same tasks, each in a random order of arrival."""
    rng = generator(seed, "order")
    return [
        _with_rows(task, task.train.rows[torch.randperm(len(task.train), generator=rng)])
        for task in tasks
    ]


def _tasks(
    dataset: Dataset,
    names: Sequence[str],
    task_of: Callable[[Examples], Tensor],
    seed: int,
    validation_fraction: float,
) -> list[Task]:
    """Tasks in stored order; ``task_of`` gives the task of every example ``[n]``, -1 for none.

    Where the data set has no validation examples of its own, the last part of a random permutation
    of each task is set aside, in task order.
    """
    train, test = task_of(dataset.train), task_of(dataset.test)
    validation = None if dataset.validation is None else task_of(dataset.validation)
    rng = generator(seed, "validation")
    tasks = []
    for t, name in enumerate(names):
        rows = _where(train == t)
        if dataset.validation is not None and validation is not None:
            held_out = Subset(dataset.validation, _where(validation == t))
        else:
            rows = rows[torch.randperm(len(rows), generator=rng)]
            aside = int(validation_fraction * len(rows))
            if validation_fraction > 0 and len(rows) > 1:
                aside = max(1, aside)  # without any, the learner could not be judged
            kept = len(rows) - aside
            held_out, rows = Subset(dataset.train, rows[kept:]), rows[:kept]
        tested = Subset(dataset.test, _where(test == t))
        tasks.append(Task(name, Subset(dataset.train, rows), held_out, tested))
    return tasks


def _with_rows(task: Task, rows: Tensor) -> Task:
    return replace(task, train=replace(task.train, rows=rows))


def _where(condition: Tensor) -> Tensor:
    return condition.nonzero().squeeze(1)
