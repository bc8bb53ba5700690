"""Shrink what incoming examples bring to the gradient, and let replay through as it is.

With ``G = G_in + G_re`` and a share ``s`` of the rule that acts,

    G <- G - s G_in (I - Lambda).

A replayed example asks for a change of what is remembered, and for the right one: to shrink its
gradient too is what makes the paper's rule fall behind plain replay on long tasks.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from proxreplay.batch import Batch
from proxreplay.distributed import Processes
from proxreplay.errors import InputError
from proxreplay.proximal.layers.capture import full_precision
from proxreplay.proximal.layers.incoming import (
    Awaited,
    Brought,
    IncomingWatch,
    WatchPlan,
    splittable,
)
from proxreplay.proximal.layers.sites import Site, unwrap
from proxreplay.proximal.rules.byrows import subtract_rows_
from proxreplay.proximal.rules.gradients import gradients_of, moving_columns
from proxreplay.proximal.rules.layerwise import Layers
from proxreplay.proximal.rules.share import Share
from proxreplay.proximal.rules.stepwise import StepwiseRule
from proxreplay.proximal.rules.unscale import NEAR
from proxreplay.proximal.shrinkage.forms import Shrinkage

MOST_CHANGED = 2.0  # by something else than a factor, such as weight decay of one's own


class IncomingRule(StepwiseRule):
    """A `StepwiseRule` that may act on the incoming part of gradients alone.

    It does in the passes inside of `watched`. Elsewhere, and where BatchNorm sees incoming and
    replayed examples together, nobody can tell which part that is, and the whole gradient is
    treated. Several processes add up what each has to take away.
    """

    def __init__(self, model: nn.Module, *, split: bool, **options: Any) -> None:
        self._split = split
        self._share = Share()
        self._taken: list[IncomingWatch] = []  # of the step that is being made
        self._scale = 1.0  # of the gradients that arrived, against those of the step
        super().__init__(model, **options)

    @property
    def share(self) -> float | None:
        """How much of the rule acts at present, from 0 to 1; None if it always acts fully."""
        return self._share.value if self._split else None

    @property
    def layers(self) -> Layers:
        """What is treated at present, by name."""
        return Layers(
            (name, replace(one, share=self.share)) for name, one in super().layers.items()
        )

    @property
    def unsplit(self) -> list[str]:
        """Layers whose incoming part nobody can tell: `watched` steps leave them alone."""
        model = unwrap(self.model)
        sites = {name: one.site for name, one in self._treatments.items()}
        return [n for n, s in sites.items() if not splittable(model, s)] if self._split else []

    def _plan_watch(self, model: nn.Module) -> WatchPlan:
        """All layers whose incoming part can be told, if that alone is treated."""
        if not self._split:
            return super()._plan_watch(model)
        return WatchPlan.of(model, [one.site for one in self._treatments.values()])

    def _watch_rows(self, incoming: Batch | None, replay: Batch | None) -> IncomingWatch | None:
        """Look at the rows of incoming examples, which pass first."""
        if not self._split:
            return super()._watch_rows(incoming, replay)
        if not self._treatments or incoming is None or replay is None:
            return None
        return self._new_row_watch(len(incoming))

    def _take_note(
        self, watch: IncomingWatch | None, incoming: Batch | None, replay: Batch | None
    ) -> None:
        """Keep what was seen, if every process can tell what incoming examples brought."""
        if not self._split:
            super()._take_note(watch, incoming, replay)
            return
        if not self._treatments:
            return
        both = [] if incoming is None or replay is None else [incoming, replay]
        labels = [one.labels for one in both]
        losses, apart = None, watch is not None and not watch.coupled
        if watch is not None and apart:
            losses = watch.losses(torch.cat([*labels]))
        if not (self.processes.alone or self.processes.replicated):
            apart, losses = self._agreed(apart, losses, [len(one) for one in labels])
        if watch is not None and apart:
            self._watched.append(watch)
            if losses is not None:
                self._share.note(*losses)

    def _agreed(
        self, apart: bool, losses: tuple[float, float] | None, counts: Sequence[int]
    ) -> tuple[bool, tuple[float, float] | None]:
        """Whether all processes can tell examples apart, and the mean losses over all of them."""
        own = [(loss * n, n) for loss, n in zip(losses or (), counts, strict=False)]
        (first, n), (second, m) = own or [(0.0, 0), (0.0, 0)]
        total = torch.tensor([float(not apart), first, n, second, m], dtype=torch.float64)
        self.processes.sum_([total])
        coupled, first, n, second, m = total.tolist()
        return coupled == 0, (first / n, second / m) if n and m else None

    def step_(self, only: Collection[int] | None = None) -> None:
        """`precondition_` for a step that will be made: what incoming examples bring, if known."""
        if self._split:
            self._taken, self._watched = self._watched, []
            if self._taken:
                self._scale = self._found_scale()
            elif self._plan is not None:
                self._plan[2].arrived = None  # of a step that is treated as a whole
        try:
            super().step_(only)
        finally:
            self._taken = []

    def _found_scale(self) -> float:
        """How much larger gradients were in the watched passes than they are now.

        A loss scale (`torch.amp.GradScaler`) and clipping by norm are followed.
        """
        ratio, proportional = self._planned()[1].ratio(self.processes)
        if proportional and 0 < ratio < math.inf:
            return ratio if abs(ratio - 1) > NEAR else 1.0
        if not 1 / MOST_CHANGED < abs(ratio) < MOST_CHANGED:
            raise InputError(
                f"{type(self).__name__}: gradients were changed between backward and the step "
                f"(by a factor of {1 / ratio if ratio else math.inf:.3g}, and not all alike), so "
                "the part of incoming examples is not known. Clip by norm instead of by value; "
                "or leave out `watched`."
            )
        return 1.0

    def precondition_(self, only: Collection[int] | None = None) -> None:
        """``G <- G Lambda``; in a step whose incoming part is known, on that part alone.

        Args:
            only: ids of the parameters to treat as moving; None for all that have a gradient.
        """
        if not self._taken:
            super().precondition_(only)
        elif self._share.value > 0:
            self._shrink_incoming_(self._taken, only)

    @torch.no_grad()
    def _shrink_incoming_(
        self, watched: Sequence[IncomingWatch], only: Collection[int] | None
    ) -> None:
        """``G <- G - s G_in (I - Lambda)`` for every layer whose incoming part is known."""
        model, alone, share = unwrap(self.model), self.processes.alone, self._share.value
        share /= self._scale
        together: list[_Change] = []
        lost = {name for watch in watched for name in watch.lost}
        with full_precision():
            for site, _, _ in self._planned()[0].layers:
                name = site.name
                brought = [one for watch in watched for one in watch.brought.get(name, ())]
                gradients = gradients_of(model, site.columns, only)
                moving = tuple(one is not None for one in gradients)
                if True not in moving or (alone and (name in lost or not brought)):
                    continue
                factor, kept = self._factor(name, moving, gradients), None
                if False in moving:
                    kept = moving_columns(site, gradients, self._treatments[name].factor.width)
                if alone:
                    for one in brought:
                        take_away_(one, site, factor, kept, gradients, share)
                    continue
                change = _Change(gradients, name in lost, bool(brought))
                together.append(change)
                for one in brought:
                    take_away_(one, site, factor, kept, change.own, -1.0)
            if together:
                take_together_(together, self.processes, share)

    def state_dict(self) -> dict[str, Any]:
        """What the refreshes made: tensors, numbers and strings in nested dicts."""
        return super().state_dict() | ({"share": self._share.state()} if self._split else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` of the same rule on a model of the same shape gave."""
        super().load_state_dict(state)
        self._watched = []
        self._share = Share.from_state(state.get("share", {}))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_taken": []}


class _Change:
    """What one process takes away from the gradients of a site; its `own` part begins at zero."""

    def __init__(self, gradients: Sequence[Tensor | None], lost: bool, brought: bool) -> None:
        self.gradients = gradients
        self.own = [None if g is None else torch.zeros_like(g) for g in gradients]
        self.flags = [float(lost), float(brought)]


def take_together_(changes: Sequence[_Change], processes: Processes, share: float) -> None:
    """Take the mean of what all processes found away from the gradients, which are means too."""
    own = [one for change in changes for one in change.own if one is not None]
    flags = torch.tensor([c.flags for c in changes], dtype=own[0].dtype, device=own[0].device)
    processes.sum_([*own, flags])
    for change, (lost, brought) in zip(changes, flags.tolist(), strict=True):
        if lost or not brought:
            continue
        for gradient, one in zip(change.gradients, change.own, strict=True):
            if gradient is not None and one is not None:
                gradient.sub_(one, alpha=share / processes.size)


def take_away_(
    brought: Brought | Awaited,
    site: Site,
    factor: Shrinkage,
    kept: Tensor | None,
    gradients: Sequence[Tensor | None],
    share: float,
) -> None:
    """``G <- G - s G_in (I - Lambda)``.

    Args:
        brought: by one call of the site.
        site: whose columns the gradients are of.
        factor: ``Lambda``, restricted to the columns that move.
        kept: these columns; None for all.
        gradients: of the columns; None where they do not move.
        share: ``s``.
    """
    if isinstance(brought, Awaited):
        if kept is None:
            subtract_rows_(brought, factor, gradients, share)
            return
        brought = brought.now()
    subtract_(site, gradients, lost_of(brought, factor, kept), share)


def lost_of(brought: Brought, factor: Shrinkage, kept: Tensor | None) -> Brought:
    """``G_in (I - Lambda)``.

    Args:
        brought: ``G_in = left' M``.
        factor: ``Lambda``, restricted to the columns that move.
        kept: these columns; None for all.
    """
    M = brought.M.to(factor.dtype)
    if kept is not None:
        M = M[:, :, kept.to(M.device)]
    return Brought(factor.taken(M), brought.left)


def subtract_(site: Site, gradients: Sequence[Tensor | None], lost: Brought, share: float) -> None:
    """Take a matrix ``[groups, out, D]`` away from the gradients of a site's columns."""
    present = [(c, g) for c, g in zip(site.columns, gradients, strict=True) if g is not None]
    weight = gradients[0] is not None and site.weight is not None
    widths = [1] * len(present)
    if weight:
        widths[0] = lost.M.shape[2] - len(present) + 1
    for (column, gradient), piece in zip(present, lost.M.split(widths, dim=2), strict=True):
        plain = len(piece) == 1 and not column.part.last and gradient.dtype == piece.dtype
        if plain and lost.left is not None and gradient.shape[1:] == piece.shape[2:]:
            gradient.addmm_(lost.left[0].T, piece[0], alpha=-share)  # a weight, in one product
            continue
        whole = Brought(piece, lost.left).gradient()
        if plain and gradient.shape == whole.shape[1:]:
            gradient.sub_(whole[0], alpha=share)
        else:
            change = torch.empty_like(gradient)
            column.part.write_(change, whole)
            gradient.sub_(change, alpha=share)
