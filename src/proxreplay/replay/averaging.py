"""Averaging the weights over time: a second network that predicts, and may teach, but never trains.

See docs/averaging.md for what it is worth.
"""

import copy
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Self

import torch
from torch import Tensor, nn

from proxreplay.errors import InputError
from proxreplay.models.heads import GrowingHead
from proxreplay.options import AveragingOptions

DEFAULT_AVERAGING = AveragingOptions()
RECENCY = 5  # k: while the average is young, its horizon is 1/k of the steps so far


class EMA:
    """A moving average of everything a model holds: parameters and BatchNorm statistics.

        average <- average + c_t (model - average)          after SGD step t = 1, 2, ...

        debiased:  c_t = max(1 - m, k / (k + t - 1))         k = 5
        copy:      c_t = 1 - m

    Debiased, the first step replaces the untrained network (``c_1 = 1``); until the horizon is
    ``1 / (1 - m)`` steps, it is a fifth of the steps so far. ``copy`` starts as a copy of the
    untrained network, which fades at the same rate as everything else (the paper's EMA rows).

    Integer and bool buffers are copied. When a `GrowingHead` grows, the average gets the new rows
    of the model. Nothing trains the average or changes the model because of it.

    Args:
        model: what is trained.
        momentum: ``m``, at least 0 and below 1.
        start: ``debiased`` or ``copy``.
        predict: which of the two networks predicts; see `combined`.

    >>> model = nn.Linear(2, 2)
    >>> ema = EMA(model)
    >>> with torch.no_grad():
    ...     _ = model.bias.add_(1.0)
    >>> ema.update_()
    >>> torch.equal(ema.model.bias, model.bias)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        momentum: float = AveragingOptions.momentum,
        *,
        start: str = AveragingOptions.start,
        predict: str = AveragingOptions.predict,
    ) -> None:
        self.options = AveragingOptions(momentum, start, predict)
        self.online = model
        try:
            self.model = frozen_copy(model).eval()
        except (RuntimeError, TypeError) as error:
            raise InputError(
                f"EMA: the {type(model).__name__} cannot be copied ({error}); make it copyable by "
                "copy.deepcopy, or learn without an average (averaging=None)."
            ) from error
        self._pairs = _Pairs(self.model, model)
        self.steps = 0
        self.arrived: dict[int, int] = {}  # the number of steps when each class came
        # share of the average that is from the steps since then, in the order of `arrived`
        self.settled = torch.zeros(0, dtype=torch.float64)

    @classmethod
    def of(cls, model: nn.Module, options: AveragingOptions) -> Self:
        """An average of a model with these options."""
        return cls(model, options.momentum, start=options.start, predict=options.predict)

    @torch.no_grad()
    def update_(self) -> None:
        """Move the average towards the model; call it after every optimizer step."""
        self.follow_growth_()
        self.steps += 1
        gain = 1 - self.options.momentum  # c_t
        if self.options.start == "debiased":
            gain = max(gain, RECENCY / (RECENCY + self.steps - 1))
        floating, others = self._pairs.tensors()
        torch._foreach_lerp_(*floating, gain)
        if others[0]:
            torch._foreach_copy_(*others)
        self.settled += gain * (1 - self.settled)

    @torch.no_grad()
    def follow_growth_(self) -> None:
        """Give the average the rows a growing head of the model has got, and its activity."""
        for average, online in self._pairs.heads:
            average.grow_like(online)
            average.active.copy_(online.active)

    def meet_(self, classes: Iterable[int]) -> None:
        """Follow the head, and note the classes of a batch before it is learned.

        The average knows nothing of new ones; only `weights` depend on them.
        """
        self.follow_growth_()
        new = sorted(set(classes) - self.arrived.keys())
        self.arrived |= dict.fromkeys(new, self.steps)
        self.settled = torch.cat([self.settled, self.settled.new_zeros(len(new))])

    def weights(self, outputs: int) -> Tensor:
        """The weight of the average's probability of each class in a blend, from 0 to 0.9.

            w_c = 0.36 t / (t + 100) + 0.54 f_c s_c / (s_c + 50)

        after ``t`` steps, ``s_c`` of them since class ``c`` came; ``f_c`` is the share of the
        average that is from those ``s_c``. So the online network has most of the say about a class
        that the average does not know yet, and the average about all others. A class that never
        came counts as there from the start. Returns ``[outputs]``, in float64.
        """
        t = self.steps
        whole = 1 - self.options.momentum**t if self.options.start == "copy" else float(t > 0)
        since = torch.full((outputs,), float(t), dtype=torch.float64)
        settled = torch.full_like(since, whole)
        met = torch.tensor(list(self.arrived), dtype=torch.long)
        since[met] -= torch.tensor(list(self.arrived.values()), dtype=torch.float64)
        settled[met] = self.settled
        return 0.36 * t / (t + 100) + 0.54 * settled * since / (since + 50)

    def combined(self, average: Tensor, online: Tensor, predict: str | None = None) -> Tensor:
        """Logits ``[n, classes]`` from the logits of both networks.

        Args:
            average: logits of the average.
            online: logits of the model that is trained.
            predict: ``average`` or ``online`` for one of them; ``both`` for the mean of their
                probabilities, ``blend`` for the mean with `weights`, class by class and then
                normalised; None for the option. Of a mean, these are the logarithms.
        """
        predict = self.options.predict if predict is None else predict
        if predict in ("average", "online"):
            return average if predict == "average" else online
        outputs = average.shape[1]
        blend = predict == "blend"
        weights = self.weights(outputs) if blend else average.new_full((outputs,), 0.5)
        weights = weights.to(average)
        mean = torch.logaddexp(
            average.log_softmax(dim=1) + weights.log(),
            online.log_softmax(dim=1) + (1 - weights).log(),
        )
        return mean.log_softmax(dim=1) if blend else mean

    def state_dict(self) -> dict[str, Any]:
        """The average, its options and how far it has come."""
        return {
            **asdict(self.options),
            "steps": self.steps,
            "classes": list(self.arrived),
            "arrived": list(self.arrived.values()),
            "settled": self.settled,
            "model": self.model.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved average; it must have been made with the same options."""
        saved = options_of(state)
        if saved != self.options:
            raise InputError(f"EMA: {self.options}, but the saved average was made with {saved}.")
        self.model.load_state_dict(state["model"])
        self.steps = state.get("steps", 0)
        classes = state.get("classes", [])
        # earlier versions knew when the newest class came, which then stood for all of them
        newest = self.steps - state.get("since", 0)
        arrived = state.get("arrived", [newest] * len(classes))
        self.arrived = dict(zip(classes, arrived, strict=True))
        settled = torch.as_tensor(state.get("settled", 0.0), dtype=torch.float64)
        self.settled = settled.expand(len(classes)).clone()


def options_of(state: dict[str, Any]) -> AveragingOptions:
    """The options a saved average was made with; before there was a choice, it was a copy."""
    return AveragingOptions(
        state["momentum"], state.get("start", "copy"), state.get("predict", "average")
    )


def frozen_copy(model: nn.Module) -> nn.Module:
    """A copy that has no gradients and asks for none."""
    duplicate = copy.deepcopy(model)
    duplicate.zero_grad(set_to_none=True)
    return duplicate.requires_grad_(False)


class _Pairs:
    """What belongs together in a model and its average, found once: a walk costs as much as a step.

    Tensors are looked up where they hang, so that moved or replaced ones are followed.
    """

    def __init__(self, average: nn.Module, online: nn.Module) -> None:
        modules = list(zip(average.modules(), online.modules(), strict=True))
        self.heads = [
            (a, o) for a, o in modules if isinstance(a, GrowingHead) and isinstance(o, GrowingHead)
        ]
        self._names = [(o._parameters, o._buffers, o._modules) for _, o in modules]
        self._count = self._counted()
        slots: dict[int, tuple[dict[str, Any], dict[str, Any], str]] = {}  # shared tensors once
        for a, o in modules:
            for ours, theirs in ((a._parameters, o._parameters), (a._buffers, o._buffers)):
                for name, tensor in theirs.items():
                    if tensor is not None:
                        slots.setdefault(id(tensor), (ours, theirs, name))
        self._slots = list(slots.values())

    def _counted(self) -> int:
        return sum(len(names) for of_module in self._names for names in of_module)

    def tensors(
        self,
    ) -> tuple[tuple[list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]:
        """Floating-point tensors of the average and of the model, then all others."""
        if self._counted() != self._count:
            raise InputError(
                "EMA: the model has gained or lost parameters or modules since its average was "
                "made; make a new EMA, or a new Learner, from the model as it is now."
            )
        floating: tuple[list[Tensor], list[Tensor]] = ([], [])
        others: tuple[list[Tensor], list[Tensor]] = ([], [])
        for ours, theirs, name in self._slots:
            average, online = ours[name], theirs[name]
            kind = floating if average.is_floating_point() else others
            kind[0].append(average)
            kind[1].append(online)
        return floating, others
