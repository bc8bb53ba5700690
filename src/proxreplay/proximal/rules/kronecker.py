"""The two-sided proximal rule: hold what the network says in place, not what its layers see.

For every layer, with ``A = E[sum_t z z']`` over the rows of an example and ``B = E[g g']`` over the
gradients at its outputs, ``B (x) A`` stands for the layer's block of the Fisher matrix (K-FAC), and

    P = I + omega B (x) A,      G <- P^-1 G      (G: [out, d]),

is one gradient step of size eta in the metric P: the minimiser of ``<G, W> + ||W - W_j||^2 / (2
eta)`` plus ``omega / eta`` times the divergence of the predictions. LPR is ``B = I``.
"""

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import nn

from proxreplay.options import KRONECKER_STEPS, KroneckerOptions, StepOptions
from proxreplay.proximal.layers.sites import Site, unwrap
from proxreplay.proximal.rules.layerwise import LayerOptions, Treatment, check_options
from proxreplay.proximal.rules.norms import plain_norm
from proxreplay.proximal.rules.stepwise import StepwiseRule
from proxreplay.proximal.shrinkage.choose import shrinkage_of
from proxreplay.proximal.shrinkage.forms import DenseShrinkage, Shrinkage, SpectralShrinkage
from proxreplay.proximal.shrinkage.inverse import dense_inverse_
from proxreplay.proximal.shrinkage.twosided import (
    SidesShrinkage,
    balance,
    exact_shrinkage,
    left_shrinkage,
    mean_eigenvalue,
)
from proxreplay.proximal.statistics.decay import Aged
from proxreplay.proximal.statistics.few import FewRows
from proxreplay.proximal.statistics.sketch import Sketch
from proxreplay.proximal.statistics.statistic import Statistic

RESTS_FROM = 6  # rebuilds; until then the moving average changes fast
EXACT_UP_TO = 128  # columns and outputs: below, eigenvectors cost next to nothing


class KroneckerLPR(StepwiseRule):
    """Preconditions gradients from both sides, by statistics of the training steps themselves.

    The strength is relative: with ``f`` the mean eigenvalue of ``B (x) A`` over all parameters of
    the layer (or of the model), ``omega = strength / f``. So the scale of the loss plays no part,
    and as no eigenvalue of ``P`` is below 1, steps are never longer than those of plain SGD with
    the same learning rate. As most of a gradient lies in directions that are shrunk, a larger one
    is of use: the recipes take ten times that of SGD.

    Layers whose outputs nobody knows the layout of (attention, recurrent layers, embeddings, those
    of your own without `register_output`) are treated from the inputs' side, ``B = b I``;
    `one_sided` names them.

    Args:
        model: any module, also compiled or wrapped for data parallelism.
        strength: ``omega`` where the mean curvature is 1; 0 leaves every gradient as it is.
        scope: "layer" for a mean curvature of each layer, "model" for one of all.
        form: "inverses" by one damped inverse on each side, which shrinks more and was stable at
            larger steps; "exact" by the eigenvectors of both; "auto" for exact up to 128 columns
            and outputs.
        fisher: whose gradients make ``B``: "loss" for the loss that was given (the labels' own,
            for cross-entropy), which costs nothing; "sampled" for one label drawn from the model's
            prediction for each example; "exact" for all labels, a backward pass each. The last two
            take the model's output as logits ``[n, classes]``.
        norms: "treat", or "plain" to leave scales and shifts to the plain gradient.
        tolerance: as for `LPR`, on the inputs' side.
        tau: absolute damping instead of a strength: ``(B (x) A + tau I)^-1``, as in OCAR. Steps are
            then as long as ``lr / tau`` of plain ones.
        tau_growth: what ``tau`` gains per step.
        steps: how the training steps are looked at.
        seed: of the labels that are drawn.
        layers: ``include``, ``exclude`` and ``max_dim``, see `LayerOptions`; beyond ``max_dim``
            columns, layers are sketched on the inputs' side.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> rule = KroneckerLPR(model).attach(optimizer)
    >>> nn.functional.cross_entropy(model(torch.randn(10, 4)), torch.zeros(10).long()).backward()
    >>> optimizer.step()
    >>> [(layer.name, layer.d) for layer in rule.layers.values()]
    [('0', 5), ('2', 9)]
    """

    def __init__(
        self,
        model: nn.Module,
        strength: float = KroneckerOptions.strength,
        *,
        scope: str = KroneckerOptions.scope,
        form: str = KroneckerOptions.form,
        fisher: str = KroneckerOptions.fisher,
        norms: str = KroneckerOptions.norms,
        tolerance: float = KroneckerOptions.tolerance,
        tau: float | None = KroneckerOptions.tau,
        tau_growth: float = KroneckerOptions.tau_growth,
        steps: StepOptions = KRONECKER_STEPS,
        seed: int = 0,
        **layers: Unpack[LayerOptions],
    ) -> None:
        check_options(type(self), layers, LayerOptions.__optional_keys__)
        KroneckerOptions(strength, scope, form, fisher, norms, tolerance, tau, tau_growth)
        self.strength = strength
        self.scope = scope
        self.form = form
        self.fisher = fisher
        self.norms = norms
        self.tolerance = tolerance
        self.tau = tau
        self.tau_growth = tau_growth
        self.steps = steps
        self.seed = seed
        self._one_sided: dict[str, str] = {}
        self._curvature = 1.0
        super().__init__(
            model,
            steps=steps,
            gradients=True,
            fisher=fisher,
            seed=seed,
            sketch=tolerance > 0,
            leave=[plain_norm] if norms == "plain" else [],
            **layers,
        )

    @property
    def one_sided(self) -> dict[str, str]:
        """Layers that are treated from the inputs' side only, with the reason."""
        return dict(self._one_sided)

    def prepare(self, averages: Mapping[str, Aged]) -> None:
        """The mean eigenvalue of ``B (x) A`` over all parameters that are treated two-sided."""
        total, count = 0.0, 0
        for average in averages.values():
            one = average.mean
            if isinstance(one, Statistic | FewRows) and one.H is not None:
                n = one.diagonal.numel() * one.H.shape[1]
                total += n * curvature(one) / average.weight**2
                count += n
        self._curvature = total / count if count else 1.0
        reasons = {name: self._why_one_sided(average.mean) for name, average in averages.items()}
        self._one_sided = {name: why for name, why in reasons.items() if why is not None}

    def _why_one_sided(self, statistic: Statistic | Sketch) -> str | None:
        if not isinstance(statistic, Statistic | FewRows):
            why = f"more than max_dim = {self.max_dim} columns"
        elif isinstance(statistic, Statistic) and statistic.picked is not None:
            why = "an Embedding shares its weight"
        elif statistic.H is None:
            why = "the layout of its outputs is not known"
        else:
            return None
        return f"{why}; treated from the inputs' side."

    def treat(self, site: Site, statistic: Statistic | Sketch) -> Treatment | str:
        """``(I + omega B (x) A)^-1``, in the form that was asked for."""
        omega, gain = self._damping(statistic)
        if omega == 0:
            return "nothing has passed a gradient to it yet."
        n = statistic.samples
        before = self._treatments.get(site.name)
        last = None if before is None else before.factor
        last = last.right if isinstance(last, SidesShrinkage) else last
        if self._why_one_sided(statistic) is not None:
            return self._from_one_side(site, statistic, omega, gain, last)
        assert isinstance(statistic, Statistic | FewRows)
        assert statistic.H is not None
        B = statistic.H / n
        exactly = self._exactly(statistic.diagonal.shape[1], B.shape[1])
        if isinstance(statistic, FewRows) and (exactly or B.shape[1] == 1):
            statistic = statistic.dense()
        factor: Shrinkage
        if isinstance(statistic, Statistic) and B.shape[1] == 1:
            A = statistic.G.to(statistic.dtype) / n
            factor = _scaled(DenseShrinkage(dense_inverse_(A * B.to(A.dtype), omega)), gain)
        elif isinstance(statistic, Statistic) and exactly:
            factor = exact_shrinkage(statistic.G.to(statistic.dtype) / n, B, omega, gain)
        else:
            pi = balance(statistic.diagonal.to(B.device, B.dtype) / n, B)
            root = omega**0.5
            right = self._right(site, statistic, root / pi / n, last)
            if isinstance(right, str):
                return right
            factor = SidesShrinkage(left_shrinkage(B, root * pi, right.dtype), right, gain)
        return Treatment(site, factor, statistic.positions, omega)

    def _damping(self, statistic: Statistic | Sketch) -> tuple[float, float]:
        """``omega``, and what everything is multiplied with."""
        if self.tau is not None:
            assert self._sums is not None
            tau, weight = self.tau + self.tau_growth * self._sums.steps, self._sums.mean_weight
            return weight / tau, 1 / tau
        own = self._curvature
        if self.scope == "layer" and isinstance(statistic, Statistic | FewRows):
            own = own if statistic.H is None else curvature(statistic)
        return (self.strength / own if own > 0 else 0.0), 1.0

    def _exactly(self, d: int, out: int) -> bool:
        return self.form == "exact" or (self.form == "auto" and max(d, out) <= EXACT_UP_TO)

    def _right(
        self, site: Site, statistic: Statistic | Sketch, omega: float, last: Shrinkage | None
    ) -> Shrinkage | str:
        if last is not None and self._rests(site, statistic, last):
            return last
        return shrinkage_of(
            statistic,
            omega,
            tolerance=self.tolerance,
            pace=self._pace,
            out=site.out(unwrap(self.model), statistic.d),
            before=last,
            fixed=self.tau is None,
        )

    def _rests(self, site: Site, statistic: Statistic | Sketch, last: Shrinkage) -> bool:
        """Whether a wide layer keeps the inputs' side of the last rebuild, as every second time.

        To find directions is most of what a rebuild costs, and in two windows the average that they
        are of changes little. Half of the wide layers take turns with the others.
        """
        if self.tau is not None or not isinstance(last, SpectralShrinkage):
            return False
        wide = sorted(n for n, one in self._treatments.items() if one.factor.width == last.width)
        due = (self._pace.refreshes + wide.index(site.name)) % 2 == 0
        fits = isinstance(statistic, Statistic) and statistic.diagonal.shape[1] == last.width
        return fits and not due and self._pace.refreshes >= RESTS_FROM

    def _from_one_side(
        self,
        site: Site,
        statistic: Statistic | Sketch,
        omega: float,
        gain: float,
        last: Shrinkage | None,
    ) -> Treatment | str:
        """``B = b I``, with a ``b`` that makes the mean eigenvalue that of the model."""
        if isinstance(statistic, Statistic):
            a = mean_eigenvalue(statistic.G) / statistic.samples
        else:
            a = float(statistic.B.square().sum()) / statistic.B.shape[2] / statistic.samples
        b = self._curvature / a if a > 0 else 0.0
        made = self._right(site, statistic, omega * b / statistic.samples, last)
        if isinstance(made, str):
            return made
        return Treatment(site, _scaled(made, gain), statistic.positions, omega)

    def state_dict(self) -> dict[str, Any]:
        """What the steps made: tensors, numbers and strings in nested dicts."""
        return super().state_dict() | {"one_sided": dict(self._one_sided)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` of the same rule on a model of the same shape gave."""
        super().load_state_dict(state)
        self._one_sided = dict(state["one_sided"])


def curvature(statistic: Statistic | FewRows) -> float:
    """The mean eigenvalue of ``B (x) A`` over all groups."""
    assert statistic.H is not None
    a = statistic.diagonal.mean(dim=1).double()
    b = statistic.H.diagonal(dim1=1, dim2=2).mean(dim=1).double()
    return float((a * b).mean()) / statistic.samples**2


def _scaled(factor: Shrinkage, gain: float) -> Shrinkage:
    """``gain Lambda``."""
    if gain == 1:
        return factor
    if isinstance(factor, DenseShrinkage):
        return DenseShrinkage(factor.Lambda * gain)
    nothing = torch.zeros(factor.groups, 0, 0, dtype=factor.dtype, device=factor.device)
    return SidesShrinkage(nothing, factor, gain)
