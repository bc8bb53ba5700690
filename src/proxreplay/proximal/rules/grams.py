"""Rules that are made from the Gram matrices of examples that must not be forgotten."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import nn

from proxreplay.distributed import ALONE
from proxreplay.errors import InputError
from proxreplay.options import count
from proxreplay.proximal.layers.batches import Mask, as_batches, own_share, with_mask
from proxreplay.proximal.layers.capture import NOTHING
from proxreplay.proximal.layers.registry import RowsFunction
from proxreplay.proximal.layers.sites import Site, Survey, unwrap
from proxreplay.proximal.rules.cost import Cost, cost_of
from proxreplay.proximal.rules.layerwise import LayerOptions, LayerwiseRule, Reason, Treatment
from proxreplay.proximal.rules.sharing import cost_of_inverse, owners, shared_out
from proxreplay.proximal.shrinkage.spectral import Pace
from proxreplay.proximal.statistics.collect import Source
from proxreplay.proximal.statistics.decay import Aged, aged, decay_for
from proxreplay.proximal.statistics.sketch import Sketch
from proxreplay.proximal.statistics.statistic import Statistic
from proxreplay.proximal.statistics.summing import Collected, summed


class GramOptions(LayerOptions, total=False):
    """What every `GramRule` can be told."""

    # examples per forward pass when `refresh` is given one tensor; None for 20 to 200, depending on
    # their size
    batch_size: int | None


class StatisticOptions(GramOptions, total=False):
    """How a `GramRule` uses statistics."""

    sketch: bool  # whether it can do something with a `Sketch` of layers beyond ``max_dim``
    # rows functions to use for these types, in place of the registered ones
    instead: Mapping[type[nn.Module], RowsFunction]
    decay: float  # of the moving average of statistics over refreshes; 0 uses only the newest


class GramRule(LayerwiseRule):
    """A layerwise rule that is rebuilt from the layer inputs of remembered examples.

    Such rules differ in where their statistics come from (`Source`), how those age (``decay``), and
    how one becomes a factor (`treat`).

    Args:
        model: any module, also compiled or wrapped for data parallelism.
        batch_size: see `GramOptions`.
        sketch: see `StatisticOptions`.
        instead: see `StatisticOptions`.
        decay: see `StatisticOptions`.
        leave: further reasons for leaving a linear map alone.
        layers: see `LayerOptions`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_size: int | None = None,
        sketch: bool = False,
        instead: Mapping[type[nn.Module], RowsFunction] | None = None,
        decay: float = 0.0,
        leave: Sequence[Reason] = (),
        **layers: Unpack[LayerOptions],
    ) -> None:
        count(1, **{f"{type(self).__name__}: batch_size": batch_size})
        super().__init__(model, leave=leave, **layers)
        self.batch_size = batch_size
        self._source = Source(self.max_dim, sketch, instead or {})
        self._decay = decay
        self._history: dict[str, Aged] = {}
        self._pace = Pace()

    @abstractmethod
    def treat(self, site: Site, statistic: Statistic | Sketch) -> Treatment | str:
        """From a statistic to what gradients are multiplied with, or why they are left alone."""

    def step_(self, only: Collection[int] | None = None) -> None:
        """`precondition_` for a step that will be made, and count it."""
        super().step_(only)
        self._pace.steps += 1

    def refresh(
        self,
        examples: Any,
        of: int | None = None,
        *,
        inputs: Callable[[Any], Any] | None = None,
        mask: Mask = None,
        batch_dim: int = 0,
    ) -> None:
        """Rebuild every factor from the examples that must not be forgotten.

        The model is left without a trace. If anything goes wrong, the previous factors stay.

        Args:
            examples: a tensor or array ``[n, ...]``, a tuple of the model's arguments, a dict of
                its keyword arguments, or batches of these: a list, an iterator, a DataLoader.
            of: how many examples they were drawn from; None for many more. Only a moving average
                asks: it keeps at most ``1 - n / of`` of earlier refreshes.
            inputs: from a batch to what the model is called with, where batches hold more:
                ``refresh(loader, inputs=lambda batch: batch[0])``.
            mask: ``[n, T]``, 1 for data and 0 for padding, whose rows do not count; for batches a
                function from a batch to its mask. None for the ``attention_mask`` (and
                ``decoder_attention_mask``) of a dict, False for no mask.
            batch_dim: the dimension of the examples, for models that want another one first.
        """
        count(1, **{f"{type(self).__name__}.refresh: of": of})
        survey = self._survey()
        model, processes = unwrap(self.model), self.processes

        def collect() -> Collected:
            own, nothing = with_mask(examples, mask), not survey.sites
            if not processes.alone:
                own = own_share(own, processes if processes.replicated else ALONE, batch_dim)
                nothing = nothing or own is None
            if nothing:
                return {}, {}
            batches = as_batches(own, model, self.batch_size, batch_dim, inputs, mask)
            return self._source.collect(
                model, survey.sites, batches, batch_dim, self._verifier, self._call
            )

        statistics, left_out = summed(processes, collect, self._device)
        if survey.sites and not statistics and not left_out:
            raise InputError(NOTHING)  # in any process
        self._rebuild(survey, statistics, left_out, of)

    @torch.no_grad()
    def _rebuild(
        self,
        survey: Survey,
        statistics: dict[str, Statistic | Sketch],
        left_out: Mapping[str, str],
        of: int | None,
    ) -> None:
        """Make every factor from its statistic, which is let go as soon as that is there."""
        samples = max((one.samples for one in statistics.values()), default=0)
        history: dict[str, Aged] = {}

        def aging(name: str) -> Statistic | Sketch:
            statistic = statistics.pop(name)
            if self._decay == 0:
                return statistic
            stays = decay_for(self._decay, statistic.samples, of)
            history[name] = aged(self._history.get(name), statistic, stays)
            return history[name].instead_of(statistic)

        def made(name: str) -> Treatment | str:
            return self.treat(survey.sites[name], aging(name))

        treatments, without = self._made_together(survey, statistics, made)
        for name in list(statistics):  # whose treatment another process has made
            aging(name)
        self._put_in_force(treatments, survey.untreated | dict(left_out) | without)
        self._history = history
        self._pace.refreshed(samples)

    def _made_together(
        self,
        survey: Survey,
        statistics: Mapping[str, Statistic | Sketch],
        make: Callable[[str], Treatment | str],
    ) -> tuple[dict[str, Treatment], dict[str, str]]:
        """Treatments, and why a site has none; each process makes some and sends them."""
        made: dict[str, Treatment | str]
        if self.processes.alone:
            made = {name: make(name) for name in list(statistics)}
        else:

            def sent(name: str) -> dict[str, Any]:
                one = make(name)
                return {"why": one} if isinstance(one, str) else one.state()

            costs = {name: cost_of_inverse(one) for name, one in statistics.items()}
            makers = owners(costs, self.processes.size)
            found = shared_out(self.processes, makers, sent, self._device)
            made = {
                name: found[name].get("why")
                or Treatment.from_state(survey.sites[name], found[name], self._device)
                for name in costs
            }
        return (
            {name: one for name, one in made.items() if isinstance(one, Treatment)},
            {name: why for name, why in made.items() if isinstance(why, str)},
        )

    def cost(self, examples: Any, *, samples: int | None = None, batch_dim: int = 0) -> Cost:
        """What `refresh` and `precondition_` will cost, from one forward pass over examples.

        Args:
            examples: as for `refresh`; one example is enough.
            samples: the number of examples of the refresh; None for as many as given.
            batch_dim: the dimension of the examples.
        """
        return cost_of(
            unwrap(self.model),
            self._survey(),
            as_batches(examples, unwrap(self.model), self.batch_size, batch_dim),
            source=self._source,
            samples=samples,
            batch_dim=batch_dim,
            history=self._decay > 0,
            call=self._call,
        )

    def state_dict(self) -> dict[str, Any]:
        """What the refreshes made: tensors, numbers and strings in nested dicts."""
        history = {name: one.state() for name, one in self._history.items()}
        return super().state_dict() | ({"history": history} if history else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` of the same rule on a model of the same shape gave."""
        super().load_state_dict(state)
        saved = state.get("history", {})
        self._history = {name: Aged.from_state(one) for name, one in saved.items()}
