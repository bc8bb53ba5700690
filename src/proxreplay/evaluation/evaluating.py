"""A model and held-out examples in, accuracies out; training goes on as if nothing had happened."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from proxreplay.data.datasets import Examples
from proxreplay.data.streams import Subset
from proxreplay.models.heads import INACTIVE_LOGIT


@dataclass(frozen=True)
class Evaluation:
    """What one pass over the held-out examples of several tasks gave."""

    accuracy: list[float]  # one number per task
    loss: list[float]  # mean cross-entropy, one number per task


def evaluate(
    logits: Callable[[Tensor], Tensor], tasks: Sequence[Examples | Subset], batch_size: int = 500
) -> Evaluation:
    """Accuracy and loss on each task, in one pass of large batches over all of them.

    Examples of classes the model has no output for count as errors, with the loss of an inactive
    output.

    Args:
        logits: from stored inputs ``[n, ...]`` to logits ``[n, classes]``, in evaluation mode.
        tasks: held-out examples of every task.
        batch_size: examples per forward pass.
    """
    return evaluate_each(lambda x: {"": logits(x)}, tasks, batch_size)[""]


@torch.inference_mode()
def evaluate_each(
    logits: Callable[[Tensor], Mapping[str, Tensor]],
    tasks: Sequence[Examples | Subset],
    batch_size: int = 500,
) -> dict[str, Evaluation]:
    """As `evaluate`, of several predictors by name that share forward passes."""
    inputs = torch.cat([task.inputs for task in tasks])
    labels = torch.cat([task.labels for task in tasks])
    found: dict[str, list[Tensor]] = {}  # by name, [2, n]: whether it is right, and the loss
    for x, y in zip(inputs.split(batch_size), labels.split(batch_size), strict=True):
        for name, z in logits(x).items():
            targets = y.to(z.device)
            missing = int(targets.max()) + 1 - z.shape[1]
            if missing > 0:
                z = F.pad(z, (0, missing), value=INACTIVE_LOGIT)
            right = (z.argmax(dim=1) == targets).double()
            entropy = F.cross_entropy(z, targets, reduction="none").double()
            found.setdefault(name, []).append(torch.stack([right, entropy]))
    sizes = [len(task) for task in tasks]
    means = {
        name: [[float(part.mean()) for part in row.split(sizes)] for row in torch.cat(parts, dim=1)]
        for name, parts in found.items()
    }
    return {name: Evaluation(*rows) for name, rows in means.items()}
