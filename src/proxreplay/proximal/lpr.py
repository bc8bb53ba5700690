"""Layerwise Proximal Replay: gradients that change the activations of remembered data gradually.

For every layer with input rows ``Z`` on ``n`` remembered examples, ``n_eff`` rows an example,

    P = I + omega Z'Z,   omega = omega_0 / (n n_eff^beta),   G <- G P^-1   (G: [out, d]),

which is one gradient step of size eta in the metric P, or the minimiser of
``<G, W> + ||W - W_j||^2 / (2 eta) + omega ||(W - W_j) Z'||^2 / (2 eta)`` (the paper's Appendix A).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from proxreplay.errors import InputError, RefreshError
from proxreplay.proximal.capture import call, count_samples, untouched, watching
from proxreplay.proximal.gram import gram_with_bias
from proxreplay.proximal.layers import as_rows, find_layer
from proxreplay.proximal.linalg import shrinkage


@dataclass
class LayerStatistic:
    """The Gram matrix of one layer, kept apart from the strength.

    Args:
        G: ``Z'Z`` over all examples seen, ``[groups, d, d]``, bias column included.
        rows: number of rows of ``Z`` a group.
        samples: ``n``, the number of examples.
    """

    G: Tensor
    rows: int
    samples: int = 0

    @property
    def positions(self) -> float:
        """``n_eff``: rows an example."""
        return self.rows / self.samples


class LPR:
    """Preconditions the gradients of every layer that is linear in its parameters.

    Args:
        model: any module; its Linear, Conv2d and BatchNorm layers are treated.
        omega_0: strength; 0 leaves every gradient as it is.
        beta: how much layers with many positions are spared: their strength is divided by
            ``positions ** beta``.
        batch_size: examples a forward pass when `refresh` is given one tensor.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> lpr = LPR(model, omega_0=4.0).attach(optimizer)
    >>> lpr.refresh(torch.randn(50, 4))
    >>> model(torch.randn(10, 4)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        omega_0: float = 1.0,
        beta: float = 1.0,
        *,
        batch_size: int = 100,
    ) -> None:
        for name, value in {"omega_0": omega_0, "beta": beta}.items():
            if not 0 <= value < float("inf"):
                raise InputError(f"LPR: {name}={value}; give a finite number of at least 0.")
        self.model = model
        self.omega_0 = omega_0
        self.beta = beta
        self.batch_size = batch_size
        self._shrinkages: dict[str, Tensor] = {}

    def refresh(self, inputs: Tensor | Iterable[Any]) -> None:
        """Rebuild every preconditioner from the examples that must not be forgotten.

        Args:
            inputs: a tensor ``[n, ...]``, or an iterable of batches the model can be called with.
        """
        statistics = self._collect(inputs)
        self._shrinkages = {
            name: shrinkage(statistic.G, self._omega(statistic))
            for name, statistic in statistics.items()
        }

    def precondition_(self) -> None:
        """``G <- G Lambda`` for every layer that has a gradient and a preconditioner."""
        if self.omega_0 == 0:
            return
        for name, Lambda in self._shrinkages.items():
            module = self.model.get_submodule(name)
            _multiply_gradient_(module, Lambda)

    def attach(self, optimizer: Optimizer) -> Self:
        """Precondition inside every ``optimizer.step()`` from now on."""
        self._handle = optimizer.register_step_pre_hook(lambda *_: self.precondition_())
        return self

    def _omega(self, statistic: LayerStatistic) -> float:
        return float(self.omega_0 / (statistic.samples * statistic.positions**self.beta))

    def _collect(self, inputs: Tensor | Iterable[Any]) -> dict[str, LayerStatistic]:
        modules = {
            name: module
            for name, module in self.model.named_modules()
            if find_layer(module) is not None and _trained(module) != (False, False)
        }
        statistics: dict[str, LayerStatistic] = {}

        def add(
            name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> None:
            function = find_layer(module)
            assert function is not None
            rows = as_rows(function(module, *args, **kwargs))
            weight, bias = _trained(module)
            G = gram_with_bias(rows, weight=weight, bias=bias)
            if not torch.isfinite(G).all():
                raise RefreshError(
                    f"LPR.refresh: the inputs of {type(module).__name__} '{name}' are not finite; "
                    "the previous preconditioner stays in force. Look for NaN or infinity in the "
                    "batch, or lower the learning rate."
                )
            if name in statistics:
                statistics[name].G += G
                statistics[name].rows += rows.shape[1]
            else:
                statistics[name] = LayerStatistic(G, rows.shape[1])

        samples = 0
        batches = inputs.split(self.batch_size) if isinstance(inputs, Tensor) else inputs
        with untouched(self.model), watching(modules, add):
            for batch in batches:
                call(self.model, batch)
                samples += count_samples(batch)
        if samples == 0:
            raise InputError("LPR.refresh: no examples; give at least one batch.")
        for statistic in statistics.values():
            statistic.samples = samples
        return statistics


def _trained(module: nn.Module) -> tuple[bool, bool]:
    """Whether the weight and the bias of a layer exist and are trained."""
    weight, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    return (
        isinstance(weight, nn.Parameter) and weight.requires_grad,
        isinstance(bias, nn.Parameter) and bias.requires_grad,
    )


def _multiply_gradient_(module: nn.Module, Lambda: Tensor) -> None:
    """``[G_weight | G_bias] <- [G_weight | G_bias] Lambda`` with ``Lambda: [groups, d, d]``."""
    groups = len(Lambda)
    weight, bias = _trained(module)
    names = ["weight"] * weight + ["bias"] * bias
    gradients = [module.get_parameter(name).grad for name in names]
    if any(gradient is None for gradient in gradients):
        return
    present = [gradient for gradient in gradients if gradient is not None]
    widths = [Lambda.shape[-1] - bias] * weight + [1] * bias
    matrices = [g.reshape(groups, -1, width) for g, width in zip(present, widths, strict=True)]
    product = torch.cat(matrices, dim=2) @ Lambda
    for gradient, matrix in zip(present, product.split(widths, dim=2), strict=True):
        gradient.copy_(matrix.reshape(gradient.shape))
