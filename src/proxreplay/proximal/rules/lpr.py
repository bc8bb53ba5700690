"""Layerwise Proximal Replay: gradients that change the activations of remembered data gradually.

For every layer with input rows ``Z`` on ``n`` remembered examples, ``n_eff`` rows per example,

    P = I + omega Z'Z,   omega = omega_0 / (n n_eff^beta),   G <- G P^-1   (G: [out, d]),

which is one gradient step of size eta in the metric P, or the minimiser of
``<G, W> + ||W - W_j||^2 / (2 eta) + omega ||(W - W_j) Z'||^2 / (2 eta)`` (the paper's Appendix A).
"""

from typing import Unpack

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from proxreplay.options import LPROptions, StepOptions
from proxreplay.proximal.gram.rows import ColumnRows, Rows
from proxreplay.proximal.layers.selection import check_selectors, override_of
from proxreplay.proximal.layers.sites import Site, unwrap
from proxreplay.proximal.layers.torch_layers import batchnorm_rows
from proxreplay.proximal.rules.cost import counted_work
from proxreplay.proximal.rules.grams import GramOptions
from proxreplay.proximal.rules.incoming import IncomingRule
from proxreplay.proximal.rules.layerwise import Treatment, check_options
from proxreplay.proximal.shrinkage.choose import shrinkage_of
from proxreplay.proximal.shrinkage.strength import (
    AnyStrength,
    Overrides,
    RelativeStrength,
    Strength,
)
from proxreplay.proximal.statistics.sketch import Sketch
from proxreplay.proximal.statistics.statistic import Statistic

LONGEST = 60  # steps without a refresh: where 90 passed, split-digits lost accuracy


class LPR(IncomingRule):
    """Preconditions the gradients of every layer that is linear in its parameters.

    Args:
        model: any module, also compiled or wrapped for data parallelism.
        omega_0: the paper's strength; 0 leaves every gradient as it is. None, which is recommended,
            for a strength that sets itself (docs/strength.md): relative to the layer's own rows,
            and steps turn gradients without making them shorter.
        beta: with ``omega_0``, how much layers with many positions are spared: their strength is
            divided by ``positions ** beta``.
        overrides: another `Strength` or `RelativeStrength` for some layers, by name or type; the
            longest name that fits goes before a type, a derived type before its base.
        reference: "authors" repeats two habits of the released code, for comparison: BatchNorm rows
            are divided by ``var + eps`` without the root, and Linear layers on sequences are not
            spared (``n_eff = 1``).
        tolerance: how far ``Lambda`` may be off (in the spectral norm, so each eigenvalue) where
            that is cheaper: layers of 512 columns or more keep only the directions that matter,
            found from those of the refresh before. 0 is exact. Without ``omega_0``, or from
            training steps, such layers keep a sixteenth of their directions, and treat all others
            alike (docs/speed.md).
        rolling: decay of the moving average of statistics over refreshes. With 0.8, refreshes from
            a small part of the memory see over time what one from all of it would see, though with
            the network as it was then. 0 uses only the newest examples.
        statistics: "refresh" for what `refresh` is given; "step", or `StepOptions`, for the
            training steps themselves, whose examples are then what is held in place: after `attach`
            there is nothing else to call.
        level: without ``omega_0``, the mean of ``omega sigma`` over the directions of its rows.
        gradient: "incoming" to change only what incoming examples bring, where that is known
            (`watched`, as `Learner` does it); "all" for the whole gradient, as in the paper; None
            for "all" if ``omega_0`` is given, and else for "incoming" in networks without tokens
            all of whose layers can be told apart.
        work: without ``omega_0``, most that a refresh may take of the counted work of the steps
            since the last one; a `Learner` with the default interval leaves out those that take
            more (`due`). 0 for no limit.
        options: ``include``, ``exclude``, ``max_dim`` and ``batch_size``, see `GramOptions`. Layers
            with more than ``max_dim`` columns have no ``d x d`` matrix. Only the directions that
            are shrunk are kept; where too many are needed for ``tolerance``, or it is 0, the layer
            is left alone and named in `untreated`.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> lpr = LPR(model, omega_0=4.0).attach(optimizer)
    >>> lpr.refresh(torch.randn(50, 4))
    >>> model(torch.randn(10, 4)).sum().backward()
    >>> optimizer.step()
    >>> [(layer.name, layer.d) for layer in lpr.layers.values()]
    [('0', 5), ('2', 9)]
    """

    # of the instance only where it is another: older states have no such option
    gradient: str | None = "all"
    work = LPROptions.work  # as well
    per = "step"  # as well

    def __init__(
        self,
        model: nn.Module,
        omega_0: float | None = LPROptions.omega_0,
        beta: float = LPROptions.beta,
        *,
        overrides: Overrides | None = None,
        reference: str = LPROptions.reference,
        tolerance: float = LPROptions.tolerance,
        rolling: float = LPROptions.rolling,
        statistics: str | StepOptions = LPROptions.statistics,
        level: float = LPROptions.level,
        gradient: str | None = LPROptions.gradient,
        work: float = LPROptions.work,
        per: str | None = LPROptions.per,
        **options: Unpack[GramOptions],
    ) -> None:
        check_options(type(self), options, GramOptions.__optional_keys__)
        steps = statistics if isinstance(statistics, StepOptions) else None
        if isinstance(statistics, str):
            steps = StepOptions() if statistics == "step" else None
        source = statistics if isinstance(statistics, str) else "step"
        numbers = (omega_0, beta, tolerance, rolling)
        chosen = LPROptions(*numbers, reference, source, level, gradient, work, per)
        self.strength: AnyStrength = RelativeStrength(level)
        if omega_0 is not None:
            self.strength = Strength(omega_0, beta)
        if gradient != self.gradient and not (gradient is None and omega_0 is not None):
            self.gradient = gradient
        if work != self.work:
            self.work = work
        if chosen.acts_per != self.per:
            self.per = chosen.acts_per
        self.overrides = dict(overrides or {})
        self.reference = reference
        self.tolerance = tolerance
        self.rolling = rolling
        self.statistics = statistics
        check_selectors(unwrap(model), self.overrides, "LPR(overrides=...)")
        super().__init__(
            model,
            steps=steps,
            split=self.gradient != "all",
            flat=self.gradient is None,
            keep=omega_0 is None,
            once=self.per == "batch",
            sketch=tolerance > 0,
            instead={_BatchNorm: authors_batchnorm_rows} if reference == "authors" else {},
            decay=rolling,
            leave=[self._switched_off],
            **options,
        )

    def treat(self, site: Site, statistic: Statistic | Sketch) -> Treatment | str:
        """``Lambda = (I + omega Z'Z)^-1`` with the layer's ``omega``."""
        model, n_eff = unwrap(self.model), statistic.positions
        spared = self._spared(model, site, n_eff)
        omega = self._strength(model, site).of(statistic, spared)
        before = self._treatments.get(site.name)
        known = isinstance(self.strength, RelativeStrength) or not self.needs_refresh
        Lambda = shrinkage_of(
            statistic,
            omega,
            tolerance=self.tolerance,
            pace=self._pace,
            out=site.out(model, statistic.d),
            before=None if before is None else before.factor,
            fixed=known,
        )
        return Lambda if isinstance(Lambda, str) else Treatment(site, Lambda, n_eff, omega)

    @property
    def leaves_out(self) -> bool:
        """Whether `due` may say no."""
        relative = isinstance(self.strength, RelativeStrength)
        return relative and self.tolerance > 0 and self.work > 0 and self.needs_refresh

    def due(self, examples: int) -> bool:
        """Whether the steps since the last refresh have done enough work to pay for another one.

        By counted work, never by a clock, so runs stay as they are. Where ``omega_0`` is given, or
        the factors are exact, always; and always after `LONGEST` steps.

        Args:
            examples: of a training step.
        """
        if not self.leaves_out or not self._treatments or self._pace.steps >= LONGEST:
            return True
        steps, refresh = counted_work(unwrap(self.model), self._treatments, self._pace.samples)
        return refresh <= self.work * self._pace.steps * examples * steps

    def _strength(self, model: nn.Module, site: Site) -> AnyStrength:
        return override_of(self.overrides, site.name, site.module(model), self.strength)

    def _spared(self, model: nn.Module, site: Site, positions: float) -> float:
        """``n_eff`` as it enters the strength."""
        as_authors = self.reference == "authors" and isinstance(site.module(model), nn.Linear)
        return 1.0 if as_authors else positions

    def _switched_off(self, model: nn.Module, site: Site) -> str | None:
        return "its strength is 0." if self._strength(model, site).off else None


def authors_batchnorm_rows(layer: _BatchNorm, input: Tensor) -> Rows:
    """BatchNorm rows as the released code has them: ``z = (x - mean) / (var + eps)``.

    That code takes one mean over all channels where there are no running statistics, which no
    published result uses; here such layers keep the paper's rows.
    """
    if layer.running_var is None:
        return batchnorm_rows(layer, input)
    return ColumnRows(input, layer.running_mean, 1 / (layer.running_var + layer.eps))
