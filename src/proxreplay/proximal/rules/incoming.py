"""Shrink what incoming examples bring to the gradient, and let replay through as it is.

With ``G = G_in + G_re`` and a share ``s`` of the rule that acts,

    G <- G - s G_in (I - Lambda),       or, where lengths are kept (see `length`),
    G <- G - s (G_in - c G_in Lambda),  c = |G_in| / |G_in Lambda|.

A replayed example asks for a change of what is remembered, and for the right one: to shrink its
gradient too is what makes the paper's rule fall behind plain replay on long tasks.

A rule may act once per stream batch instead of at every step: the steps before the last one are
plain, and ``G_in`` of the last one is the sum over all of them.
"""

import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
    summed,
    together,
)
from proxreplay.proximal.layers.sites import Column, Site, unwrap
from proxreplay.proximal.rules.base import leaving_nothing
from proxreplay.proximal.rules.byrows import subtract_rows_
from proxreplay.proximal.rules.gradients import gradients_of, moving_columns
from proxreplay.proximal.rules.layerwise import Layers, Treatment
from proxreplay.proximal.rules.length import Lengths, lengthened
from proxreplay.proximal.rules.share import Share
from proxreplay.proximal.rules.stepwise import StepwiseRule
from proxreplay.proximal.rules.unscale import NEAR
from proxreplay.proximal.shrinkage.forms import Shrinkage

MOST_CHANGED = 2.0  # by something else than a factor, such as weight decay of one's own


class IncomingRule(StepwiseRule):
    """A `StepwiseRule` that may act on the incoming part of gradients alone.

    It does in the passes inside of `watched`. Elsewhere, and where BatchNorm sees incoming and
    replayed examples together, nobody can tell which part that is, and the whole gradient is
    treated. Several processes add up what incoming examples bring to each.

    Args:
        model: see `StepwiseRule`.
        split: whether it acts on the incoming part.
        flat: whether it does so only if that part is known of every layer, and Linear layers have
            one row per example. Networks of tokens lose by it (docs/strength.md).
        keep: whether gradients stay as long as they are (`length`).
        once: whether it acts on the incoming part once per stream batch, where there is somebody
            who says which step is the last (`wait_`).
        options: of a `StepwiseRule`.
    """

    def __init__(
        self, model: nn.Module, *, split: bool, flat: bool, keep: bool, once: bool, **options: Any
    ) -> None:
        self._split = split
        self._flat = flat
        self._keep = keep
        self._once = once
        self._share = Share()
        self._brought = _Rows()  # by the steps since the last one that acted
        self._waits = False  # whether more steps on the same stream batch follow this one
        self._whole = True  # whether `precondition_` acts: not where the incoming part is known
        self._coupled = False  # whether BatchNorm mixed the examples of the last watched passes
        super().__init__(model, **options)

    def __repr__(self) -> str:
        lines = [super().__repr__()]
        if self._keep:
            lines.append("gradients are turned and keep their length")
        if self._mixed is not None:
            lines.append(f"the whole gradient is treated: {self._mixed}")
        if self._coupled:
            lines.append(
                "BatchNorm saw incoming and replayed examples in one pass: the whole gradient is "
                "treated, not only what incoming examples bring"
            )
        return "\n".join(lines)

    @property
    def share(self) -> float | None:
        """How much of the rule acts at present, from 0 to 1; None if it always acts fully."""
        return self._share.value if self._apart else None

    @property
    def _apart(self) -> bool:
        """Whether the incoming part is treated by itself, where it is known."""
        return self._split and self._mixed is None

    def _put_in_force(self, treatments: dict[str, Treatment], untreated: dict[str, str]) -> None:
        super()._put_in_force(treatments, untreated)
        self._mixed = self._why_mixed() if self._flat else None

    def _why_mixed(self) -> str | None:
        """Why the whole gradient is treated in spite of `split`; None if it is not."""
        model = unwrap(self.model)
        known = {site.name for site, _, _ in self._tellable(model).layers}
        for name, one in self._treatments.items():
            if name not in known:
                return f"nobody can tell what incoming examples bring to '{name}'."
            if one.positions > 1 and isinstance(one.site.module(model), nn.Linear):
                return f"'{name}' has several rows per example, as for tokens."
        return None

    def _tellable(self, model: nn.Module) -> WatchPlan:
        """All layers whose incoming part can be told."""
        return WatchPlan.of(model, [one.site for one in self._treatments.values()])

    @property
    def layers(self) -> Layers:
        """What is treated at present, by name."""
        return Layers(
            (name, replace(one, share=self.share)) for name, one in super().layers.items()
        )

    @property
    def unsplit(self) -> list[str]:
        """Layers whose incoming part nobody can tell: `watched` steps leave them alone."""
        if not self._apart:
            return []
        known = {site.name for site, _, _ in self._tellable(unwrap(self.model)).layers}
        return [name for name in self._treatments if name not in known]

    def _plan_watch(self, model: nn.Module) -> WatchPlan:
        return self._tellable(model) if self._apart else super()._plan_watch(model)

    def _watch_rows(self, incoming: Batch | None, replay: Batch | None) -> IncomingWatch | None:
        """Look at the rows of incoming examples, which pass first."""
        if not self._apart:
            return super()._watch_rows(incoming, replay)
        if not self._treatments or incoming is None or replay is None:
            return None
        return self._new_row_watch(len(incoming))

    def _take_note(
        self, watch: IncomingWatch | None, incoming: Batch | None, replay: Batch | None
    ) -> None:
        """Keep what was seen, if every process can tell what incoming examples brought."""
        if not self._apart:
            super()._take_note(watch, incoming, replay)
            return
        if not self._treatments:
            return
        if watch is not None and incoming is not None and replay is not None:
            self._check_counts(watch.passed, len(incoming), len(replay))
        both = [] if incoming is None or replay is None else [incoming, replay]
        labels = [one.labels for one in both]
        losses, apart = None, watch is not None and not watch.coupled
        self._coupled = watch is not None and watch.coupled
        if watch is not None and apart:
            losses = watch.losses(torch.cat([*labels]))
        if not (self.processes.alone or self.processes.replicated):
            apart, losses = self._agreed(apart, losses, [len(one) for one in labels])
        if watch is not None and apart:
            self._watched.append(watch)
            if losses is not None:
                self._share.note(*losses)

    def _check_counts(self, passed: int, incoming: int, replay: int) -> None:
        """Refuse passes that cannot be those of the batches that were declared."""
        if not self.processes.alone or passed == 0:  # others' examples count too
            return
        rest = passed - incoming
        if rest < 0 or (rest % replay if replay else rest):
            raise InputError(
                f"{type(self).__name__}: watched(...) was told of {incoming} incoming and {replay} "
                f"replayed examples, but {passed} passed with gradients; give the batches as they "
                "pass, the incoming one first."
            )

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

    def abandon_(self) -> None:
        """Forget the steps on this stream batch, too: those that were made stay plain."""
        super().abandon_()
        self._brought = _Rows()

    def wait_(self) -> None:
        """A step whose incoming part, if known, is changed together with that of the last one."""
        if self._optimizer is not None:
            raise InputError(
                f"{type(self).__name__}.wait_: the rule is attached to an optimizer, which calls "
                "step_() itself; detach() first, and call step_() before the last step of a batch."
            )
        self._waits = self._once
        try:
            self.step_()
        finally:
            self._waits = False

    def step_(self, only: Collection[int] | None = None) -> None:
        """`precondition_` for a step that will be made: what incoming examples bring, if known."""
        self._check_closed()
        with leaving_nothing(self):
            self._whole = not self._take_rows()
            try:
                with self._kept_length(only):
                    super().step_(only)
            finally:
                self._whole = True
            if not self._waits:
                if self._brought.steps and self._share.value > 0:
                    self._shrink_incoming_(only)
                self._brought = _Rows()

    def _take_rows(self) -> bool:
        """Keep what incoming examples brought in this step; whether that is known."""
        if not self._apart:
            return False
        watched, self._watched = self._watched, []
        if watched:
            scale = self._found_scale()
            for watch in watched:
                self._brought.take(watch, scale, keep=self._waits)
        elif self._plan is not None:
            self._plan[2].forget()  # of a step that is treated as a whole
        return bool(watched)

    @contextmanager
    def _kept_length(self, only: Collection[int] | None) -> Iterator[None]:
        """Gradients that are treated as a whole are as long afterwards as they were."""
        if not (self._keep and self._whole):
            yield
            return
        model, sites = unwrap(self.model), [one.site for one in self._treatments.values()]
        lengths = Lengths((site, gradients_of(model, site.columns, only)) for site in sites)
        yield
        lengths.restore_()

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
        """``G <- G Lambda``; in a step whose incoming part is known, on that part alone."""
        if self._whole:
            super().precondition_(only)

    @torch.no_grad()
    def _shrink_incoming_(self, only: Collection[int] | None) -> None:
        """``G <- G - s (G_in - c G_in Lambda)`` for every layer whose incoming part is known."""
        model, alone, share = unwrap(self.model), self.processes.alone, self._share.value
        changes: list[_Change] = []
        with full_precision():
            for site, _, _ in self._planned()[0].layers:
                name = site.name
                brought, lost = self._brought.of_sites.get(name, ()), name in self._brought.lost
                gradients = gradients_of(model, site.columns, only)
                moving = tuple(one is not None for one in gradients)
                if True not in moving or (alone and (lost or not brought)):
                    continue
                factor, kept = self._factor(name, moving, gradients), None
                if False in moving:
                    kept = moving_columns(site, gradients, self._treatments[name].factor.width)
                change = _Change(site, factor, kept, gradients, self._keep)
                if alone:
                    change.take_away_(brought, share)
                else:
                    change.begin(brought, lost)
                    changes.append(change)
            if changes:
                take_together_(changes, self.processes, share)

    def state_dict(self) -> dict[str, Any]:
        """What the refreshes made: tensors, numbers and strings in nested dicts."""
        share = {"share": self._share.state()} if self._split else {}
        known = super().state_dict() | share | ({"length": "kept"} if self._keep else {})
        return known | ({"whole": self._mixed} if self._mixed is not None else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` of the same rule on a model of the same shape gave."""
        super().load_state_dict(state)
        if self._keep and self._treatments and "length" not in state:
            warnings.warn(
                f"{type(self).__name__}: this state was saved by a version that shrank gradients "
                "where this one keeps their length; from here on it learns differently from that "
                "version. Give omega_0 for a rule that does not change.",
                stacklevel=2,
            )
        if self._mixed is not None and "whole" not in state:
            warnings.warn(
                f"{type(self).__name__}: this state was saved by a version that changed only what "
                "incoming examples bring, where this one changes the whole gradient: "
                f'{self._mixed} From here on it learns differently; gradient="incoming" is the '
                "form of before.",
                stacklevel=2,
            )
        self._watched, self._brought = [], _Rows()
        self._share = Share(**state.get("share", {}))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_brought": _Rows()}


@dataclass
class _Rows:
    """What incoming examples brought in the steps that have not been changed yet."""

    of_sites: dict[str, Sequence[Brought | Awaited]] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)  # sites whose rows could not be told apart

    steps: int = 0  # whose incoming part is known; the same in all processes, unlike the rows

    def take(self, watch: IncomingWatch, scale: float, *, keep: bool) -> None:
        """Add a step.

        Args:
            watch: of its passes.
            scale: how much larger its gradients were in them.
            keep: whether the rows must outlive the step, which changes what they are views of.
        """
        self.steps += 1
        self.lost |= watch.lost
        for name, found in watch.brought.items():
            new = found if scale == 1 else [one.divided(scale) for one in found]
            new = [one.copied() for one in new] if keep else new
            self.of_sites[name] = summed([*self.of_sites.get(name, ()), *new])


@dataclass
class _Change:
    """What is taken away from the gradients of a site: ``s (G_in - c G_in Lambda)``."""

    site: Site
    factor: Shrinkage  # Lambda, restricted to the columns that move
    kept: Tensor | None  # these columns; None for all
    gradients: Sequence[Tensor | None]  # of the columns; None where they do not move
    keep: bool  # whether c makes it as long as it was; else it is 1
    own: list[Tensor | None] = field(default_factory=list)  # G_in of one process, then of all
    flags: list[float] = field(default_factory=list)  # whether its rows are lost; are there at all

    def take_away_(self, brought: Sequence[Brought | Awaited], share: float) -> None:
        """From what all calls of the site brought."""
        one = together(brought)
        by_rows = isinstance(one, Awaited) and self.kept is None and (one.few or not self.keep)
        if by_rows and isinstance(one, Awaited):
            subtract_rows_(one, self.factor, self.gradients, share, keep=self.keep)
        else:
            self._subtract_(self._moving(one), share)

    def begin(self, brought: Sequence[Brought | Awaited], lost: bool) -> None:
        """Work out ``G_in`` of the examples of one process."""
        self.own = [None if g is None else torch.zeros_like(g) for g in self.gradients]
        self.flags = [float(lost), float(bool(brought))]
        for one in brought:
            subtract_(self.site, self.own, self._moving(one), -1.0)

    def end_(self, share: float) -> None:
        """Take away what `own` asks for, which is the sum over all processes by now."""
        found = pieces_of(self.site, self.own, self.factor.width)
        parts = [c.part.read(g, self.factor.groups, width) for c, g, width in found]
        self._subtract_(Brought(torch.cat(parts, dim=2).to(self.factor.dtype)), share)

    def _moving(self, brought: Brought | Awaited) -> Brought:
        """``G_in`` of the columns that move."""
        one = brought.now() if isinstance(brought, Awaited) else brought
        M = one.M.to(self.factor.dtype)
        return Brought(M if self.kept is None else M[:, :, self.kept.to(M.device)], one.left)

    def _subtract_(self, brought: Brought, share: float) -> None:
        M = self.factor.taken(brought.M)
        if self.keep:
            M = lengthened(brought, M)
        subtract_(self.site, self.gradients, Brought(M, brought.left), share)


def take_together_(changes: Sequence[_Change], processes: Processes, share: float) -> None:
    """Change gradients, which are means over processes, by the mean of what these found."""
    own = [one for change in changes for one in change.own if one is not None]
    flags = torch.tensor([c.flags for c in changes], dtype=own[0].dtype, device=own[0].device)
    processes.sum_([*own, flags])
    for change, (lost, brought) in zip(changes, flags.tolist(), strict=True):
        if brought and not lost:
            change.end_(share / processes.size)


def pieces_of(
    site: Site, gradients: Sequence[Tensor | None], width: int
) -> list[tuple[Column, Tensor, int]]:
    """The columns that move, their gradients and how many of ``width`` columns each has."""
    present = [(c, g) for c, g in zip(site.columns, gradients, strict=True) if g is not None]
    widths = [1] * len(present)
    if gradients[0] is not None and site.weight is not None:
        widths[0] = width - len(present) + 1
    return [(c, g, w) for (c, g), w in zip(present, widths, strict=True)]


def subtract_(site: Site, gradients: Sequence[Tensor | None], lost: Brought, share: float) -> None:
    """Take a matrix ``[groups, out, D]`` away from the gradients of a site's columns."""
    found = pieces_of(site, gradients, lost.M.shape[2])
    pieces = lost.M.split([width for _, _, width in found], dim=2)
    for (column, gradient, _), piece in zip(found, pieces, strict=True):
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
