"""What rules share.

`GradientRule` is any rule, `LayerwiseRule` one that multiplies gradients layer by layer, `GramRule`
one of those that is rebuilt from the layer inputs of remembered examples.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from proxreplay.batch import Batch
from proxreplay.errors import InputError
from proxreplay.proximal.layers.capture import as_batches, full_precision
from proxreplay.proximal.layers.registry import RowsFunction
from proxreplay.proximal.layers.selection import Selector, check_selectors
from proxreplay.proximal.layers.sites import (
    Column,
    Site,
    Survey,
    check_materialised,
    find_sites,
    unwrap,
)
from proxreplay.proximal.rules.cost import Plan, make_plan
from proxreplay.proximal.rules.gradients import (
    Product,
    SiteGradients,
    gradients_of,
    kinds_of,
    moving_columns,
    plan_products,
)
from proxreplay.proximal.shrinkage.forms import Shrinkage, shrinkage_from_state
from proxreplay.proximal.statistics.collect import GramCollector, Statistic, collect
from proxreplay.proximal.statistics.sketch import Sketch

COLUMNS = "kernel, channel"  # the order in which states have those of a convolution


class GradientRule(ABC):
    """Changes gradients between the backward pass and the optimizer's step.

    The only interface between rules and whoever trains: a loop of your own by `attach`, `Learner`
    by `observe`, `step_` and `refresh`, diagnostics by `precondition_`. Public attributes are a
    rule's options; what it has learned is private and in `state_dict`.
    """

    reference_samples: int | None = 0
    """Remembered examples that `observe` asks for; None for those that the loss replays."""

    _handle: RemovableHandle | None = None

    @abstractmethod
    def refresh(self, inputs: Any, of: int | None = None) -> None:
        """Rebuild from inputs that must not be forgotten; nothing for rules that only observe.

        Args:
            inputs: as the model sees them.
            of: how many examples they were drawn from; None for many more.
        """

    def observe(self, incoming: Batch, reference: Batch | None = None) -> None:
        """See the data of a step after its backward pass; most rules do not look.

        Args:
            incoming: the stream batch as the model sees it.
            reference: `reference_samples` remembered examples; None if there are none.
        """
        return None

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings that decide what happens next."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""

    @abstractmethod
    def precondition_(self, only: Collection[int] | None = None) -> None:
        """Change the gradients where they are. It may be called any number of times.

        Args:
            only: ids of the parameters to treat as moving; None for all that have a gradient.
        """

    def step_(self, only: Collection[int] | None = None) -> None:
        """`precondition_` for a step that will be made; call it once before each step."""
        self.precondition_(only)

    def attach(self, optimizer: Optimizer) -> Self:
        """Precondition inside every ``optimizer.step()`` from now on, or until `detach`.

        Only parameters of that optimizer are touched. A closure given to ``step`` is wrapped, so
        that the gradients it makes are preconditioned too.
        """
        if self._handle is not None:
            raise InputError(
                f"{type(self).__name__}.attach: attached already; detach() first. For several "
                "optimizers, call step_() once before their steps."
            )

        def before_step(
            optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            return self._before_step(optimizer, args, kwargs)

        self._handle = optimizer.register_step_pre_hook(before_step)
        return self

    def detach(self) -> None:
        """Undo `attach`; nothing happens if it was not attached."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Precondition now, or after the closure has made the gradients."""
        only = {id(p) for group in optimizer.param_groups for p in group["params"]}

        def then_precondition(closure: Callable[[], Any]) -> Callable[[], Any]:
            def wrapped() -> Any:
                loss = closure()
                self.step_(only)
                return loss

            return wrapped

        itself, *rest = args  # torch hands the optimizer on as the first argument of step
        if rest and callable(rest[0]):
            return (itself, then_precondition(rest[0]), *rest[1:]), kwargs
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": then_precondition(kwargs["closure"])}
        self.step_(only)
        return None


@dataclass(frozen=True)
class TreatedLayer:
    """What a rule does with one linear map.

    Args:
        name: of the module, with the map's name where it holds several.
        kind: the module's type.
        d: columns, those of trained biases included.
        groups: independent maps of that size.
        positions: rows an example, ``n_eff`` in the paper.
        omega: the strength its rows are weighted with; None for rules that have none.
        bytes: memory of the factor.
        shared_with: other modules that use the same weight.
    """

    name: str
    kind: str
    d: int
    groups: int
    positions: float
    omega: float | None
    bytes: int
    shared_with: tuple[str, ...] = ()


@dataclass(frozen=True)
class Treatment:
    """A site with the factor its gradients are multiplied with, and what that was made from."""

    site: Site
    factor: Shrinkage
    positions: float
    omega: float | None = None

    def state(self) -> dict[str, Any]:
        """Tensors, numbers and strings, from which `from_state` makes it again."""
        strength = {} if self.omega is None else {"omega": self.omega}
        return {
            "parameters": [column.name for column in self.site.columns],
            "factor": self.factor.state(),
            "positions": self.positions,
            **strength,
        }

    @classmethod
    def from_state(cls, site: Site, state: Mapping[str, Any], device: torch.device) -> Self:
        """The treatment that `state` was taken from."""
        factor = shrinkage_from_state(state["factor"]).to(device)
        return cls(site, factor, state["positions"], state.get("omega"))

    def described(self) -> TreatedLayer:
        """For people to read."""
        site, factor = self.site, self.factor
        return TreatedLayer(
            name=site.name,
            kind=site.kind,
            d=factor.width,
            groups=factor.groups,
            positions=self.positions,
            omega=self.omega,
            bytes=factor.bytes,
            shared_with=tuple(member.module for member in site.members[1:]),
        )


class LayerwiseRule(GradientRule):
    """A rule that multiplies the gradient of every linear map with a matrix of its own.

    Where that matrix comes from is what its subclasses add.

    Args:
        model: any module, also compiled or wrapped for data parallelism.
        include: names (a module and everything in it) or types to treat; None for all.
        exclude: names or types to leave alone.
        max_dim: linear maps with more columns are left alone and named in `untreated`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        include: Collection[Selector] | None = None,
        exclude: Collection[Selector] = (),
        max_dim: int = 8192,
    ) -> None:
        rule = type(self).__name__
        check_counts(rule, max_dim=max_dim)
        self.model = model
        self.include = include
        self.exclude = exclude
        self.max_dim = max_dim
        check_materialised(model, rule)
        check_selectors(unwrap(model), include or (), f"{rule}(include=...)")
        check_selectors(unwrap(model), exclude, f"{rule}(exclude=...)")
        self._treatments: dict[str, Treatment] = {}
        self._untreated: dict[str, str] = {}
        self._columns: list[Column] = []  # of all sites, one after the other
        self._prepared: dict[tuple[str, tuple[bool, ...], torch.device], Shrinkage] = {}
        self._products: tuple[tuple[Hashable, ...], list[Product]] | None = None
        self._put_in_force({}, self._survey().untreated)

    @property
    def layers(self) -> dict[str, TreatedLayer]:
        """What is treated at present, by name."""
        return {name: one.described() for name, one in self._treatments.items()}

    @property
    def untreated(self) -> dict[str, str]:
        """Modules and parameters that are trained but left alone, with the reason."""
        return dict(self._untreated)

    @torch.no_grad()
    def precondition_(self, only: Collection[int] | None = None) -> None:
        """``G <- G Lambda`` for every layer that has a gradient and a factor.

        Args:
            only: ids of the parameters to treat as moving; None for all that have a gradient.
        """
        gradients = gradients_of(unwrap(self.model), self._columns, only)
        kinds = kinds_of(gradients)
        if self._products is None or self._products[0] != kinds:
            self._products = (kinds, self._plan_products(gradients))
        with full_precision():
            for product in self._products[1]:
                product.multiply_(gradients)

    def _plan_products(self, gradients: Sequence[Tensor | None]) -> list[Product]:
        """What to do with gradients like these."""
        sites = []
        first = 0
        for name, treatment in self._treatments.items():
            own = gradients[first : first + len(treatment.site.columns)]
            moving = tuple(gradient is not None for gradient in own)
            if any(moving):
                factor = self._factor(name, moving, own)
                sites.append(SiteGradients(treatment.site, first, factor, treatment.factor.width))
            first += len(own)
        return plan_products(sites, gradients)

    def _factor(
        self, name: str, moving: tuple[bool, ...], gradients: Sequence[Tensor | None]
    ) -> Shrinkage:
        """The factor for the parameters that move, on their device.

        A parameter without a gradient stays where it is, so the problem is that of the others
        alone: the metric is restricted to their columns before it is inverted.
        """
        site, factor = self._treatments[name].site, self._treatments[name].factor
        device = next(gradient.device for gradient in gradients if gradient is not None)
        if (name, moving, device) not in self._prepared:
            if not all(moving):
                factor = factor.restricted(moving_columns(site, gradients, factor.width))
            self._prepared[name, moving, device] = factor.to(device)
        return self._prepared[name, moving, device]

    def _put_in_force(self, treatments: dict[str, Treatment], untreated: dict[str, str]) -> None:
        self._treatments, self._untreated = treatments, untreated
        self._columns = [column for one in treatments.values() for column in one.site.columns]
        self._prepared = {}
        self._products = None

    def _survey(self) -> Survey:
        return find_sites(unwrap(self.model), include=self.include, exclude=self.exclude)

    def state_dict(self) -> dict[str, Any]:
        """What the last refresh made: tensors, numbers and strings in nested dicts."""
        return {
            "rule": type(self).__name__,
            "columns": COLUMNS,
            "layers": {name: one.state() for name, one in self._treatments.items()},
            "untreated": dict(self._untreated),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` of the same rule on a model of the same shape gave."""
        rule = type(self).__name__
        if state["rule"] != rule:
            raise InputError(f"{rule}.load_state_dict: this is the state of {state['rule']}.")
        if state.get("columns") != COLUMNS:
            raise InputError(
                f"{rule}.load_state_dict: this state is of an earlier version, with the columns of "
                "convolutions in another order; go on with that version, or refresh anew."
            )
        sites = self._survey().sites
        treatments = {}
        for name, one in state["layers"].items():
            trained = [column.name for column in sites[name].columns] if name in sites else []
            if one["parameters"] != trained:
                raise InputError(
                    f"{rule}.load_state_dict: '{name}' has factors for {one['parameters']}, but "
                    f"the model trains {trained} there; build and freeze it as it was saved."
                )
            device = sites[name].columns[0].parameter(unwrap(self.model)).device
            treatments[name] = Treatment.from_state(sites[name], one, device)
        self._put_in_force(treatments, dict(state["untreated"]))


class GramRule(LayerwiseRule):
    """A layerwise rule that is made anew from the Gram matrices of remembered examples.

    What differs between such rules is `_treat`: from a site's statistic to its factor. A rule that
    can work with a `Sketch` where ``d > max_dim`` says so by ``_sketches`` and `_treat_sketch`; one
    that heeds ``Statistic.picked`` (an Embedding with the weight of a Linear) by ``_tied``.

    Args:
        model: any module, also compiled or wrapped for data parallelism.
        batch_size: examples a forward pass when `refresh` is given one tensor; None for 20 to 200,
            depending on their size.
        include: names (a module and everything in it) or types to treat; None for all.
        exclude: names or types to leave alone.
        max_dim: linear maps with more columns are left alone and named in `untreated`.
    """

    _sketches = False
    _tied = False

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_size: int | None = None,
        include: Collection[Selector] | None = None,
        exclude: Collection[Selector] = (),
        max_dim: int = 8192,
    ) -> None:
        check_counts(type(self).__name__, batch_size=1 if batch_size is None else batch_size)
        super().__init__(model, include=include, exclude=exclude, max_dim=max_dim)
        self.batch_size = batch_size

    @abstractmethod
    def _treat(self, site: Site, statistic: Statistic) -> Treatment:
        """From a site's statistic to what its gradients are multiplied with."""

    def _treat_sketch(self, site: Site, sketch: Sketch) -> Treatment | str:
        """The same where ``d > max_dim``, or the reason for leaving the layer alone."""
        return f"d = {sketch.B.shape[2]} is more than max_dim = {self.max_dim}."

    def _made_from(self, site: Site, statistic: Statistic | Sketch) -> Treatment | str:
        if isinstance(statistic, Sketch):
            return self._treat_sketch(site, statistic)
        if statistic.picked is not None and not self._tied:
            return f"an Embedding shares its weight, which {type(self).__name__} cannot treat."
        return self._treat(site, statistic)

    def refresh(
        self, inputs: Tensor | Iterable[Any], of: int | None = None, *, batch_dim: int = 0
    ) -> None:
        """Rebuild every factor from the examples that must not be forgotten.

        The model is left without a trace. If anything goes wrong, the previous factors stay.

        Args:
            inputs: a tensor ``[n, ...]``, or an iterable of batches the model can be called with:
                tensors, tuples of arguments or dicts of keyword arguments.
            of: how many examples they were drawn from; only a rolling LPR asks.
            batch_dim: the dimension of the examples, for models that want another one first.
        """
        survey = self._survey()
        if not survey.sites:
            self._put_in_force({}, survey.untreated)
            return
        batches = as_batches(inputs, self.batch_size, batch_dim)
        statistics, left_out = collect(
            unwrap(self.model),
            survey.sites,
            batches,
            GramCollector(self.max_dim, sketch=self._sketches),
            batch_dim=batch_dim,
            instead=self._rows_instead(),
        )
        treatments = {}
        with torch.no_grad():
            for name in list(statistics):  # each is let go as soon as its factor is there
                statistic = self._over_time(name, statistics.pop(name))
                made = self._made_from(survey.sites[name], statistic)
                if isinstance(made, Treatment):
                    treatments[name] = made
                else:
                    left_out[name] = made
        self._put_in_force(treatments, survey.untreated | left_out)

    def plan(
        self,
        example_inputs: Tensor | Iterable[Any],
        *,
        samples: int | None = None,
        batch_dim: int = 0,
    ) -> Plan:
        """What `refresh` and `precondition_` will cost, from one forward pass over examples.

        Args:
            example_inputs: as for `refresh`; one example is enough.
            samples: the number of examples of the refresh to plan for; None for as many as given.
            batch_dim: the dimension of the examples.
        """
        batches = as_batches(example_inputs, self.batch_size, batch_dim)
        return make_plan(
            unwrap(self.model),
            self._survey(),
            batches,
            max_dim=self.max_dim,
            sketch=self._sketches,
            samples=samples,
            batch_dim=batch_dim,
            history=self._remembers,
        )

    @property
    def _remembers(self) -> bool:
        """Whether statistics of earlier refreshes are kept."""
        return False

    def _over_time(self, name: str, statistic: Statistic | Sketch) -> Statistic | Sketch:
        """What a site's factor is made from, given the statistic of this refresh alone."""
        return statistic

    def _rows_instead(self) -> Mapping[type[nn.Module], RowsFunction]:
        """Rows functions that take the place of the registered ones."""
        return {}


def check_counts(rule: str, **counts: int) -> None:
    """Refuse counts below 1."""
    for name, value in counts.items():
        if value < 1:
            raise InputError(f"{rule}: {name}={value}; give at least 1.")
