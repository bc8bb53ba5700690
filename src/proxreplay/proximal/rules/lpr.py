"""Layerwise Proximal Replay: gradients that change the activations of remembered data gradually.

For every layer with input rows ``Z`` on ``n`` remembered examples, ``n_eff`` rows an example,

    P = I + omega Z'Z,   omega = omega_0 / (n n_eff^beta),   G <- G P^-1   (G: [out, d]),

which is one gradient step of size eta in the metric P, or the minimiser of
``<G, W> + ||W - W_j||^2 / (2 eta) + omega ||(W - W_j) Z'||^2 / (2 eta)`` (the paper's Appendix A).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from proxreplay.errors import InputError
from proxreplay.proximal.gram.rows import ColumnRows, Rows
from proxreplay.proximal.layers.registry import RowsFunction
from proxreplay.proximal.layers.selection import Selector, check_selectors, override_of
from proxreplay.proximal.layers.sites import Site, Survey, unwrap
from proxreplay.proximal.layers.torch_layers import batchnorm_rows
from proxreplay.proximal.rules.base import GramRule, Treatment
from proxreplay.proximal.shrinkage.forms import (
    DenseShrinkage,
    Shrinkage,
    SpectralShrinkage,
    rowwise_shrinkage,
    shrinkage_,
    spectral_shrinkage,
)
from proxreplay.proximal.shrinkage.spectral import Pace, follow, most_that_pays
from proxreplay.proximal.shrinkage.strength import Overrides, Strength
from proxreplay.proximal.statistics.collect import Statistic
from proxreplay.proximal.statistics.decay import Aged, aged
from proxreplay.proximal.statistics.sketch import Sketch

TOLERANCE = 0.01  # of Lambda in the spectral norm, where d > max_dim
SPECTRAL_FROM = 512  # columns; below, a product costs less than finding out how to save it

Reference = Literal["paper", "authors"]


class LPR(GramRule):
    """Preconditions the gradients of every layer that is linear in its parameters.

    Args:
        model: any module, also compiled or wrapped for data parallelism.
        omega_0: strength; 0 leaves every gradient as it is.
        beta: how much layers with many positions are spared: their strength is divided by
            ``positions ** beta``.
        batch_size: examples a forward pass when `refresh` is given one tensor; None for 20 to 200,
            depending on their size.
        include: names (a module and everything in it) or types to treat; None for all.
        exclude: names or types to leave alone.
        overrides: another `Strength` for some layers, by name or type; the longest name that fits
            goes before a type, a derived type before its base.
        max_dim: layers with more columns keep only the directions that are shrunk, to 0.01 in the
            spectral norm; where that takes too many, they are left alone and named in `untreated`.
        reference: "authors" repeats two habits of the released code, for comparison: BatchNorm rows
            are divided by ``var + eps`` without the root, and Linear layers on sequences are not
            spared (``n_eff = 1``).
        tolerance: how far ``Lambda`` may be off (in the spectral norm, so each eigenvalue) where
            that is cheaper: layers of 512 columns or more keep only the directions that matter.
            They are found from those of the refresh before. 0 is exact.
        rolling: decay of the moving average of statistics over refreshes. With 0.8, refreshes from
            a small part of the memory see over time what one from all of it would see, though with
            the network as it was then. 0 uses only the newest examples.

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

    _sketches = True
    _tied = True

    def __init__(
        self,
        model: nn.Module,
        omega_0: float = 1.0,
        beta: float = 1.0,
        *,
        batch_size: int | None = None,
        include: Collection[Selector] | None = None,
        exclude: Collection[Selector] = (),
        overrides: Overrides | None = None,
        max_dim: int = 8192,
        reference: Reference = "paper",
        tolerance: float = 0.0,
        rolling: float = 0.0,
    ) -> None:
        if reference not in ("paper", "authors"):
            raise InputError(f"LPR: reference={reference!r}; give 'paper' or 'authors'.")
        if not 0 <= tolerance < 0.5:
            raise InputError(f"LPR: tolerance={tolerance}; give at least 0 and less than 0.5.")
        if not 0 <= rolling < 1:
            raise InputError(f"LPR: rolling={rolling}; give at least 0 and less than 1.")
        self.strength = Strength(omega_0, beta)
        self.overrides = dict(overrides or {})
        self.reference = reference
        self.tolerance = tolerance
        self.rolling = rolling
        self._pace = Pace()
        self._history: dict[str, Aged] = {}
        self._part: _Part | None = None  # while `refresh_part` is under way
        check_selectors(unwrap(model), self.overrides, "LPR(overrides=...)")
        super().__init__(
            model, batch_size=batch_size, include=include, exclude=exclude, max_dim=max_dim
        )

    def _survey(self) -> Survey:
        survey = super()._survey()
        off = {name for name, site in survey.sites.items() if self._strength(site).omega_0 == 0}
        return Survey(
            {name: site for name, site in survey.sites.items() if name not in off},
            survey.untreated | dict.fromkeys(sorted(off), "its omega_0 is 0."),
        )

    def _treat(self, site: Site, statistic: Statistic) -> Treatment:
        positions = statistic.positions
        omega = self._strength(site).omega(statistic.samples, self._spared(site, positions))
        G = statistic.G.to(statistic.dtype).contiguous()
        if statistic.picked is not None:
            factor = tied_shrinkage(G, statistic.picked.to(G), statistic.d, omega)
            return Treatment(site, factor, positions, omega)
        return Treatment(site, self._shrinkage(site, G, omega), positions, omega)

    def step_(self, only: Collection[int] | None = None) -> None:
        """`precondition_`, and count the step: how many there are decides which form is cheaper."""
        super().step_(only)
        self._pace.steps += 1

    def refresh(
        self, inputs: Tensor | Iterable[Any], of: int | None = None, *, batch_dim: int = 0
    ) -> None:
        """Rebuild every factor from the examples that must not be forgotten.

        With ``rolling``, ``min(rolling, 1 - n / of)`` of the earlier statistics stays after ``n``
        examples: nothing if these are all there is.

        Args:
            inputs: as for `GramRule.refresh`; where only some are used, drawn anew every time.
            of: how many examples they were drawn from; None for many more.
            batch_dim: the dimension of the examples, for models that want another one first.
        """
        if of is not None and of < 1:
            raise InputError(f"LPR.refresh: of={of}; give at least 1.")
        part = self._part = _Part(of)
        try:
            super().refresh(inputs, batch_dim=batch_dim)
        finally:
            self._part = None
        self._history = part.history
        self._pace.refreshed()

    @property
    def _remembers(self) -> bool:
        return self.rolling > 0

    def _over_time(self, name: str, statistic: Statistic | Sketch) -> Statistic | Sketch:
        if not self._remembers or self._part is None or isinstance(statistic, Sketch):
            return statistic  # sketches do not age: they are of the last refresh only
        stays = self.rolling
        if self._part.of is not None:
            stays = min(stays, max(0.0, 1 - statistic.samples / self._part.of))
        now = aged(self._history.get(name), statistic, stays)
        self._part.history[name] = now
        return now.statistic(statistic)

    def state_dict(self) -> dict[str, Any]:
        """What the refreshes made: tensors, numbers and strings in nested dicts."""
        history = {name: aged.state() for name, aged in self._history.items()}
        pace = asdict(self._pace) if self.tolerance > 0 else {}
        more = {"history": history, "pace": pace}
        return super().state_dict() | {name: one for name, one in more.items() if one}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` of the same rule on a model of the same shape gave."""
        super().load_state_dict(state)
        saved = state.get("history", {})
        self._history = {name: Aged.from_state(one) for name, one in saved.items()}
        self._pace = Pace(**state.get("pace", {}))

    def _shrinkage(self, site: Site, G: Tensor, omega: float) -> Shrinkage:
        """``(I + omega G)^-1``, dense or spectral, whichever is cheaper until the next refresh.

        The dense form takes the memory of ``G``.
        """
        if self.tolerance > 0 and G.shape[1] >= SPECTRAL_FROM:
            few = self._spectral(site, G, omega)
            if few is not None:
                return few
        return DenseShrinkage(shrinkage_(G, omega))

    def _spectral(self, site: Site, G: Tensor, omega: float) -> SpectralShrinkage | None:
        """The directions that matter, if they are few; None for the dense form.

        They are followed from refresh to refresh. Where there are none to follow they are looked
        for, but not at every refresh: it may turn out not to be worth it.
        """
        groups, width, _ = G.shape
        if groups > 1:
            return None
        weight = site.columns[0].parameter(unwrap(self.model))
        out = weight.numel() // site.widths(width)[0]

        most = most_that_pays(width, out, self._pace.expected)
        before = self._treatments.get(site.name)
        known = None if before is None else before.factor
        if isinstance(known, SpectralShrinkage) and known.width == width:
            if known.rank <= most:
                return follow(G[0], omega, self.tolerance, most, known.followed[0].to(G))
        elif self._pace.time_to_look:
            return follow(G[0], omega, self.tolerance, most)
        return None

    def _treat_sketch(self, site: Site, sketch: Sketch) -> Treatment | str:
        positions = sketch.positions
        omega = self._strength(site).omega(sketch.samples, self._spared(site, positions))
        factor, error = spectral_shrinkage(*sketch.spectrum(), omega, sketch.dropped, TOLERANCE)
        if error > TOLERANCE:
            return (
                f"d = {factor.width} is more than max_dim = {self.max_dim}, and {sketch.rank} "
                f"directions describe it to {error:.2g} only (tolerance {TOLERANCE})."
            )
        return Treatment(site, factor, positions, omega)

    def _strength(self, site: Site) -> Strength:
        module = unwrap(self.model).get_submodule(site.members[0].module)
        return override_of(self.overrides, site.name, module, self.strength)

    def _spared(self, site: Site, positions: float) -> float:
        """``n_eff`` as it enters the strength."""
        module = unwrap(self.model).get_submodule(site.members[0].module)
        return 1.0 if self.reference == "authors" and isinstance(module, nn.Linear) else positions

    def _rows_instead(self) -> Mapping[type[nn.Module], RowsFunction]:
        return {} if self.reference == "paper" else {_BatchNorm: authors_batchnorm_rows}


@dataclass
class _Part:
    """A refresh from a part of the memory: of how many examples, and the history it makes."""

    of: int | None
    history: dict[str, Aged] = field(default_factory=dict)


def tied_shrinkage(G: Tensor, picked: Tensor, d: int, omega: float) -> Shrinkage:
    """The inverse of ``I + omega (G + picked[v] E)`` for every row ``v`` of a weight.

    A Linear brings ``G``, the same for all rows; an Embedding that shares its weight brings the
    number of times that a row is picked, on the ``d`` columns of the weight (``E``) alone.

    Args:
        G: ``[1, D, D]``.
        picked: ``[out]``.
        d: columns of the weight; those of biases come after.
        omega: the strength.
    """
    one = torch.eye(G.shape[1], dtype=G.dtype, device=G.device)[None]
    E = one.clone()
    E[:, d:] = 0
    return rowwise_shrinkage(one + omega * G, E, omega * picked)


def authors_batchnorm_rows(layer: _BatchNorm, input: Tensor) -> Rows:
    """BatchNorm rows as the released code has them: ``z = (x - mean) / (var + eps)``.

    That code takes one mean over all channels where there are no running statistics, which no
    published result uses; here such layers keep the paper's rows.
    """
    if layer.running_var is None:
        return batchnorm_rows(layer, input)
    return ColumnRows(input, layer.running_mean, 1 / (layer.running_var + layer.eps))
