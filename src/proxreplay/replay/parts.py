"""What a learner is made of, checked when it is made; and what it gives back."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from proxreplay.errors import InputError
from proxreplay.options import AveragingOptions, CompanionOptions, LearnerOptions
from proxreplay.proximal.layers.sites import check_whole
from proxreplay.proximal.rules.base import GradientRule
from proxreplay.replay.averaging import EMA
from proxreplay.replay.losses import Loss, needs_of
from proxreplay.replay.memory import Memory

if TYPE_CHECKING:
    from proxreplay.replay.learner import Learner

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Learned:
    """What `Learner.learn` did; ``float(learned)`` is the loss.

    Args:
        loss: mean over the steps; NaN if the batch was only remembered.
        ids: of the examples in the memory, whether they are stored or not; see `Learner.forget`.
            -1 for an example of weight 0, which is left out.
        refreshed: how many examples the rule was refreshed from; None if it was not refreshed.
    """

    loss: float
    ids: tuple[int, ...] = ()
    refreshed: int | None = None

    def __float__(self) -> float:
        return self.loss


class Observer(Protocol):
    """Looks at the steps of a learner and changes nothing about them."""

    def watch(self, learner: "Learner", loss: Loss) -> Loss:
        """Called once, when the learner is complete; returns the loss that each step calls.

        ``loss`` is the learner's, or what an observer before this one has returned.
        """


def check_parts(
    model: Any,
    memory: Any,
    rule: Any,
    loss: Any,
    averaging: Any,
    transform: Any,
    call: Any,
    companion: Any,
) -> None:
    """See that every part is what it should be and that they belong together."""
    if not isinstance(model, nn.Module):
        raise _wrong("model", model, "a torch.nn.Module")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise InputError(
            "Learner: the model is a DistributedDataParallel; give model.module. The learner "
            "averages gradients over processes by itself."
        )
    check_whole(model, "Learner")
    if isinstance(memory, GradientRule):
        raise InputError(
            f"Learner: {type(memory).__name__} is a rule and stands where the memory goes; hand it "
            "in as rule=..."
        )
    if not _takes_three(loss):
        raise _wrong("loss", loss, "a function of (model, incoming, replay), such as proxreplay.er")
    wanted_kinds: list[tuple[str, Any, Any, str]] = [
        ("memory", memory, Memory, "a memory, such as ClassBalancedMemory(2000)"),
        ("rule", rule, GradientRule, "a GradientRule, such as LPR(model)"),
        ("averaging", averaging, EMA | AveragingOptions, "AveragingOptions(momentum) or an EMA"),
        ("companion", companion, CompanionOptions, "CompanionOptions(weight), or None"),
        ("transform", transform, Callable, "a function of (inputs, generator)"),
        ("call", call, Callable, "a function of (model, inputs) that gives logits"),
    ]
    for part, value, kind, wanted in wanted_kinds:
        if value is not None and not isinstance(value, kind):
            raise _wrong(part, value, wanted)
    online = averaging.online if isinstance(averaging, EMA) else None
    for part, its_model in (("averaging", online), ("rule", getattr(rule, "model", None))):
        if its_model is not None and set(its_model.parameters()) != set(model.parameters()):
            raise InputError(
                f"Learner: the {part} was made for another model; make it for the one handed in."
            )
    if rule is not None and rule.reference_samples is None and needs_of(loss).draws == 0:
        raise InputError(
            f"Learner: {type(rule).__name__} looks at the replayed examples, but the loss "
            "replays none; give a loss that does, such as er."
        )
    if needs_of(loss).average is not None and averaging is None:
        raise InputError(
            f"Learner: the loss {loss} is taught by an average of the weights, but there is none; "
            "give averaging=AveragingOptions()."
        )


def _takes_three(loss: Any) -> bool:
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
        signature.bind(None, None, None)
    except TypeError:
        return False
    except ValueError:  # no signature to be had
        pass
    return True


def _wrong(part: str, value: Any, wanted: str) -> InputError:
    return InputError(f"Learner: {part} is {value!r:.80}; give {wanted}.")


def make_optimizer(model: nn.Module, lr: float | None, make: OptimizerFactory | None) -> Optimizer:
    """Plain SGD, or what the user makes of the parameters."""
    if make is None:
        return torch.optim.SGD(model.parameters(), lr=LearnerOptions.lr if lr is None else lr)
    if lr is not None:
        raise InputError(
            f"Learner: lr={lr} and an optimizer, which has a learning rate of its own; give one of "
            "the two."
        )
    optimizer = make(model.parameters()) if callable(make) else None
    if not isinstance(optimizer, Optimizer):
        raise _wrong(
            "optimizer", make, "a function, such as lambda parameters: Adam(parameters, lr=1e-3)"
        )
    return optimizer


def summary(learner: "Learner") -> str:
    """A small table: what a learner is made of and how far it has come."""
    model, rule, together = learner.model, learner.rule, learner.together.processes
    labels = [label for label in learner.labels if label is not None]
    every, samples = learner.refresh_every, learner.refresh_samples
    refreshed = ""
    if every and rule is not None and rule.needs_refresh:
        paid = " or more, as work pays for it," if learner.stretches else ""
        refreshed = f", every {every} batches{paid} from {samples or 'all'} examples"
    size = sum(parameter.numel() for parameter in model.parameters())
    rows = {
        "model": f"{type(model).__name__}, {size:,} parameters on {learner.placement.device}",
        "memory": repr(learner.memory),
        "rule": "none" if rule is None else type(rule).__name__ + refreshed,
        "loss": f"{learner.loss!r:.80}",
        **({} if together.alone else {"processes": together.described()}),
        "averaging": "none" if learner.averaging is None else type(learner.averaging).__name__,
        **({} if learner.companion is None else {"companion": repr(learner.companion)}),
        "optimizer": f"{type(learner.optimizer).__name__}, {learner.steps_per_batch} steps per "
        f"batch with {learner.replay_batch} replayed examples each",
        "labels": f"{len(labels)}: " + ", ".join(map(str, labels[:8])) + " ..." * (len(labels) > 8)
        if labels
        else "none yet",
    }
    head = f"Learner: {learner.batches_learned} of {learner.batches_seen} stream batches learned"
    return "\n".join([head, *(f"  {name:<10} {value}" for name, value in rows.items())])
