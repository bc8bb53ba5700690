"""Rules whose statistics come from refreshes, or from the training steps themselves."""

import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from proxreplay.batch import Batch, with_tensors
from proxreplay.errors import InputError, RefreshError
from proxreplay.options import StepOptions
from proxreplay.proximal.layers.capture import as_written, full_precision
from proxreplay.proximal.layers.incoming import IncomingWatch, WatchPlan
from proxreplay.proximal.layers.sites import Site, unwrap
from proxreplay.proximal.layers.steps import EVERYTHING, Origin, StepWatch
from proxreplay.proximal.rules.base import leaving_nothing
from proxreplay.proximal.rules.byrows import calls_of, multiply_rows_, plan_rows
from proxreplay.proximal.rules.gradients import gradients_of
from proxreplay.proximal.rules.grams import GramRule, StatisticOptions
from proxreplay.proximal.rules.layerwise import Reason, Treatment
from proxreplay.proximal.rules.unscale import NEAR, ScaleWitness
from proxreplay.proximal.shrinkage.spectral import Pace
from proxreplay.proximal.statistics.decay import Aged, aged
from proxreplay.proximal.statistics.step import StepSums, without_sums
from proxreplay.proximal.statistics.summing import Collected, summed

NOT_CALLED = "not called in any training step that was looked at."


class StepwiseRule(GramRule):
    """A `GramRule` that may do without `refresh`: it looks at training steps as they are made.

    By hooks that are there inside of `watched`, or from `attach` to `detach`. Only forward passes
    in training mode that a backward pass goes through count, each once.

    Args:
        model: as for `GramRule`.
        steps: how the training steps are looked at; None for statistics from `refresh`.
        gradients: whether the gradients at the layers' outputs are asked for.
        fisher: of what they are gradients, see `StepWatch`.
        seed: of the labels that are drawn.
        leave: as for `GramRule`.
        options: as for `GramRule`.
    """

    _ever_watched = False

    def __init__(
        self,
        model: nn.Module,
        *,
        steps: StepOptions | None,
        gradients: bool = False,
        fisher: str = "loss",
        seed: int = 0,
        leave: Sequence[Reason] = (),
        **options: Unpack[StatisticOptions],
    ) -> None:
        if steps is not None:
            self._not_yet = "no training step yet."
            leave = [*leave, _bare]
        super().__init__(model, leave=leave, **options)
        self._gradients, self._fisher = gradients, fisher
        self._labels = torch.Generator().manual_seed(seed)
        self._sums: StepSums | None = None
        if steps is not None:
            sketch, own = self._source.sketch, fisher != "loss"
            self._sums = StepSums(steps, self.max_dim, sketch=sketch, per_example=own)
        self._watch: StepWatch | None = None
        self._attached: StepWatch | None = None
        self._witness: ScaleWitness | None = None
        self._hooks = ExitStack()  # from `attach` to `detach`
        self._classes: set[int] = set()
        self._warned_broken = False
        self._open: list[IncomingWatch] = []
        self._watched: list[IncomingWatch] = []  # since the last step
        self._plan: tuple[dict[str, Treatment], WatchPlan, ScaleWitness] | None = None

    @property
    def needs_refresh(self) -> bool:
        """Whether statistics come from refreshes."""
        return self._sums is None

    def attach(self, optimizer: Optimizer) -> Self:
        """Act inside every ``optimizer.step()``, and look at training steps where that is asked."""
        super().attach(optimizer)
        if self._sums is not None:
            self._attached = self._watch = self._new_watch()
            self._hooks.enter_context(self._attached.watching())
            if self._gradients and self._fisher == "loss":
                self._witness = ScaleWitness(unwrap(self.model), self._survey().sites)
                self._hooks.enter_context(self._witness.watching())
        return self

    def detach(self) -> None:
        """Undo `attach`; nothing happens if it was not attached."""
        super().detach()
        self._hooks.close()
        self._attached = self._watch = self._witness = None

    @contextmanager
    def watched(self, incoming: Batch | None = None, replay: Batch | None = None) -> Iterator[None]:
        """Look at the forward and backward passes inside, which are those of one step.

        Compiled parts run as they were written in the steps that are looked at.

        Args:
            incoming: the examples that pass first; None if nobody can tell them apart.
            replay: those that pass after them.
        """
        self._ever_watched = True
        watch, sums = self._watch_rows(incoming, replay), self._sums
        with leaving_nothing(self), ExitStack() as passes:
            if watch is not None:
                passes.enter_context(as_written())
                passes.enter_context(watch.watching())
                passes.enter_context(self._planned()[1].watching())
                self._open.append(watch)
                passes.callback(self._open.remove, watch)
            if sums is not None and sums.looking:
                passes.enter_context(self._looking(incoming, replay))
            yield
        self._take_note(watch, incoming, replay)

    @contextmanager
    def _looking(self, incoming: Batch | None, replay: Batch | None) -> Iterator[None]:
        assert self._sums is not None
        watch = self._attached or self._new_watch()
        watch.parts = self._parts(incoming, replay)
        self._watch = watch
        try:
            with nullcontext() if self._attached else watch.watching(), as_written():
                yield
        except BaseException:
            self._sums.drop_window()
            raise

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes inside are not those of the step."""
        with ExitStack() as stack:
            for one in (*self._open, self._watch):
                if one is not None:
                    stack.enter_context(one.paused())
            yield

    def abandon_(self) -> None:
        """Forget the rows of a step that will not be made."""
        self._watched = []
        if self._plan is not None:
            self._plan[2].forget()

    def step_(self, only: Collection[int] | None = None) -> None:
        """`precondition_` for a step that will be made, after taking in what was seen of it."""
        self._check_closed()
        if self._sums is not None:
            self._take_in(self._sums)
        self._without = self._multiply_rows_(only)
        try:
            super().step_(only)
        finally:
            self._without = frozenset()

    def _check_closed(self) -> None:
        if self._open:
            raise InputError(
                f"{type(self).__name__}: the optimizer steps inside of watched(...), before what "
                "was seen there is known; end the block after backward(), then step."
            )

    def _planned(self) -> tuple[WatchPlan, ScaleWitness]:
        """What to watch in steps, found out once per refresh."""
        if self._plan is None or self._plan[0] is not self._treatments:
            plan = self._plan_watch(unwrap(self.model))
            sites = {site.name: site for site, _, _ in plan.layers}
            self._plan = self._treatments, plan, ScaleWitness(unwrap(self.model), sites)
        return self._plan[1:]

    def _plan_watch(self, model: nn.Module) -> WatchPlan:
        """The layers whose gradients are multiplied by their rows."""
        return plan_rows(model, self._treatments, dense=self._sums is not None)

    def _watch_rows(self, incoming: Batch | None, replay: Batch | None) -> IncomingWatch | None:
        """Look at the rows of a step; None where nobody needs them."""
        before = self._plan
        if not self._planned()[0].layers or not self.processes.alone:
            return None
        if self._plan is not before:  # what was seen before may lack a layer
            self._watched = []
        return self._new_row_watch(sys.maxsize)

    def _new_row_watch(self, examples: int) -> IncomingWatch:
        plan, witness = self._planned()
        waiting = self._watched or witness.arrived
        if waiting and witness.nothing_accumulated():  # a step before was left out
            witness.forget()
            self._watched = []
        return IncomingWatch(unwrap(self.model), plan, examples)

    def _take_note(
        self, watch: IncomingWatch | None, incoming: Batch | None, replay: Batch | None
    ) -> None:
        """Keep what was seen of rows until the step."""
        if watch is not None:
            self._watched.append(watch)

    @torch.no_grad()
    def _multiply_rows_(self, only: Collection[int] | None) -> frozenset[str]:
        """The sites whose gradient of a `watched` step was multiplied by its rows.

        None if gradients are not those that arrived any more: clipped, say, or scaled.
        """
        watched, self._watched = self._watched, []
        if watched and self._plan is not None:
            ratio, proportional = self._plan[2].ratio(self.processes)
            watched = watched if proportional and abs(ratio - 1) <= NEAR else []
        done = set()
        for name, calls in (calls_of(watched, self._treatments) if watched else {}).items():
            treatment = self._treatments[name]
            gradients = gradients_of(unwrap(self.model), treatment.site.columns, only)
            if all(one is not None for one in gradients):
                factor = self._factor(name, (True,) * len(gradients), gradients)
                with full_precision():
                    for call in calls:
                        multiply_rows_(call, factor, gradients)
                done.add(name)
        return frozenset(done)

    def refresh(self, examples: Any, of: int | None = None, **how: Any) -> None:
        """As `GramRule.refresh`; nothing where statistics come from training steps."""
        if self._sums is None:
            super().refresh(examples, of, **how)

    def prepare(self, averages: Mapping[str, Aged]) -> None:
        """See the averages of all sites before each is treated by itself; most rules do not."""
        return None

    def idle(self) -> str | None:
        """Whether nothing is known yet."""
        if self._sums is None:
            return super().idle()
        seen = self._treatments or (self._watch is not None and self._watch.examples)
        if seen or self._ever_watched:
            return None
        if self._attached:
            return "no forward pass in training mode was seen since attach()."
        return (
            "no training step was seen. Use attach(optimizer), or put forward and backward passes "
            "inside of `with rule.watched():`."
        )

    def _new_watch(self) -> StepWatch:
        sums = self._sums
        assert sums is not None
        return StepWatch(
            unwrap(self.model),
            self._survey().sites,
            sums.add,
            gradients=self._gradients,
            fisher=self._fisher,
            labels=self._labels,
            widest=self.max_dim,
            active=lambda: sums.looking,
            instead=self._source.instead,
            verifier=self._verifier,
        )

    def _parts(self, incoming: Batch | None, replay: Batch | None) -> Sequence[Origin]:
        """The examples of a step that count alike, in the order in which they pass."""
        assert self._sums is not None
        own = self._sums.options
        if incoming is None:
            return EVERYTHING
        first = Origin("incoming", len(incoming), own.incoming)
        weight = 1.0
        if own.balance:
            present = set(incoming.labels.tolist())
            self._classes |= present
            weight = max(1.0, len(self._classes) / len(present))
        return (first, Origin("replay", float("inf"), weight)) if replay is not None else (first,)

    def _take_in(self, sums: StepSums) -> None:
        """The end of a step: its sums join the window, and a full window makes new factors."""
        watch, scale = self._watch, 1.0
        if self._witness is not None:
            scale = self._witness.scale(self.processes)
        if watch is None:
            sums.end_step({}, ())
        else:
            sums.end_step(watch.examples, watch.parts, scale * watch.scale, watch.own)
            watch.begin_step()
        if watch is not self._attached:
            self._watch = self._attached
        if sums.in_window and sums.due:
            self._rebuild_from(sums)

    @torch.no_grad()
    def _rebuild_from(self, sums: StepSums) -> None:
        """New factors from the window; sites that were not called keep theirs."""
        stays = sums.options.decay**sums.in_window
        found: Collected = {}, {}
        broken: RefreshError | None = None
        try:
            found = sums.finish()
        except RefreshError as error:  # a training step must not fail for it
            broken = error
        if self.processes.any(broken):
            if broken is not None and not self._warned_broken:
                self._warned_broken = True
                warnings.warn(f"{type(self).__name__}: {broken}", stacklevel=4)
            return
        statistics, left_out = summed(self.processes, lambda: found, self._device)
        survey = self._survey()
        statistics = {name: statistics[name] for name in survey.sites if name in statistics}
        untreated = survey.untreated | left_out | self._verifier.wrong
        treatments = {n: t for n, t in self._treatments.items() if n in survey.sites}
        history = {n: h for n, h in self._history.items() if n in survey.sites}
        for name, newest in statistics.items():
            history[name] = aged(history.get(name), newest, stays)

        self.prepare(history)

        def made(name: str) -> Treatment | str:
            return self.treat(survey.sites[name], history[name].instead_of(statistics[name]))

        new, without = self._made_together(survey, statistics, made)
        treatments = {n: t for n, t in treatments.items() if n not in without} | new
        untreated |= without
        self._history = history
        missing = survey.sites.keys() - treatments.keys() - untreated.keys()
        self._put_in_force(treatments, untreated | dict.fromkeys(sorted(missing), NOT_CALLED))
        self._pace.refreshed()

    def __getstate__(self) -> dict[str, Any]:
        nothing = dict.fromkeys(("_watch", "_attached", "_witness", "_hooks", "_plan"))
        nothing |= {"_watched": [], "_open": []}
        labels = {"_labels": self._labels.get_state()}  # a generator cannot be copied
        return super().__getstate__() | nothing | labels

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _hooks=ExitStack())
        self._labels = torch.Generator()
        self._labels.set_state(state["_labels"])

    def state_dict(self) -> dict[str, Any]:
        """What refreshes or steps made: tensors, numbers and strings in nested dicts."""
        known = super().state_dict() | {"pace": asdict(self._pace)}
        if self._sums is None:
            return known
        first, *others = self._windows(self._sums)
        steps = {"sums": first, "classes": sorted(self._classes)}
        if others:
            steps["others"] = others
        if self._fisher == "sampled":
            steps["labels"] = self._labels.get_state()
        return known | {"step": steps}

    def _windows(self, sums: StepSums) -> list[dict[str, Any]]:
        """The state of the window of every process.

        Those that do not all hand in the same examples are not asked, as each may save for itself:
        the examples since the last rebuild are then left out.
        """
        own, processes = sums.state(), self.processes
        if processes.alone or not sums.in_window:
            return [own]
        if processes.replicated:
            return processes.tell(with_tensors(own, Tensor.cpu))
        return [without_sums(own) | {"in_window": 0, "examples": {}, "weighted": {}}]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` of the same rule on a model of the same shape gave."""
        super().load_state_dict(state)
        self._pace = Pace(**state.get("pace", {}))
        if self._sums is not None and "step" in state:
            there = partial(Tensor.to, device=self._device)
            sites = self._survey().sites
            windows = [state["step"]["sums"], *state["step"].get("others", ())]
            rank, size = self.processes.rank, self.processes.size
            own = windows[rank::size] or [without_sums(windows[0])]
            self._sums.load_state(with_tensors(own, there), sites)
            self._classes = set(state["step"]["classes"])
            if "labels" in state["step"]:
                self._labels.set_state(state["step"]["labels"].cpu())
            self._history = {
                name: Aged.from_state(with_tensors(one.state(), there))
                for name, one in self._history.items()
            }


def _bare(model: nn.Module, site: Site) -> str | None:
    return "a parameter without a layer; only a refresh finds its rows." if site.bare else None
