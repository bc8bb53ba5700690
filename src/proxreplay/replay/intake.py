"""What a learner lets in: inputs, labels and weights become tensors that are safe to use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from proxreplay.batch import WEIGHT, Batch, Inputs, length, part
from proxreplay.errors import InputError
from proxreplay.models.heads import GrowingHead
from proxreplay.replay.inputs import InputKind, as_batch_of_one, as_inputs, as_tensors
from proxreplay.replay.labels import Indices, Labels, is_one_label, plain
from proxreplay.replay.weights import as_weights

REACH = 10_000  # how far an integer label may be beyond the outputs of a growing head


@dataclass(frozen=True)
class Admitted:
    """A batch that may be learned."""

    batch: Batch  # those examples that count
    # for each example that was given, whether it counts: its weight is above 0; None if all do
    counts: Tensor | None = None

    def ids(self, stored: Tensor) -> tuple[int, ...]:
        """One id per example that was given, from those of the batch; -1 where it did not count."""
        if self.counts is None:
            return tuple(stored.tolist())
        ids = torch.full((len(self.counts),), -1)
        ids[self.counts] = stored
        return tuple(ids.tolist())


@dataclass(frozen=True)
class Outputs:
    """What a model gives for one input."""

    number: int  # of outputs
    # whether calling the model with the inputs gives the logits; if not, it is called in another
    # way, or gives an object that holds them
    direct: bool = True


class Intake:
    """What a learner has met so far; only a batch that is good in all respects changes it."""

    def __init__(self, floating: torch.dtype, heads: Sequence[GrowingHead]) -> None:
        self.floating = floating
        self.heads = heads
        self.labels = Labels()
        self.kind: InputKind | None = None
        self.outputs: int | None = None  # of a fixed head
        self.direct: bool | None = None  # see `Outputs`; None before the first batch

    def admit(
        self,
        x: Any,
        y: Any,
        try_out: Callable[[Inputs], Outputs],
        check: Callable[[Batch], None] = lambda batch: None,
        sample_weight: Any = None,
    ) -> Admitted:
        """Check a stream batch, as `Learner.learn` takes it, and take note of what is new in it.

        ``try_out`` gives what the model makes of one input; ``check`` raises if there is something
        else against the batch.
        """
        given = x if isinstance(x, Batch) else None
        if (given is None) == (y is None):
            raise InputError("Learner: give inputs and labels, or one Batch.")
        if given is not None:
            if sample_weight is None:
                sample_weight = given.weight
            x, y = given.inputs, given.labels
        if is_one_label(y):
            x, y = as_batch_of_one(x), [y]
        inputs = self.check(x)
        weights = as_weights(sample_weight, length(inputs), self.floating)
        admitted, labels = self._counting(inputs, y, weights, given)
        batch = admitted.batch
        if len(batch) == 0:
            return admitted
        outputs = self._outputs_for(batch, try_out)
        check(batch)
        self.labels, self.kind = labels, InputKind.of(inputs)
        if outputs is not None:
            self.outputs = None if self.heads else outputs.number
            self.direct = outputs.direct
        return admitted

    def _counting(
        self, inputs: Inputs, y: Any, weights: Tensor | None, given: Batch | None
    ) -> tuple[Admitted, Labels]:
        """The examples that count, and the labels known afterwards."""
        indices, labels = self.labels.meet(y)
        batch = Batch(inputs, indices, {} if weights is None else {WEIGHT: weights})
        if given is not None:
            batch = replace(batch, position=given.position, train=given.train)
        if weights is None or bool((weights > 0).all()):
            return Admitted(batch), labels
        counts = (weights > 0).cpu()
        counting = [one for one, counted in zip(plain(y), counts, strict=True) if counted]
        indices, labels = self.labels.meet(counting)
        return Admitted(replace(batch[counts], labels=indices), counts), labels

    def _outputs_for(self, batch: Batch, try_out: Callable[[Inputs], Outputs]) -> Outputs | None:
        """What the model gives, where it has to be tried out; labels without output are refused."""
        self.check_reach(batch.labels)
        untried = self.kind is None or self.direct is None
        found = None
        if untried or (self.outputs is None and not self.heads):
            found = try_out(part(batch.inputs, slice(1)))
        outputs = self.outputs if found is None else found.number
        largest = int(batch.labels.max())
        if not self.heads and outputs is not None and largest >= outputs:
            raise InputError(
                f"Learner: {largest + 1} classes, but the model has {outputs} outputs; "
                "build it with more, or with a growing head (num_classes=None)."
            )
        return found

    def check_reach(self, indices: Indices) -> None:
        """Refuse integer labels for which a head would have to grow out of all proportion."""
        largest = int(indices.max())
        for head in self.heads:
            if largest >= head.out_features + REACH:
                raise InputError(
                    f"Learner: label {largest}, but the head has {head.out_features} outputs and "
                    f"would need one for every integer up to it. Give names, such as strings "
                    f"(str(label)): they get outputs in the order of arrival. Or call "
                    f"grow({largest + 1}) of the head first, if there are so many classes."
                )

    def index_of(self, label: Any) -> int:
        """The index of a label that is to be forgotten; refused if it was never met."""
        (index,) = self.labels.find([label]).tolist()
        if index not in self.labels.met:
            raise InputError(f"forget: label {label!r} was never met, or is forgotten.")
        return int(index)

    def check(self, x: Any) -> Inputs:
        """Inputs as tensors, if they are of the same kind as earlier ones."""
        tensors = as_tensors(x)
        if self.kind is not None and self.kind.is_one(tensors):
            tensors = as_batch_of_one(tensors)
        inputs = as_inputs(tensors, self.floating)
        kind = InputKind.of(inputs)
        if self.kind is not None and kind != self.kind:
            raise InputError(
                f"Learner: inputs of {kind} each, but earlier ones were {self.kind}; keep to one "
                "shape and dtype."
            )
        return inputs

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "labels": {
                "kind": self.labels.kind,
                "names": self.labels.names,
                "met": tuple(sorted(self.labels.met)),
            },
            "inputs": None if self.kind is None else self.kind.to_dict(),
            "outputs": self.outputs,
            "direct": self.direct,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.labels = Labels(**state["labels"])
        self.kind = None if state["inputs"] is None else InputKind.from_dict(state["inputs"])
        self.outputs = state["outputs"]
        self.direct = state.get("direct")
