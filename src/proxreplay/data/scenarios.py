"""From a data set to a stream: class-incremental, domain-incremental, blurry and i.i.d.

Scenarios are values that can be declared and compared; they import torch only to make a stream.
Each purpose has a random generator of its own (validation split, order, leaks), so a change of one
leaves the others as they are.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from proxreplay.lazy import LazyModule
from proxreplay.options import Count, LearnerOptions, Options, Share, below

if TYPE_CHECKING:
    from proxreplay.data import streams, tasks
    from proxreplay.data.datasets import Dataset
    from proxreplay.data.streams import Stream, Task
else:
    streams, tasks = LazyModule("proxreplay.data.streams"), LazyModule("proxreplay.data.tasks")

ShortLast = Literal["buffer_only", "train", "drop"]
SHORT_LAST: ShortLast = "buffer_only"  # as in the paper's experiments
DomainOrder = Sequence[str] | Literal["stored", "shuffled"]


class Scenario(Options, ABC):
    """A rule for which examples arrive in which task; see `stream`."""

    @abstractmethod
    def split(self, dataset: "Dataset", seed: int, validation_fraction: float) -> "list[Task]":
        """The tasks with their validation and test examples, in any order within a task."""

    def stream(
        self,
        dataset: "Dataset",
        seed: int,
        batch_size: int = LearnerOptions.batch_size,
        short_last: ShortLast = SHORT_LAST,
        validation_fraction: float = 0.05,
    ) -> "Stream":
        """The stream for a seed; the examples of each task arrive in random order.

        Args:
            dataset: any that fits the scenario.
            seed: determines everything random.
            batch_size: examples per batch.
            short_last: see `Stream`.
            validation_fraction: of each task's training examples, set aside for validation; not
                used where the data set has validation examples of its own.
        """
        below(1, validation_fraction=validation_fraction)
        found = tasks.shuffled(self.split(dataset, seed, validation_fraction), seed)
        return streams.Stream(found, batch_size, short_last)


@dataclass(frozen=True)
class ClassIncremental(Scenario):
    """Tasks of equally many classes; the i-th class in the order of arrival gets label i.

    The order of classes is ``torch.manual_seed(seed); torch.randperm(classes)``, as in the paper.
    Where the classes cannot be shared equally, the first of the ``tasks`` have one more.
    """

    tasks: int

    def split(self, dataset: "Dataset", seed: int, validation_fraction: float) -> "list[Task]":
        """Tasks of classes."""
        return tasks.class_tasks(dataset, self.tasks, seed, validation_fraction)


@dataclass(frozen=True)
class Blurry(Scenario):
    """No clean boundaries (i-Blurry): some classes leak from their task into all the others.

    Like `ClassIncremental`, but only ``round(disjoint * classes)`` random classes stay in their
    task. Of every other class, ``int(blur * n)`` of its n examples move to other tasks, drawn at
    random. Validation and test examples stay with the class's own task.

    Args:
        tasks: at most one per class.
        disjoint: fraction of classes that do not leak; 1 gives `ClassIncremental`.
        blur: fraction of a leaking class's examples that arrive in other tasks.
    """

    tasks: int
    disjoint: Share = 0.5
    blur: Share = 0.1

    def split(self, dataset: "Dataset", seed: int, validation_fraction: float) -> "list[Task]":
        """Tasks of classes, some of which leak."""
        own = tasks.class_tasks(dataset, self.tasks, seed, validation_fraction)
        return tasks.leak(own, len(dataset.classes), self.disjoint, self.blur, seed)


@dataclass(frozen=True)
class DomainIncremental(Scenario):
    """One task per domain (or time bucket); labels mean the same in all of them.

    Args:
        order: names of domains, each at most once; ``stored`` for the order of
            ``dataset.domains``; ``shuffled`` for a random order.
    """

    order: DomainOrder = "stored"

    def split(self, dataset: "Dataset", seed: int, validation_fraction: float) -> "list[Task]":
        """One task per domain."""
        return tasks.domain_tasks(dataset, self.order, seed, validation_fraction)


@dataclass(frozen=True)
class IID(Scenario):
    """The upper bound: all examples in one random order, in ``tasks`` random parts of equal size.

    Train, validation and test are split alike; labels stay as they are.
    """

    tasks: Count = 1

    def split(self, dataset: "Dataset", seed: int, validation_fraction: float) -> "list[Task]":
        """Random parts."""
        return tasks.random_tasks(dataset, self.tasks, seed, validation_fraction)
