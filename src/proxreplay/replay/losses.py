"""Replay losses: ``(model, incoming, replay) -> loss``, small frozen objects any loop can call.

Symbols: ``B`` is the incoming batch, ``M`` the replayed one, ``CE`` the mean cross-entropy, ``z``
the logits. A loss with nothing to replay (``replay`` is None) is ``CE(B)``.

Weights: every mean over examples in a formula here is ``sum_i w_i l_i / sum_i w_i`` with the
weights ``w = batch.weight`` (1 where there are none), times those of their classes. So an example
of weight 2 counts as two of weight 1. All means are made by `weighted_mean`.

The lower-case names are ready to use with the defaults; the classes take the options:

    loss=lode                  loss=Lode(rho=0.05)

A loss is pure. What it needs beyond inputs and labels it declares as `Needs`, and finds in
``replay.extras``; a loop of your own provides it, and `Learner` does so by itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proxreplay.batch import Batch, merged
from proxreplay.errors import InputError
from proxreplay.models.heads import INACTIVE_LOGIT
from proxreplay.options import Amount, Count, LossOptions, Options, Share
from proxreplay.replay.weights import (
    as_class_weight,
    at_least_tiny,
    joint_weight,
    weighted_mean,
    with_class_weight,
)

Loss = Callable[[nn.Module, Batch, Batch | None], Tensor]


@dataclass(frozen=True)
class Needs:
    """What a loss asks of the loop that calls it.

    Args:
        draws: how many independent draws from the memory ``replay`` holds, one after the other,
            equally many examples each; 0 if it never looks at ``replay``.
        stored_logits: ``replay.extras["logits"]``: what the model said about each example when it
            was stored, ``[n, classes]``; NaN where a class did not exist.
        teacher_every: ``replay.extras["teacher"]``: the logits, on the same inputs, of a frozen
            copy of the model taken after the first stream batch and every so many later.
        average: ``extras["average"]``: the logits, on the same inputs, of the average of the
            weights: of ``replay``, or of ``all`` (the incoming batch too); None for no batch.
    """

    draws: int = 1
    stored_logits: bool = False
    teacher_every: int | None = None
    average: str | None = None


def needs_of(loss: Loss) -> Needs:
    """The needs a loss declares; a plain function needs one draw and nothing else."""
    needs: Needs = getattr(loss, "needs", Needs())
    return needs


@dataclass(frozen=True)
class ReplayLoss(Options, ABC):
    """A loss whose classes may have weights.

    Args:
        class_weight: by output (integer labels are their output), what the weights of the examples
            of that class are multiplied with, in every term of the loss; 1 where nothing is said.
            A dict, or numbers for the outputs from 0 on.
    """

    class_weight: Any = field(default=None, kw_only=True, metadata={"added": True})

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "class_weight", as_class_weight(self.class_weight))

    def __call__(self, model: nn.Module, incoming: Batch, replay: Batch | None) -> Tensor:
        """The loss, a number."""
        if self.class_weight is not None:
            incoming = with_class_weight(incoming, self.class_weight)
            replay = None if replay is None else with_class_weight(replay, self.class_weight)
        if replay is None:
            return cross_entropy(model(incoming.inputs), incoming)
        return self.value(model, incoming, replay)

    def __repr__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        if shown["class_weight"] is None:
            del shown["class_weight"]
        options = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"{type(self).__name__}({options})"

    @property
    def needs(self) -> Needs:
        """What it asks for beyond inputs and labels."""
        return Needs()

    @abstractmethod
    def value(self, model: nn.Module, incoming: Batch, replay: Batch) -> Tensor:
        """The loss with something to replay, given weights that are those of the classes too."""


@dataclass(frozen=True, repr=False)
class Finetune(ReplayLoss):
    """No replay at all: ``L = CE(B)``."""

    needs: ClassVar[Needs] = Needs(draws=0)

    def value(self, model: nn.Module, incoming: Batch, replay: Batch) -> Tensor:
        """Mean cross-entropy of the incoming batch."""
        return cross_entropy(model(incoming.inputs), incoming)


@dataclass(frozen=True, repr=False)
class Er(ReplayLoss):
    """Experience replay: ``L = CE(B u M)``, the mean over all examples of one joint forward."""

    def value(self, model: nn.Module, incoming: Batch, replay: Batch) -> Tensor:
        """Mean cross-entropy over both batches."""
        logits = model(merged([incoming.inputs, replay.inputs]))
        return cross_entropy(logits, incoming, replay)


@dataclass(frozen=True, repr=False)
class ErAce(ReplayLoss):
    """Asymmetric cross-entropy: incoming examples compete among the classes of their batch only.

        L = alpha CE_Cn(B) + (1 - alpha) CE(M),     Cn = labels present in B

    Args:
        alpha: the share of the incoming batch.
    """

    alpha: Share = LossOptions.alpha

    def value(self, model: nn.Module, incoming: Batch, replay: Batch) -> Tensor:
        """Two forwards: incoming, replay."""
        logits: Tensor = model(incoming.inputs)
        new = present(incoming.labels, logits.shape[1])
        within = cross_entropy(restricted(logits, new), incoming)
        replayed = cross_entropy(model(replay.inputs), replay)
        return self.alpha * within + (1 - self.alpha) * replayed


@dataclass(frozen=True, repr=False)
class Lode(ReplayLoss):
    """Loss decoupling: telling new classes apart and telling new from old are weighted apart.

        L = 1/2 ( CE_Cn(B) + beta_2 mean_B[ lse(z) - lse(z_Cn) ] + CE(M) )

    Task-free, ``Cn`` are the labels present in B, ``Co`` all other outputs of the head, and
    ``beta_2 = rho |Cn| / |Co|``. With known tasks of equal size (the method's original form), the
    task ``t`` of B holds labels ``t c .. t c + c - 1``, ``Cn`` are the labels from ``t c`` on and
    ``beta_2 = rho / t``; in the first task that is plain ``1/2 (CE(B) + CE(M))``.
    ``rho = 0`` is `ErAce` with ``alpha = 0.5``.

    Args:
        rho: how hard new classes push old ones down.
        classes_per_task: ``c`` for the original form; None for the task-free one.
    """

    rho: Amount = LossOptions.rho
    classes_per_task: Count | None = None

    def value(self, model: nn.Module, incoming: Batch, replay: Batch) -> Tensor:
        """Two forwards: incoming, replay."""
        logits: Tensor = model(incoming.inputs)
        new, beta_2 = self._split(incoming.labels, logits.shape[1])
        logits_new = restricted(logits, new)
        within = cross_entropy(logits_new, incoming)
        pushed = logits.logsumexp(dim=1) - logits_new.logsumexp(dim=1)
        between = weighted_mean(pushed, incoming.weight)
        replayed = cross_entropy(model(replay.inputs), replay)
        return 0.5 * (within + beta_2 * between + replayed)

    def _split(self, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Which classes are new, ``[classes]``, and ``beta_2``."""
        if self.classes_per_task is None:
            new = present(labels, classes)
            # Without old classes lse(z) = lse(z_Cn): any finite beta_2 will do.
            return new, self.rho * new.sum() / (~new).sum().clamp(min=1)
        task = labels.min() // self.classes_per_task
        new = torch.arange(classes, device=labels.device) >= task * self.classes_per_task
        beta_2: Tensor = self.rho / task.clamp(min=1)
        return new, beta_2


@dataclass(frozen=True, repr=False)
class Derpp(ReplayLoss):
    """Dark experience replay++, with the logits each example had when it was stored.

        L = CE(B) + logit_weight MSE(z(M1), stored logits) + replay_weight CE(M2)

    M1 and M2 are independent draws. The MSE is the mean over all examples and those classes that
    were there, and learned, at storage time.

    Args:
        replay_weight: of the replayed cross-entropy (the method's beta).
        logit_weight: of the distance from the stored logits (the method's alpha).
    """

    replay_weight: Amount = LossOptions.replay_weight
    logit_weight: Amount = LossOptions.logit_weight
    needs: ClassVar[Needs] = Needs(draws=2, stored_logits=True)

    def value(self, model: nn.Module, incoming: Batch, replay: Batch) -> Tensor:
        """Three forwards: incoming, first draw, second draw."""
        new = cross_entropy(model(incoming.inputs), incoming)
        half = len(replay) // 2
        first, second = replay[:half], replay[half:]
        stored = extra(first, "logits", "Derpp")
        distance = logit_distance(model(first.inputs), stored, first.weight)
        replayed = cross_entropy(model(second.inputs), second)
        return new + self.logit_weight * distance + self.replay_weight * replayed


@dataclass(frozen=True, repr=False)
class DerppSnapshot(ReplayLoss):
    """What the LPR paper calls DER: the logits to stay close to come from a lagging copy.

        L = CE(B) + logit_weight MSE(z(M), z_teacher(M)) + replay_weight CE(M)

    The teacher is a frozen copy of the model, in train mode, on the same augmented inputs.

    Args:
        replay_weight: of the replayed cross-entropy.
        logit_weight: of the distance from the teacher's logits.
        every: stream batches between snapshots: after batches 0, every, 2 every, ...
    """

    replay_weight: Amount = LossOptions.replay_weight
    logit_weight: Amount = LossOptions.logit_weight
    every: Count = LossOptions.teacher_every

    @property
    def needs(self) -> Needs:
        """A teacher."""
        return Needs(teacher_every=self.every)

    def value(self, model: nn.Module, incoming: Batch, replay: Batch) -> Tensor:
        """Two forwards: incoming, replay."""
        new = cross_entropy(model(incoming.inputs), incoming)
        logits = model(replay.inputs)
        teacher = extra(replay, "teacher", "DerppSnapshot")
        distance = logit_distance(logits, teacher, replay.weight)
        replayed = cross_entropy(logits, replay)
        return new + self.logit_weight * distance + self.replay_weight * replayed


def cross_entropy(logits: Tensor, *batches: Batch) -> Tensor:
    """``CE`` of the examples of one or several batches, whose logits are one after the other."""
    labels = torch.cat([batch.labels for batch in batches])
    weight = joint_weight(*batches)
    if weight is None:
        return F.cross_entropy(logits, labels)
    return weighted_mean(F.cross_entropy(logits, labels, reduction="none"), weight)


def present(labels: Tensor, classes: int) -> Tensor:
    """Which of the classes occur among the labels, bool ``[classes]``."""
    mask = torch.zeros(classes, dtype=torch.bool, device=labels.device)
    mask[labels] = True
    return mask


def restricted(logits: Tensor, classes: Tensor) -> Tensor:
    """The logits with every class outside the bool mask ``[classes]`` out of the race."""
    return logits.masked_fill(~classes, float("-inf"))


def logit_distance(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """``MSE(z, target)`` over the classes that both know; 0 if there are none.

    Args:
        logits: ``[n, classes]``.
        target: ``[n, at most classes]``; NaN or the logit of an inactive output is unknown.
        weight: of every example, ``[n]``.
    """
    logits = logits[:, : target.shape[1]]
    known = ~target.isnan() & (target != INACTIVE_LOGIT) & (logits != INACTIVE_LOGIT)
    difference = (logits - target.masked_fill(~known, 0)).masked_fill(~known, 0)
    if weight is None:
        return difference.square().sum() / known.sum().clamp(min=1)
    shares = weight[:, None] * known
    return (shares * difference.square()).sum() / at_least_tiny(shares.sum())


def extra(batch: Batch, name: str, loss: str) -> Tensor:
    """What a loss asks for beside inputs and labels."""
    if name not in batch.extras:
        raise InputError(
            f"{loss}: the batch has no '{name}' beside inputs and labels; provide what the loss "
            "declares as its needs (Batch.with_extras), or let Learner do it."
        )
    return batch.extras[name]


finetune = Finetune()
er = Er()
er_ace = ErAce()
lode = Lode()
derpp = Derpp()
derpp_snapshot = DerppSnapshot()
SEPARATE = (Finetune, ErAce, Lode, Derpp, DerppSnapshot)  # the incoming batch is run alone
