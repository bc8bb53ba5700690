"""A rule that is refreshed on a schedule inside somebody else's training loop.

What every callback does: make the rule, attach it to the optimizer, refresh it every so many steps
from a memory or a loader, and hand on its state. A callback only says when.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from proxreplay.batch import each, with_tensors
from proxreplay.errors import InputError
from proxreplay.options import CallbackOptions
from proxreplay.proximal import LPR, GramRule
from proxreplay.proximal.layers.batches import Mask, count_samples
from proxreplay.proximal.layers.sites import unwrap
from proxreplay.replay import Memory
from proxreplay.seeding import generator


class Refreshing:
    """A rule for a model and an optimizer, refreshed from examples that must not be forgotten.

    Args:
        source: a `Memory`, batches (a loader, a list), one tensor or dict of examples, or a
            function without arguments that gives one of these. An empty memory is waited for.
        every: optimizer steps between refreshes; the first comes before the first step.
        samples: how many examples of the source a refresh takes; None for all.
        rule: from the model to its rule.
        inputs: from a batch to what the model is called with, as for `GramRule.refresh`.
        mask: which places are data, as for `GramRule.refresh`.
        seed: of the examples that are drawn.
    """

    def __init__(
        self,
        source: Any,
        every: int = CallbackOptions.every,
        *,
        samples: int | None = CallbackOptions.samples,
        rule: Callable[[Any], GramRule] = LPR,
        inputs: Callable[[Any], Any] | None = None,
        mask: Mask = None,
        seed: int = 0,
    ) -> None:
        CallbackOptions(every, samples)  # refuses what makes no sense
        self.source = source
        self.every = every
        self.samples = samples
        self.rule: GramRule | None = None
        self._make = rule
        self._inputs = inputs
        self._mask = mask
        self._generator = generator(seed, "refresh")
        self._model: nn.Module | None = None
        self._refreshed_at: int | None = None
        self._waiting: Mapping[str, Any] | None = None

    def begin(self, model: nn.Module, optimizer: Optimizer) -> GramRule:
        """Make the rule, or keep the one there is for this model; attach it to the optimizer."""
        if self.rule is None or self._model is not unwrap(model):
            made = self._make(unwrap(model))
            if not isinstance(made, GramRule):
                raise InputError(
                    f"rule=... gave a {type(made).__name__}; give a function from a model to a "
                    "rule that is refreshed, such as LPR."
                )
            self.rule, self._model = made, unwrap(model)
        if self._waiting is None:
            self._refreshed_at = None  # steps are counted anew
        else:
            self._take(self._waiting)
        self.rule.attach(optimizer)
        return self.rule

    def before_step(self, step: int) -> bool:
        """Refresh if that is due after ``step`` optimizer steps; asking again does nothing."""
        due = self._refreshed_at is None or step - self._refreshed_at >= self.every
        if self.rule is None or not due:
            return False
        with torch.random.fork_rng(devices=[]):  # a loader that shuffles draws from the global one
            torch.manual_seed(int(torch.randint(2**62, (), generator=self._generator)))
            examples, of = self._examples()
            if examples is None:
                return False
            self.rule.refresh(examples, of, inputs=self._inputs, mask=self._mask)
        self._refreshed_at = step
        return True

    def end(self) -> None:
        """Detach the rule; it is attached again by the next `begin`."""
        if self.rule is not None:
            self.rule.detach()

    def state_dict(self) -> dict[str, Any]:
        """Rule, schedule, draws, and the memory, if that is the source."""
        state: dict[str, Any] = {
            "refreshed_at": self._refreshed_at,
            "generator": self._generator.get_state(),
        }
        if self.rule is not None:
            state["rule"] = self.rule.state_dict()
        if isinstance(self.source, Memory):
            state["memory"] = self.source.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state: at once, or when the model is there."""
        self._waiting = state
        if self.rule is not None:
            self._take(state)

    def _take(self, state: Mapping[str, Any]) -> None:
        if "rule" in state and self.rule is not None:
            self.rule.load_state_dict(state["rule"])
        if "memory" in state and isinstance(self.source, Memory):
            self.source.load_state_dict(dict(state["memory"]))
        self._generator.set_state(state["generator"].cpu())
        self._refreshed_at = state["refreshed_at"]
        self._waiting = None

    def _examples(self) -> tuple[Any, int | None]:
        """What to refresh from, on the model's device, and how many it was drawn from."""
        assert self._model is not None
        source = self.source() if callable(self.source) else self.source
        device = next(self._model.parameters()).device
        to_device = partial(Tensor.to, device=device)
        if isinstance(source, Memory):
            if len(source) == 0:
                return None, None
            few = self.samples is not None and self.samples < len(source)
            drawn = source.inputs(self.samples if few else None, self._generator)
            return each(drawn, to_device), len(source)
        if isinstance(source, Tensor | np.ndarray | tuple | Mapping):
            return with_tensors(source, to_device), None
        return (with_tensors(batch, to_device) for batch in self._first(iter(source))), None

    def _first(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Batches until there are as many examples as wanted."""
        seen = 0
        for batch in batches:
            if self.samples is not None and seen >= self.samples:
                return
            seen += count_samples(tuple(batch) if isinstance(batch, list) else batch)
            yield batch
