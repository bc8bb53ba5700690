"""How much a rule shrinks the gradients of new and of replayed data."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from proxreplay.batch import Batch, Inputs, length, named, part
from proxreplay.errors import InputError
from proxreplay.evaluation.diagnostics.borrow import borrowed_gradients
from proxreplay.options import count
from proxreplay.proximal.layers.calling import Called
from proxreplay.proximal.rules.agem import AGEM
from proxreplay.proximal.rules.base import GradientRule

Loss = Callable[[nn.Module, Batch, Batch | None], Tensor]
Source = Literal["new", "replay", "all"]  # where the examples of a gradient come from
SOURCES: tuple[Source, ...] = ("new", "replay", "all")


@dataclass(frozen=True)
class Ratios:
    """``||P^-1 g|| / ||g||`` for the gradient of the new data, of the replayed data and of both."""

    # over all layers that the rule changes side by side; NaN where there is no gradient
    overall: Mapping[Source, float]
    layers: Mapping[str, Mapping[Source, float]]  # for each of these layers
    lr: float | None = None  # the learning rate

    @property
    def effective_lr(self) -> float | None:
        """``lr ||P^-1 g|| / ||g||`` for the gradient the step is made with."""
        return None if self.lr is None else self.lr * self.overall["all"]

    def record(self) -> dict[str, Any]:
        """What goes into the records; a ratio that does not exist is None."""

        def plain(ratios: Mapping[Source, float]) -> dict[str, float | None]:
            return {source: None if value != value else value for source, value in ratios.items()}

        return {
            "kind": "gradient",
            **plain(self.overall),
            "effective_lr": self.effective_lr,
            "layers": {name: plain(ratios) for name, ratios in self.layers.items()},
        }


@dataclass(eq=False)
class GradientRatios:
    """How much a rule shrinks the gradient of new and of replayed data (the paper's Figure 2).

    For ``Learner(observers=[...])``, or `around` the loss of a loop of your own. Every
    ``every``-th call measures, on the graph of the training step, and hands the ratios to
    ``on_ratios``; the loss itself is returned unchanged. The
    gradient of one source is what flows through the outputs of its examples: in
    ``D = dL/d outputs`` the rows of the other source are set to zero. So both sources add up to the
    whole gradient for any loss, also where BatchNorm couples the examples.

    Args:
        model: whose gradients are looked at.
        rule: what preconditions them.
        on_ratios: receives the ratios.
        every: calls of the loss between measurements; the first one measures.
        optimizer: where the learning rate is read, for the effective one.
    """

    model: nn.Module
    rule: GradientRule
    on_ratios: Callable[[Ratios], None]
    _: KW_ONLY
    every: int = 1
    optimizer: Optimizer | None = None
    calls: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        count(every=self.every)
        if isinstance(self.rule, AGEM):
            raise InputError(
                "GradientRatios: A-GEM compares with a gradient that it takes after the loss, so "
                "ratios would be those of the step before; leave diagnostics.gradients_every out."
            )

    def watch(self, learner: Any, loss: Loss) -> Loss:
        """Be one of a learner's ``observers``."""
        if self.optimizer is None:
            self.optimizer = learner.optimizer
        return self.around(loss)

    def around(self, loss: Loss) -> Loss:
        """The same loss, watched. What it declares in ``needs`` is declared on."""
        return _WatchedLoss(self, loss)

    def measure(
        self, loss: Loss, incoming: Batch, replay: Batch | None, called: nn.Module | None = None
    ) -> Tensor:
        """Compute the loss, with its graph ready for ``backward``, and hand its ratios on.

        ``called`` is what the loss calls, where that is not the model itself.
        """
        called = self.model if called is None else called
        with _outputs(called) as calls:
            value = loss(called, incoming, replay)
        if calls:
            self.on_ratios(self._ratios(value, calls, incoming, replay))
        return value

    def _ratios(
        self, loss: Tensor, calls: list["_Call"], incoming: Batch, replay: Batch | None
    ) -> Ratios:
        parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        with self.rule.paused():
            gradients = _split_gradients(loss, calls, parameters, incoming, replay)
        norms = {source: _norms(self.model, gradients[source], self.rule) for source in SOURCES}
        changed = {name for one in norms.values() for name, n in one.items() if n.changed}
        treated = sorted(changed or norms["all"])  # before the first refresh every ratio is 1
        lr = None if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])
        return Ratios(
            {source: _ratio(norms[source][layer] for layer in treated) for source in SOURCES},
            {
                layer: {source: _ratio([norms[source][layer]]) for source in SOURCES}
                for layer in sorted(changed)
            },
            lr,
        )


class _WatchedLoss:
    """A loss that is measured every so many calls, and otherwise is the loss itself."""

    def __init__(self, probe: GradientRatios, loss: Loss) -> None:
        self.probe = probe
        self.loss = loss
        if hasattr(loss, "needs"):
            self.needs = loss.needs

    def __call__(self, model: nn.Module, incoming: Batch, replay: Batch | None) -> Tensor:
        probe = self.probe
        due = probe.calls % probe.every == 0
        probe.calls += 1
        inner = model.model if isinstance(model, Called) else model
        if due and inner is probe.model:
            return probe.measure(self.loss, incoming, replay, model)
        return self.loss(model, incoming, replay)


@dataclass(frozen=True)
class _Call:
    """One call of the model: what went in and what came out, with its graph."""

    inputs: Inputs
    output: Tensor


@contextmanager
def _outputs(model: nn.Module) -> Iterator[list[_Call]]:
    """The model's calls inside, those without a graph left out."""
    calls: list[_Call] = []

    def keep(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:
            calls.append(_Call(args[0], output))

    with model.register_forward_hook(keep):
        yield calls


def _rows_of(source: Source, call: _Call, incoming: Batch, replay: Batch | None) -> Tensor:
    """``[rows]``: 1 for the examples of a source in one call of the model, 0 for the others."""
    rows, new = length(call.inputs), len(incoming)
    is_new = torch.zeros(rows, dtype=call.output.dtype, device=call.output.device)
    if rows >= new and _same(part(call.inputs, slice(new)), incoming.inputs):
        is_new[:new] = 1
    elif replay is not None and rows > new:
        last = slice(rows - new, rows)
        is_new[last] = float(_same(part(call.inputs, last), incoming.inputs))
    return is_new if source == "new" else 1 - is_new


def _same(one: Inputs, other: Inputs) -> bool:
    pair = named(one), named(other)
    return all(torch.equal(tensor, pair[1][name]) for name, tensor in pair[0].items())


def _split_gradients(
    loss: Tensor,
    calls: list[_Call],
    parameters: Mapping[str, nn.Parameter],
    incoming: Batch,
    replay: Batch | None,
) -> dict[Source, dict[str, Tensor]]:
    """The gradient of each source, by parameter, from the graph that is there; it stays usable."""
    D = torch.autograd.grad(loss, [c.output for c in calls], retain_graph=True, allow_unused=True)
    used = [(call, d) for call, d in zip(calls, D, strict=True) if d is not None]
    gradients: dict[Source, dict[str, Tensor]] = {}
    for source in ("new", "replay"):
        masks = [_rows_of(source, call, incoming, replay) for call, _ in used]
        found = torch.autograd.grad(
            [call.output for call, _ in used],
            list(parameters.values()),
            [d * m.view(-1, *[1] * (d.ndim - 1)) for (_, d), m in zip(used, masks, strict=True)],
            retain_graph=True,
            allow_unused=True,
        )
        gradients[source] = {
            name: torch.zeros_like(parameter) if gradient is None else gradient
            for (name, parameter), gradient in zip(parameters.items(), found, strict=True)
        }
    gradients["all"] = {n: g + gradients["replay"][n] for n, g in gradients["new"].items()}
    return gradients


@dataclass
class _Norms:
    """``||g||^2`` and ``||P^-1 g||^2`` of one layer, and whether the rule changed anything."""

    before: float = 0.0
    after: float = 0.0
    changed: bool = False


def _norms(
    model: nn.Module, gradients: Mapping[str, Tensor], rule: GradientRule
) -> dict[str, _Norms]:
    """Norms before and after the rule, by layer."""
    norms: dict[str, _Norms] = defaultdict(_Norms)
    with borrowed_gradients(model, gradients):
        rule.precondition_()
        for name, before in gradients.items():
            layer, after = norms[name.rpartition(".")[0]], model.get_parameter(name).grad
            assert after is not None
            layer.before += float(before.double().square().sum())
            layer.after += float(after.double().square().sum())
            layer.changed |= not torch.equal(before, after)
    return norms


def _ratio(norms: Iterable[_Norms]) -> float:
    layers = list(norms)
    before, after = sum(n.before for n in layers), sum(n.after for n in layers)
    return float("nan") if before == 0 else float((after / before) ** 0.5)
