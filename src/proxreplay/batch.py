"""Batch: the one thing that flows from the stream to the learner and into the memory.

Inputs are a tensor, or a dict or tuple of tensors with one row per example each. What has to be
done to inputs of any of these forms is done by `each`, `merged`, `named` and `unnamed`; to what
models take and give, nested in whatever way, by `tensors_in` and `with_tensors`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from proxreplay.errors import InputError

Inputs = Tensor | dict[str, Tensor] | tuple[Tensor, ...]

WHOLE = "inputs"  # the name of inputs that are one tensor
WEIGHT = "weight"  # the extra that holds the weights of examples


@dataclass(frozen=True)
class Batch:
    """A few examples that arrive, are stored, or are replayed together.

    Args:
        inputs: ``[n, ...]``, as stored (uint8 for images); or a dict or tuple of such tensors.
        labels: ``[n]``, int64.
        extras: further tensors with one row per example, such as ``logits`` ``[n, classes]`` or
            ``weight`` ``[n]``, how much each example counts in a loss.
        task: the task this batch comes from. Only the evaluator may look at it.
        position: how many stream batches came before. Only the evaluator may look at it.
        train: whether SGD steps are made on it; a short last batch is only remembered.

    >>> import torch
    >>> batch = Batch(torch.zeros(3, 8), torch.tensor([0, 1, 0]))
    >>> len(batch)
    3
    """

    inputs: Inputs
    labels: Tensor
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    task: int | None = None
    position: int | None = None
    train: bool = True

    def __post_init__(self) -> None:
        inputs = named(self.inputs)
        for name, value in {**inputs, "labels": self.labels, **self.extras}.items():
            if not isinstance(value, Tensor):
                raise InputError(f"Batch: {name} of type {type(value).__name__}; give a tensor.")
        for name, value in inputs.items():
            if value.ndim == 0 or self.labels.ndim != 1:
                raise InputError(
                    f"Batch: {name} of shape {tuple(value.shape)} and labels of shape "
                    f"{tuple(self.labels.shape)}; give inputs [n, ...] and labels [n]."
                )
        n = check_same_length(self.inputs, "Batch")
        for name, tensor in {"labels": self.labels, **self.extras}.items():
            if len(tensor) != n:
                raise InputError(
                    f"Batch: {n} inputs but {len(tensor)} {name}; give one row per example."
                )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice | Tensor) -> "Batch":
        """Some of the examples, with what is beside them."""
        extras = {name: tensor[rows] for name, tensor in self.extras.items()}
        return replace(
            self, inputs=part(self.inputs, rows), labels=self.labels[rows], extras=extras
        )

    @property
    def weight(self) -> Tensor | None:
        """How much each example counts in a loss, ``[n]``; None if all count the same."""
        return self.extras.get(WEIGHT)

    def with_extras(self, **extras: Tensor) -> "Batch":
        """The same examples with more tensors beside them."""
        return replace(self, extras={**self.extras, **extras})

    @staticmethod
    def joined(batches: "Sequence[Batch]") -> "Batch":
        """One batch after the other as one; all have the same extras."""
        if len(batches) == 1:
            return batches[0]
        return Batch(
            merged([batch.inputs for batch in batches]),
            torch.cat([batch.labels for batch in batches]),
            {name: torch.cat([b.extras[name] for b in batches]) for name in batches[0].extras},
        )


def named(inputs: Inputs) -> dict[str, Tensor]:
    """The tensors of inputs by names that also say in which form they are; see `unnamed`.

    >>> list(named({"ids": torch.zeros(2, 3), "mask": torch.ones(2, 3)}))
    ['inputs.ids', 'inputs.mask']
    >>> list(named((torch.zeros(2, 3), torch.zeros(2, 1))))
    ['inputs[0]', 'inputs[1]']
    """
    if isinstance(inputs, Mapping):
        tensors = {f"{WHOLE}.{name}": tensor for name, tensor in inputs.items()}
    elif isinstance(inputs, tuple):
        tensors = {f"{WHOLE}[{i}]": tensor for i, tensor in enumerate(inputs)}
    else:
        return {WHOLE: inputs}
    if not tensors:
        raise InputError(f"Batch: an empty {type(inputs).__name__} as inputs; give a tensor.")
    return tensors


def is_input(name: str) -> bool:
    """Whether a name is one that `named` gives.

    >>> is_input("inputs"), is_input("inputs[1]"), is_input("labels")
    (True, True, False)
    """
    return name == WHOLE or name.startswith((f"{WHOLE}.", f"{WHOLE}["))


def unnamed(tensors: Mapping[str, Tensor]) -> Inputs:
    """The inputs among named tensors; the inverse of `named`."""
    if WHOLE in tensors:
        return tensors[WHOLE]
    inputs = {name: tensor for name, tensor in tensors.items() if is_input(name)}
    if all(name.startswith(f"{WHOLE}[") for name in inputs):
        return tuple(inputs[f"{WHOLE}[{i}]"] for i in range(len(inputs)))
    return {name.removeprefix(f"{WHOLE}."): tensor for name, tensor in inputs.items()}


def each(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Inputs of the same form, every tensor changed."""
    return merged([inputs], lambda tensors: change(tensors[0]))


def merged(many: Sequence[Inputs], merge: Callable[[list[Tensor]], Tensor] = torch.cat) -> Inputs:
    """One from many inputs of the same form: by default, one after the other."""
    first = many[0]
    if isinstance(first, Tensor):
        return merge(list(many))  # type: ignore[arg-type]
    parts = [named(inputs) for inputs in many]
    if any(part.keys() != parts[0].keys() for part in parts):
        raise InputError(
            f"Batch: inputs with {sorted(parts[0])} and others with "
            f"{sorted(next(part for part in parts if part.keys() != parts[0].keys()))}; give all "
            "batches the same."
        )
    return unnamed({name: merge([part[name] for part in parts]) for name in parts[0]})


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and dicts; packed sequences are tuples, too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(one)


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Nested tuples, lists and dicts with every tensor changed; all else stays as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: with_tensors(one, change) for name, one in value.items()}
    if type(value) in (tuple, list):  # others, as packed sequences, are more than their parts
        return type(value)(with_tensors(one, change) for one in value)
    return value


def part(inputs: Inputs, rows: slice | Tensor) -> Inputs:
    """Some of the examples."""
    return each(inputs, lambda tensor: tensor[rows])


def length(inputs: Inputs) -> int:
    """How many examples there are."""
    return len(next(iter(named(inputs).values())))


def check_same_length(inputs: Inputs, who: str) -> int:
    """How many examples there are; refused if the tensors do not agree."""
    lengths = {name: len(tensor) for name, tensor in named(inputs).items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{n} rows in {name}" for name, n in lengths.items())
        raise InputError(f"{who}: inputs of different length: {found}; give one row per example.")
    return next(iter(lengths.values()))
