"""Replay losses: ``(model, incoming, replay) -> loss``, each a small function any loop can call."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proxreplay.batch import Batch

Loss = Callable[[nn.Module, Batch, Batch | None], Tensor]


def er(model: nn.Module, incoming: Batch, replay: Batch | None) -> Tensor:
    """Experience replay: mean cross-entropy over all examples in one joint forward."""
    if replay is None:
        return F.cross_entropy(model(incoming.inputs), incoming.labels)
    logits = model(torch.cat([incoming.inputs, replay.inputs]))
    return F.cross_entropy(logits, torch.cat([incoming.labels, replay.labels]))
