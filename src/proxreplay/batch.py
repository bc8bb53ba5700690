"""Batch: the one thing that flows from the stream to the learner and into the memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from proxreplay.errors import InputError


@dataclass(frozen=True)
class Batch:
    """A few examples that arrive, are stored, or are replayed together.

    Args:
        inputs: ``[n, ...]``, as stored (uint8 for images).
        labels: ``[n]``, int64.
        extras: further tensors with one row per example, such as ``logits`` ``[n, classes]``.
        task: the task this batch comes from. Only the evaluator may look at it.
        position: how many stream batches came before. Only the evaluator may look at it.
        train: whether SGD steps are made on it; a short last batch is only remembered.

    >>> import torch
    >>> batch = Batch(torch.zeros(3, 8), torch.tensor([0, 1, 0]))
    >>> len(batch)
    3
    """

    inputs: Tensor
    labels: Tensor
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    task: int | None = None
    position: int | None = None
    train: bool = True

    def __post_init__(self) -> None:
        for name, value in {"inputs": self.inputs, "labels": self.labels, **self.extras}.items():
            if not isinstance(value, Tensor):
                raise InputError(f"Batch: {name} of type {type(value).__name__}; give a tensor.")
        if self.inputs.ndim == 0 or self.labels.ndim != 1:
            raise InputError(
                f"Batch: inputs of shape {tuple(self.inputs.shape)} and labels of shape "
                f"{tuple(self.labels.shape)}; give inputs [n, ...] and labels [n]."
            )
        for name, tensor in {"labels": self.labels, **self.extras}.items():
            if len(tensor) != len(self.inputs):
                raise InputError(
                    f"Batch: {len(self.inputs)} inputs but {len(tensor)} {name}; "
                    "give one row per example."
                )

    def __len__(self) -> int:
        return len(self.labels)

    def with_extras(self, **extras: Tensor) -> "Batch":
        """The same examples with more tensors beside them."""
        return replace(self, extras={**self.extras, **extras})

    @staticmethod
    def joined(batches: "Sequence[Batch]") -> "Batch":
        """One batch after the other as one; all have the same extras."""
        if len(batches) == 1:
            return batches[0]
        return Batch(
            torch.cat([batch.inputs for batch in batches]),
            torch.cat([batch.labels for batch in batches]),
            {name: torch.cat([b.extras[name] for b in batches]) for name in batches[0].extras},
        )
