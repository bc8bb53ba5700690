"""A model and held-out examples in, accuracies out; training goes on as if nothing had happened."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from proxreplay.data.datasets import Examples
from proxreplay.data.streams import Subset


@dataclass(frozen=True)
class Evaluation:
    """What one pass over the held-out examples of several tasks gave.

    Args:
        accuracy: one number per task.
        loss: mean cross-entropy, one number per task.
    """

    accuracy: list[float]
    loss: list[float]


@torch.inference_mode()
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
    inputs = torch.cat([task.inputs for task in tasks])
    labels = torch.cat([task.labels for task in tasks])
    correct, losses = [], []
    for x, y in zip(inputs.split(batch_size), labels.split(batch_size), strict=True):
        z = logits(x)
        y = y.to(z.device)
        missing = int(y.max()) + 1 - z.shape[1]
        if missing > 0:
            z = F.pad(z, (0, missing), value=-1000.0)
        correct.append((z.argmax(dim=1) == y).double())
        losses.append(F.cross_entropy(z, y, reduction="none").double())
    sizes = [len(task) for task in tasks]
    return Evaluation(
        [float(part.mean()) for part in torch.cat(correct).split(sizes)],
        [float(part.mean()) for part in torch.cat(losses).split(sizes)],
    )
