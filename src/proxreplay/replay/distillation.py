"""The average of the weights as a teacher of the network it averages."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proxreplay.batch import Batch
from proxreplay.errors import InputError
from proxreplay.options import DistillationOptions
from proxreplay.replay.losses import Loss, Needs, extra, needs_of
from proxreplay.replay.weights import joint_weight, weighted_mean


@dataclass(frozen=True)
class Distilled:
    """A replay loss, plus how far the network's predictions are from those of the average.

        L = loss(B, M) + weight mean KL( softmax(z_average / T) || softmax(z / T) )

    over the replayed examples, or over all of them. ``z`` are the logits of the loss's own forward
    passes, so the only further cost is one forward pass of the average without gradients. Inactive
    classes have probability 0 in both. The mean is one with the weights of the examples; weights of
    classes are those of ``loss`` alone.

    Args:
        loss: any replay loss that passes each example through the model once, first the incoming
            ones and then the replayed ones, as all of proxreplay do.
        weight: of the divergence.
        temperature: ``T``.
        on: ``replay``, or ``all`` for incoming examples too.

    >>> from proxreplay import er
    >>> Distilled(er, weight=2.0).needs.average
    'replay'
    """

    loss: Loss
    weight: float = 2.0
    temperature: float = DistillationOptions.temperature
    on: str = DistillationOptions.on

    def __post_init__(self) -> None:
        DistillationOptions(self.weight, self.temperature, self.on)  # checks them

    @property
    def needs(self) -> Needs:
        """Those of the loss, and the average's logits."""
        return dataclasses.replace(needs_of(self.loss), average=self.on)

    def __call__(self, model: nn.Module, incoming: Batch, replay: Batch | None) -> Tensor:
        """The forward passes of the loss, and none of its own."""
        outputs: list[Tensor] = []
        with model.register_forward_hook(lambda module, args, output: outputs.append(output)):
            loss = self.loss(model, incoming, replay)
        batches = [incoming] if self.on == "all" else []
        batches += [] if replay is None else [replay]
        if not batches or self.weight == 0:
            return loss
        logits = torch.cat(outputs)
        target = torch.cat([extra(batch, "average", "Distilled") for batch in batches])
        expected = len(incoming) + (0 if replay is None else len(replay))
        if len(logits) != expected or logits.shape[1] != target.shape[1]:
            raise InputError(
                f"Distilled: {expected} examples, but {self.loss} gave logits {list(logits.shape)} "
                f"and the average {list(target.shape)}; the loss has to pass each example through "
                "the model once, and the average must have the classes of the model."
            )
        own = (logits[-len(target) :] / self.temperature).log_softmax(dim=1)
        taught = (target / self.temperature).log_softmax(dim=1)
        weight = joint_weight(*batches)
        if weight is None:
            distance = F.kl_div(own, taught, reduction="batchmean", log_target=True)
        else:
            apart = F.kl_div(own, taught, reduction="none", log_target=True).sum(dim=1)
            distance = weighted_mean(apart, weight)
        return loss + self.weight * distance
