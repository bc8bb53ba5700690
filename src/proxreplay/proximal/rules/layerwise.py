"""Rules that multiply the gradient of every linear map with a matrix of its own."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypedDict

import torch
from torch import Tensor, nn

from proxreplay.errors import InputError
from proxreplay.options import MAX_DIM, count
from proxreplay.proximal.layers.capture import full_precision
from proxreplay.proximal.layers.selection import Selector, check_selectors
from proxreplay.proximal.layers.sites import (
    Column,
    Site,
    Survey,
    check_materialised,
    find_sites,
    unwrap,
)
from proxreplay.proximal.layers.verify import Verifier
from proxreplay.proximal.rules.base import GradientRule
from proxreplay.proximal.rules.gradients import (
    Product,
    SiteGradients,
    gradients_of,
    kinds_of,
    moving_columns,
    plan_products,
)
from proxreplay.proximal.shrinkage.forms import Shrinkage, shrinkage_from_state
from proxreplay.proximal.shrinkage.strength import AnyStrength

COLUMNS = "kernel, channel"  # the order in which states have those of a convolution

Reason = Callable[[nn.Module, Site], str | None]
"""From a model and a site of it to why a rule leaves that alone; None if it does not."""


class LayerOptions(TypedDict, total=False):
    """What every `LayerwiseRule` can be told about the layers to treat."""

    include: Collection[Selector] | None  # names (a module and all in it) or types; None for all
    exclude: Collection[Selector]  # names or types to leave alone
    max_dim: int  # linear maps with more columns are left alone and named in `untreated`


def check_options(rule: type, given: Mapping[str, object], known: Collection[str]) -> None:
    """Refuse what a rule does not offer: its base class may take it, and would in silence."""
    for name in given:
        if name not in known:
            offered = ", ".join(sorted(known))
            raise TypeError(
                f"{rule.__name__}() got an unexpected keyword argument '{name}'; beside those of "
                f"its signature it takes {offered}."
            )


@dataclass(frozen=True)
class TreatedLayer:
    """What a rule does with one linear map.

    Args:
        name: of the module, with the map's name where it holds several.
        kind: the module's type.
        parameters: whose gradients it changes, by name.
        d: columns, those of trained biases included.
        groups: independent maps of that size.
        positions: rows per example, ``n_eff`` in the paper.
        omega: the strength its rows are weighted with; None for rules that have none.
        bytes: memory of the factor.
        shared_with: other modules that use the same weight.
        share: how much of it acts at present, from 0 to 1; None for rules that act fully.
    """

    name: str
    kind: str
    parameters: tuple[str, ...]
    d: int
    groups: int
    positions: float
    omega: float | None
    bytes: int
    shared_with: tuple[str, ...] = ()
    share: float | None = None


class Layers(dict[str, TreatedLayer]):
    """Treated layers by name; printed as a table."""

    def __repr__(self) -> str:
        name = max([5, *map(len, self)])
        kind = max([4, *(len(one.kind) for one in self.values())])
        head = f"{'layer':{name}} {'type':{kind}} {'d':>6} {'groups':>6} {'positions':>9} "
        shares = any(one.share is not None for one in self.values())
        lines = [head + f"{'omega':>9} {'MB':>8}" + " share" * shares]
        for key, one in self.items():
            omega = "" if one.omega is None else f"{one.omega:.2e}"
            line = f"{key:{name}} {one.kind:{kind}} {one.d:6d} {one.groups:6d} "
            share = "" if one.share is None else f" {one.share:5.2f}"
            lines.append(line + f"{one.positions:9.1f} {omega:>9} {one.bytes / 1e6:8.3f}{share}")
        return "\n".join(lines)


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
            parameters=tuple(column.name for column in site.columns),
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
        include: see `LayerOptions`.
        exclude: see `LayerOptions`.
        max_dim: see `LayerOptions`.
        leave: further reasons for leaving a linear map alone.
    """

    _not_yet, _begin = "not refreshed yet.", "call refresh(examples) first."

    def __init__(
        self,
        model: nn.Module,
        *,
        include: Collection[Selector] | None = None,
        exclude: Collection[Selector] = (),
        max_dim: int = MAX_DIM,
        leave: Sequence[Reason] = (),
    ) -> None:
        rule = type(self).__name__
        count(1, **{f"{rule}: max_dim": max_dim})
        self.model = model
        self.include = include
        self.exclude = exclude
        self.max_dim = max_dim
        check_selectors(unwrap(model), include or (), f"{rule}(include=...)")
        check_selectors(unwrap(model), exclude, f"{rule}(exclude=...)")
        self._leave = leave
        self._verifier = Verifier()
        self._treatments: dict[str, Treatment] = {}
        self._untreated: dict[str, str] = {}
        self._columns: list[Column] = []  # of all sites, one after the other
        self._prepared: dict[tuple[str, tuple[bool, ...], torch.device], Shrinkage] = {}
        self._without: frozenset[str] = frozenset()  # sites that are multiplied elsewhere
        self._products: tuple[tuple[Hashable, ...], list[Product]] | None = None
        survey = self._survey()
        self._put_in_force({}, survey.untreated | dict.fromkeys(survey.sites, self._not_yet))

    @property
    def layers(self) -> "Layers":
        """What is treated at present, by name."""
        return Layers((name, one.described()) for name, one in self._treatments.items())

    def __repr__(self) -> str:
        options = ", ".join(
            f"{name}={value!r}"
            for name, value in vars(self).items()
            if not name.startswith("_") and isinstance(value, int | float | str | AnyStrength)
        )
        attached = "attached" if self._optimizer is not None else "not attached to an optimizer"
        lines = [f"{type(self).__name__}({options}), {attached}"]
        lines += [] if self.processes.alone else [self.processes.described()]
        lines += [repr(self.layers)] if self._treatments else []
        lines += [
            f"left alone: {name or 'the model itself'}: {why}"
            for name, why in self._untreated.items()
        ]
        return "\n".join(lines)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_prepared": {}, "_products": None}

    def idle(self) -> str | None:
        """What to do if nothing is known yet."""
        return self._begin if self._not_yet in self._untreated.values() else None

    @property
    def untreated(self) -> dict[str, str]:
        """Modules and parameters that are trained but left alone, with the reason."""
        return dict(self._untreated)

    def shrinkage(self, name: str) -> Shrinkage:
        """``Lambda`` of one of the `layers`, by its name."""
        return self._treatments[name].factor

    @torch.no_grad()
    def precondition_(self, only: Collection[int] | None = None) -> None:
        """``G <- G Lambda`` for every layer that has a gradient and a factor."""
        if self._optimizer is None:
            self._say_if_idle()
        gradients = gradients_of(unwrap(self.model), self._columns, only)
        kinds = (*kinds_of(gradients), self._without)
        if self._products is None or self._products[0] != kinds:
            self._products = (kinds, self._plan_products(gradients))
        with full_precision():
            for product in self._products[1]:
                product(gradients)

    def _plan_products(self, gradients: Sequence[Tensor | None]) -> list[Product]:
        """What to do with gradients like these."""
        sites = []
        first = 0
        for name, treatment in self._treatments.items():
            own = gradients[first : first + len(treatment.site.columns)]
            moving = tuple(gradient is not None for gradient in own)
            if any(moving) and name not in self._without:
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

    @property
    def _device(self) -> torch.device:
        """Where sites are that this process knows nothing of."""
        return next(unwrap(self.model).parameters()).device

    def _survey(self) -> Survey:
        model = unwrap(self.model)
        check_materialised(model, type(self).__name__)
        survey = find_sites(model, include=self.include, exclude=self.exclude)
        found = {
            name: reason
            for name, site in survey.sites.items()
            for reason in [next(filter(None, (why(model, site) for why in self._leave)), None)]
            if reason is not None
        }
        sites = {name: site for name, site in survey.sites.items() if name not in found}
        return Survey(sites, survey.untreated | dict(sorted(found.items())))

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
