"""Statistics from training steps: sums over a window of steps, which then enter a moving average.

A step's examples may come in parts ``p`` that count differently (`Origin`): with weights ``w_p``,
``n_p`` examples, rows ``z`` and gradients ``g`` at the outputs, ``N`` examples in the step and
``T`` rows per example,

    A = sum_p w_p sum z z' / sum_p w_p n_p,     B = N^2 sum_p w_p sum g g' / (T sum_p w_p n_p).

For a loss that is a mean over examples, ``N g`` is the gradient of one example's own loss.

Of several processes each adds up its own examples, but counts and weighs those of all: what they
add up then only needs to be summed.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from proxreplay.errors import RefreshError
from proxreplay.options import StepOptions
from proxreplay.proximal.layers.capture import Call
from proxreplay.proximal.layers.outputs import gradient_gram
from proxreplay.proximal.layers.sites import Site
from proxreplay.proximal.layers.steps import Origin, StepCall
from proxreplay.proximal.statistics.collect import GramCollector
from proxreplay.proximal.statistics.few import FewRows, alike
from proxreplay.proximal.statistics.sketch import Sketch
from proxreplay.proximal.statistics.statistic import Statistic, grown


@dataclass
class _Outputs:
    """``sum_p w_p sum g g'`` of one site in one step, over how many rows, and of which parts."""

    gram: Tensor
    rows: int
    parts: frozenset[str]


TOGETHER = "together"  # rows of all parts, weighed


class StepSums:
    """Adds up rows and output gradients over a window of steps.

    Args:
        options: how often to look.
        max_dim: sites with more columns get a sketch, or none.
        sketch: whether the rule can do something with a sketch.
        per_example: whether gradients are those of one example's own loss already.
    """

    def __init__(
        self, options: StepOptions, max_dim: int, *, sketch: bool, per_example: bool = False
    ) -> None:
        self.options = options
        self.max_dim = max_dim
        self.sketch = sketch
        self.per_example = per_example
        self.mean_weight = 1.0  # of the examples of the last window
        self.steps = 0  # of all
        self.looked = 0  # at so many of them
        self._clear()
        self._step_outputs: dict[str, _Outputs] = {}

    def _clear(self) -> None:
        self.in_window = 0
        self._collectors: dict[str, GramCollector] = {}
        self._carried: list[tuple[str, GramCollector]] = []  # by processes that are gone
        self._own = 0  # examples of this process
        self._examples: defaultdict[str, int] = defaultdict(int)
        self._weighted: defaultdict[str, float] = defaultdict(float)
        self._B: dict[str, tuple[Tensor, int]] = {}
        self._blind: set[str] = set()
        self._broken: str | None = None

    @property
    def looking(self) -> bool:
        """Whether the step under way is one to look at."""
        return self.steps % self.options.every == 0

    @property
    def due(self) -> bool:
        """Whether the window is full; the first ones are short, so that a rule starts early."""
        return self.in_window >= min(self.options.rebuild, max(1, self.looked - self.in_window))

    def add(self, call: StepCall) -> None:
        """Take a call of the step under way."""
        if call.rows is not None:
            name = call.parts[0].name if len(call.parts) == 1 else TOGETHER
            if name not in self._collectors:
                collector = GramCollector(self.max_dim, sketch=self.sketch, wait=True)
                self._collectors[name] = collector
            try:
                self._collectors[name].add(Call(call.site, call.member, call.rows, 0))
            except RefreshError as error:  # a training step must not fail for it
                self._broken = str(error)
        if call.gradients is None:
            self._blind.add(call.site.name)
            return
        before = self._step_outputs.get(call.site.name)
        gram = None if before is None else before.gram
        for part, D in zip(call.parts, call.gradients, strict=True):
            more = gradient_gram(D)
            more = more if part.weight == 1 else more.mul_(part.weight)
            gram = more if gram is None else gram.add_(more)
        assert gram is not None
        rows = sum(D.shape[1] for D in call.gradients) if call.rows is not None else 0
        parts = frozenset(part.name for part in call.parts)
        if before is not None:
            rows, parts = rows + before.rows, parts | before.parts
        self._step_outputs[call.site.name] = _Outputs(gram, rows, parts)

    def drop_window(self) -> None:
        """Forget the window, because a step of it was not made."""
        self._clear()
        self._step_outputs = {}

    def end_step(
        self,
        examples: Mapping[str, int],
        parts: Sequence[Origin],
        scale: float = 1.0,
        own: Mapping[str, int] | None = None,
    ) -> None:
        """Take note of the end of a step.

        Args:
            examples: of the step, by part; none if it was not looked at.
            parts: with their weights.
            scale: what the loss was multiplied with, as mixed precision does it.
            own: examples of this process, by part; None for all of them.
        """
        self.steps += 1
        outputs, self._step_outputs = self._step_outputs, {}
        if not examples:
            return
        self.looked += 1
        self.in_window += 1
        weights = {part.name: part.weight for part in parts}
        own = examples if own is None else own
        self._own += sum(own.values())
        for name, n in examples.items():
            self._examples[name] += n
            self._weighted[name] += n * weights[name]
        total = sum(n * weights[name] for name, n in examples.items())
        N = 1 if self.per_example else sum(examples.values())
        self._add_outputs(outputs, N**2 / (total * scale**2), own)

    def _add_outputs(
        self, outputs: Mapping[str, _Outputs], factor: float, own: Mapping[str, int]
    ) -> None:
        """``B`` of a step, unless a gradient is not finite."""
        if not outputs:
            return
        traces = [one.gram.diagonal(dim1=1, dim2=2).sum() for one in outputs.values()]
        if not math.isfinite(float(torch.stack([t.double().cpu() for t in traces]).sum())):
            return
        for site, one in outputs.items():
            positions = one.rows / sum(own[part] for part in one.parts)
            B = one.gram * (factor / positions)
            before, steps = self._B.get(site, (None, 0))
            self._B[site] = (B if before is None else grown(before, B) + B, steps + 1)

    def finish(self) -> tuple[dict[str, Statistic | Sketch], dict[str, str]]:
        """The statistics of the window by site, and why a site has none; a new window begins.

        Raises:
            RefreshError: some rows are not finite; the window is let go.
        """
        broken, collectors = self._broken, [*self._collectors.items(), *self._carried]
        examples, weighted, blind = self._examples, self._weighted, self._blind
        own, B = self._own, self._B
        self._clear()
        if broken is not None:
            raise RefreshError(broken)
        parts = [(name, one.finish(examples.get(name, own))) for name, one in collectors]
        n, total = sum(examples.values()), sum(weighted.values())
        self.mean_weight = total / n
        joined: dict[str, Statistic | Sketch] = {}
        for name, statistics in parts:
            inside = name == TOGETHER  # the weights are
            share = n / total if inside else weighted[name] / examples[name] * n / total
            for site, one in statistics.items():
                before: Any = joined.get(site)
                if before is None and share == 1.0:
                    joined[site] = one
                elif before is None:
                    joined[site] = one.plus(share, None, 1.0)
                else:
                    one, before = alike(one, before)
                    if one.fits(before):
                        joined[site] = one.plus(share, before, 1.0)
        skipped = {site: why for _, one in collectors for site, why in one.skipped.items()}
        for site, statistic in joined.items():
            joined[site] = replace(statistic, samples=own)
            if isinstance(statistic, Statistic | FewRows) and site in B and site not in blind:
                sums, steps = B[site]
                joined[site] = replace(statistic, samples=own, H=sums * (n / steps))
        return joined, skipped

    def state(self) -> dict[str, Any]:
        """Everything that decides what happens next, between two steps."""
        return {
            "steps": self.steps,
            "looked": self.looked,
            "in_window": self.in_window,
            "mean_weight": self.mean_weight,
            "collectors": {name: one.state() for name, one in self._collectors.items()},
            "carried": [[name, one.state()] for name, one in self._carried],
            "own": self._own,
            "examples": dict(self._examples),
            "weighted": dict(self._weighted),
            "B": {name: list(two) for name, two in self._B.items()},
            "blind": sorted(self._blind),
            "broken": self._broken,
        }

    def load_state(self, states: Sequence[Mapping[str, Any]], sites: Mapping[str, Site]) -> None:
        """Go on from what `state` gave, in one process or several that this one goes on for."""
        state, *others = states
        self._clear()
        self._step_outputs = {}
        self.steps, self.looked = state["steps"], state["looked"]
        self.in_window, self.mean_weight = state["in_window"], state["mean_weight"]
        self._collectors = dict(self._loaded(state["collectors"].items(), sites))
        self._examples.update(state["examples"])
        self._weighted.update(state["weighted"])
        for one in states:
            self._own += one.get("own", sum(state["examples"].values()))
            self._carried += self._loaded(one.get("carried", ()), sites)
            for name, (B, steps) in one["B"].items():
                before = self._B.get(name)
                self._B[name] = (B if before is None else grown(before[0], B) + B, steps)
            self._blind |= set(one["blind"])
            self._broken = self._broken or one["broken"]
        for one in others:
            self._carried += self._loaded(one["collectors"].items(), sites)

    def _loaded(
        self, states: Iterable[tuple[str, Mapping[str, Any]]], sites: Mapping[str, Site]
    ) -> Iterator[tuple[str, GramCollector]]:
        for name, state in states:
            collector = GramCollector(self.max_dim, sketch=self.sketch, wait=True)
            collector.load_state(state, sites)
            yield name, collector


def without_sums(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with the counts of a window, of a process that has added nothing to it."""
    nothing = {"collectors": {}, "carried": [], "own": 0, "B": {}, "blind": [], "broken": None}
    return {**state, **nothing}
