"""GPM and SGP: the directions that remembered examples use are closed, wholly or in part.

For every layer, with orthonormal columns ``M: [d, k]`` that hold the share ``energy`` of ``Z'Z``,

    G <- G (I - M diag(f) M')   (G: [out, d]),   f = 1 for GPM, the importance in [0, 1] for SGP.

All is had from the Gram matrix: its eigenvalues are the squared singular values of the
representation matrix ``Z'``, its eigenvectors the left singular vectors.
"""

from collections.abc import Mapping
from typing import Any, Unpack, get_args

import torch
from torch import Tensor, nn

from proxreplay.errors import InputError, RefreshError
from proxreplay.options import ProjectionOptions, at_least, below, fraction, one_of
from proxreplay.proximal.layers.sites import Site, Survey, unwrap
from proxreplay.proximal.rules.grams import GramOptions, GramRule
from proxreplay.proximal.rules.layerwise import Treatment, check_options
from proxreplay.proximal.rules.norms import Norms, is_norm, plain_norm, tied_weight
from proxreplay.proximal.shrinkage.forms import DenseShrinkage, SpectralShrinkage
from proxreplay.proximal.shrinkage.spectral import Pace
from proxreplay.proximal.statistics.sketch import Sketch
from proxreplay.proximal.statistics.statistic import Statistic


def leading(
    G: Tensor, energy: float, held: Tensor | None = None, at_most: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As few leading eigenvectors of ``G`` as hold a share of all there is.

    ``k`` is the smallest number with ``held + s_1^2 + .. + s_k^2 >= energy (held + tr G)``.

    Args:
        G: ``[groups, d, d]``: a Gram matrix, or what is left of it outside a basis.
        energy: the share, in (0, 1].
        held: ``[groups]``, what is inside that basis.
        at_most: ``[groups]``, a limit for ``k``.

    Returns:
        Singular values ``s: [groups, k]``, falling, and vectors ``[groups, d, k]``, with the ``k``
        of the group that needs most; zeros where a group needs fewer.
    """
    squares, U = torch.linalg.eigh(G)
    squares, U = squares.flip(-1).clamp_min(0), U.flip(-1)
    held = torch.zeros_like(squares[:, 0]) if held is None else held
    total = held + squares.sum(dim=1)
    before = held[:, None] + squares.cumsum(dim=1) - squares
    noise = G.shape[1] * torch.finfo(G.dtype).eps * total  # what eigenvalues of 0 come out as
    needed = (before < energy * total[:, None]) & (squares > noise[:, None])
    if at_most is not None:
        needed &= torch.arange(G.shape[1], device=G.device) < at_most[:, None]
    k = int(needed.sum(dim=1).max())
    needed = needed[:, :k]
    return (squares[:, :k] * needed).sqrt(), U[:, :, :k] * needed[:, None]


def grow(M: Tensor, f: Tensor, G: Tensor, energy: float) -> tuple[Tensor, Tensor, Tensor]:
    """A basis with the directions that new examples need beside it.

    With ``Q = I - M M'``, the leading eigenvectors of ``Q G Q`` are added until the basis holds the
    share ``energy`` of ``tr G``, or is complete.

    Args:
        M: ``[groups, d, k]``, orthonormal columns, ``k`` from 0; zeros where a group has fewer.
        f: ``[groups, k]``, how much of each direction is closed; greater than 0 where there is one.
        G: ``[groups, d, d]``, Gram matrix of the new examples.
        energy: the share, in (0, 1].

    Returns:
        The new ``M``; ``f`` with 0 for new directions; ``s: [groups, k]``, the singular values of
        the new examples: ``sqrt(m'Gm)`` in old directions, those of ``Q G Q`` in new ones.
    """
    GM = G @ M
    inside = (M * GM).sum(dim=1).clamp_min(0)  # diag(M'GM)
    QG = G - M @ GM.mT
    QGQ = QG - (QG @ M) @ M.mT
    room = G.shape[1] - (f > 0).sum(dim=1)
    s, U = leading((QGQ + QGQ.mT) / 2, energy, inside.sum(dim=1), room)
    U = U - M @ (M.mT @ U)  # once more, against rounding
    M = torch.cat([M, torch.linalg.qr(U).Q * (s > 0)[:, None]], dim=2)
    f = torch.cat([f, torch.zeros_like(s)], dim=1)
    s = torch.cat([inside.sqrt(), s], dim=1)
    return _compact(M, f, s)


def _compact(M: Tensor, f: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every group's directions first, and no more columns than the fullest group needs."""
    there = (f > 0) | (s > 0)
    order = there.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    order = order[:, : int(there.sum(dim=1).max())] if there.shape[1] else order
    columns = order[:, None].expand(-1, M.shape[1], -1)
    return M.gather(2, columns), f.gather(1, order), s.gather(1, order)


def importance(s: Tensor, scale: float) -> Tensor:
    """SGP's ``(a + 1) s / (a s + max s)``, in [0, 1] and rising with ``s``.

    Args:
        s: ``[groups, k]``, singular values.
        scale: ``a``, at least 0; the greater, the nearer to 1 are all of them.
    """
    top = s.amax(dim=1, keepdim=True) if s.shape[1] else s
    return torch.where(top > 0, (scale + 1) * s / (scale * s + top), 0)


class GPM(GramRule):
    """Gradient projection memory: no change in the directions that remembered examples use.

    Args:
        model: any module, also compiled or wrapped for data parallelism.
        energy: the share of the layer inputs' squared norm that the directions hold.
        energy_growth: added to it at every further refresh, up to 1, where bases accumulate.
        accumulate: False makes the directions anew at every refresh, from a memory that holds all
            there is to keep; True keeps them for ever and adds what the new examples need, as GPM
            does at the end of a task, given examples of that task.
        norms: "plain" lets the scales and shifts of normalisation layers follow the plain gradient
            and names them in `untreated`; "freeze" stops them from the first refresh on, as the GPM
            authors do; "treat" projects them as any other layer.
        options: ``include``, ``exclude``, ``max_dim`` and ``batch_size``, see `GramOptions`.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> gpm = GPM(model, energy=1.0)
    >>> gpm.refresh(torch.ones(3, 4))
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> gpm.precondition_()
    >>> bool(model[0].weight.grad.abs().max() < 1e-6)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        energy: float = ProjectionOptions.energy,
        *,
        energy_growth: float = 0.0,
        accumulate: bool = False,
        norms: Norms = "plain",
        **options: Unpack[GramOptions],
    ) -> None:
        check_options(type(self), options, GramOptions.__optional_keys__)
        rule = type(self).__name__
        fraction(**{f"{rule}: energy": energy})
        below(1, **{f"{rule}: energy_growth": energy_growth})
        one_of(get_args(Norms), **{f"{rule}: norms": norms})
        if energy_growth and not accumulate:
            raise InputError(
                f"{rule}: energy_growth={energy_growth} without accumulate=True; bases that are "
                "made anew do not grow."
            )
        self.energy = energy
        self.energy_growth = energy_growth
        self.accumulate = accumulate
        self.norms = norms
        leave = [tied_weight, *([plain_norm] if norms == "plain" else [])]
        super().__init__(model, leave=leave, **options)

    @property
    def rank(self) -> dict[str, int]:
        """Directions closed in each layer, over all its groups."""
        return {
            name: int((one.factor.f > 0).sum())
            for name, one in self._treatments.items()
            if isinstance(one.factor, SpectralShrinkage)
        }

    def _rebuild(
        self,
        survey: Survey,
        statistics: dict[str, Statistic | Sketch],
        left_out: Mapping[str, str],
        of: int | None,
    ) -> None:
        """Anew; where bases accumulate, what the new examples never reach keeps its directions."""
        before = self._treatments if self.accumulate else {}
        super()._rebuild(survey, statistics, left_out, of)
        kept = {name: one for name, one in before.items() if name in survey.sites}
        untreated = {name: why for name, why in self._untreated.items() if name not in kept}
        self._put_in_force(kept | self._treatments, untreated)

    def treat(self, site: Site, statistic: Statistic | Sketch) -> Treatment | str:
        """Projects onto what is left beside the directions that the new examples need."""
        assert isinstance(statistic, Statistic)  # its source makes no sketches
        G, dtype, positions = statistic.G, statistic.dtype, statistic.positions
        if self.norms == "freeze" and is_norm(unwrap(self.model), site):
            return Treatment(site, DenseShrinkage(torch.zeros_like(G, dtype=dtype)), positions)
        energy = min(self.energy + self.energy_growth * self._pace.refreshes, 1.0)
        M, f, s = grow(*self._basis(site, G), G, energy)
        f = self._closed(f, s)
        return Treatment(site, SpectralShrinkage(M.to(dtype), f.to(dtype)), positions)

    def _closed(self, f: Tensor, s: Tensor) -> Tensor:
        """How much of each direction is closed from now on: all of it.

        Args:
            f: ``[groups, k]``, how much was before, 0 for new directions.
            s: ``[groups, k]``, singular values of the new examples in these directions.
        """
        return torch.maximum(f, (s > 0).to(f.dtype))

    def _basis(self, site: Site, G: Tensor) -> tuple[Tensor, Tensor]:
        """The directions to be kept and how much of each is closed; none at first."""
        before = self._treatments.get(site.name) if self.accumulate else None
        if before is None:
            return G.new_zeros(*G.shape[:2], 0), G.new_zeros(len(G), 0)
        factor = before.factor
        if not isinstance(factor, SpectralShrinkage) or factor.U.shape[:2] != G.shape[:2]:
            raise RefreshError(
                f"{type(self).__name__}: {site} had {factor.width} columns in {factor.groups} "
                f"groups, but has {G.shape[1]} in {len(G)} now; make the rule anew."
            )
        return factor.U.to(G), factor.f.to(G)

    def state_dict(self) -> dict[str, Any]:
        """Every basis, and how many refreshes there were."""
        return {**super().state_dict(), "refreshes": self._pace.refreshes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` of the same rule on a model of the same shape gave."""
        super().load_state_dict(state)
        self._pace = Pace(int(state["refreshes"]))


class SGP(GPM):
    """Scaled gradient projection: directions are closed the more, the more they are used.

    Args:
        model: any module, also compiled or wrapped for data parallelism.
        energy: the share of the layer inputs' squared norm that the directions hold.
        scale: the method's ``a``: 0 closes in proportion to the singular values, infinity is GPM.
        options: those of `GPM`. With ``accumulate``, importances add up and stay at most 1.
    """

    def __init__(
        self,
        model: nn.Module,
        energy: float = ProjectionOptions.energy,
        *,
        scale: float = ProjectionOptions.scale,
        **options: Any,
    ) -> None:
        at_least(0, **{"SGP: scale": scale})
        self.scale = scale
        super().__init__(model, energy, **options)

    def _closed(self, f: Tensor, s: Tensor) -> Tensor:
        """What was closed before plus the importance of each direction, at most 1."""
        return (f + importance(s, self.scale)).clamp_max(1)
