"""Where a model can be treated: its linear maps, their parameters, and what is left alone and why.

A `Site` is one linear map with the parameters it trains, held by name, because a growing head
replaces its Parameter objects. Modules that share a weight share a site: their rows add up.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from proxreplay.errors import InputError
from proxreplay.proximal.layers import bags as _bags  # noqa: F401  (fills the registry)
from proxreplay.proximal.layers import recurrent as _recurrent  # noqa: F401  (so does this)
from proxreplay.proximal.layers import torch_layers as _torch_layers  # noqa: F401  (and this)
from proxreplay.proximal.layers.registry import (
    Layer,
    LinearMap,
    Part,
    RowsFunction,
    find_layer,
    overriding,
)
from proxreplay.proximal.layers.selection import Selector, join, selected

BARE = "Parameter"


@dataclass(frozen=True)
class Column:
    """A trained part of a parameter, by the name of its module."""

    module: str
    part: Part

    @cached_property
    def name(self) -> str:
        """The parameter's name in the model."""
        return join(self.module, self.part.parameter)

    @cached_property
    def _path(self) -> tuple[tuple[str, ...], str]:
        *modules, own = self.name.split(".")
        return tuple(modules), own

    def parameter(self, model: nn.Module) -> nn.Parameter:
        """The parameter as it is now: ``model.get_parameter(name)``, which costs five times more.

        It is asked for in every step, and growing heads replace it, so it cannot be kept.
        """
        modules, own = self._path
        module: nn.Module | None = model
        for name in modules:
            module = None if module is None else module._modules.get(name)
        parameter = None if module is None else module._parameters.get(own)
        if parameter is None:
            raise AttributeError(f"the model has no parameter '{self.name}' any more.")
        return parameter


@dataclass(frozen=True)
class Member:
    """A linear map of a module that reads the site's weight."""

    module: str  # name of the module
    map: str  # name of the map inside it, "" where there is one only
    bias: int | None  # which of the site's biases it adds; None for none that is trained
    lookup: bool = False  # it picks rows of the weight, as an Embedding does


@dataclass(frozen=True)
class Site:
    """One linear map ``[weight | biases]`` of a model and who uses it."""

    name: str  # of the first module that uses it, with the map's name where it has several
    kind: str  # that module's type
    weight: Column | None  # None if it is not trained
    # the trained ones; more than one only if modules share the weight but not the bias
    biases: tuple[Column, ...]
    members: tuple[Member, ...]  # the maps whose rows add up here

    @property
    def columns(self) -> tuple[Column, ...]:
        """Weight and biases in the order of the columns of ``Z``."""
        return self.biases if self.weight is None else (self.weight, *self.biases)

    @property
    def bare(self) -> bool:
        """Whether it is a parameter that no layer holds, see `bare`."""
        return self.kind == BARE

    @property
    def mixed(self) -> bool:
        """Whether some members multiply with the weight and others pick rows of it."""
        return len({member.lookup for member in self.members}) > 1

    def module(self, model: nn.Module) -> nn.Module:
        """The first module that uses it."""
        return model.get_submodule(self.members[0].module)

    def out(self, model: nn.Module, d: int) -> int:
        """Rows of the first parameter, if the weight has ``d`` columns."""
        return self.columns[0].parameter(model).numel() // (1 if self.weight is None else d)

    def width(self, d: int) -> int:
        """``D``: columns of ``Z`` with those of the biases, if the weight has ``d``."""
        return d * (self.weight is not None) + len(self.biases)

    def widths(self, width: int) -> list[int]:
        """The columns of every parameter, if there are ``width`` in all."""
        ones = [1] * len(self.biases)
        return ones if self.weight is None else [width - len(ones), *ones]

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}'"


def members_by_module(sites: Iterable[Site]) -> dict[str, list[tuple[Site, Member]]]:
    """Whose calls bring rows, by the name of the module; bare parameters have none."""
    found: defaultdict[str, list[tuple[Site, Member]]] = defaultdict(list)
    for site in sites:
        for member in () if site.bare else site.members:
            found[member.module].append((site, member))
    return found


@dataclass(frozen=True)
class Survey:
    """What `find_sites` found: sites by name, and why other trained parameters have none."""

    sites: dict[str, Site] = field(default_factory=dict)
    untreated: dict[str, str] = field(default_factory=dict)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile`` and (Distributed)DataParallel, whose names are plain."""
    if not isinstance(model, nn.Module):
        raise InputError(f"the model of a rule is {model!r:.80}; give a torch.nn.Module.")
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        inner = model.module if isinstance(model, parallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def check_materialised(model: nn.Module, rule: str) -> None:
    """Refuse models whose parameters do not exist yet, or not as a whole."""
    check_whole(model, rule)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise InputError(
                f"{rule}: '{name}' is not initialised yet (a lazy module); call the model once on "
                "an example before."
            )
        if tensor.is_meta:
            raise InputError(
                f"{rule}: '{name}' is on the meta device; move the model to a real device with "
                "to_empty() and load its weights before."
            )


def check_whole(model: nn.Module, who: str) -> None:
    """Refuse models whose parameters lie in pieces in several processes."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):  # without an import that takes its time
            raise InputError(
                f"{who}: '{name}' is a {type(parameter).__name__}, of which this process holds a "
                "piece (FSDP, tensor parallelism); use DistributedDataParallel, where every one "
                "holds all of it."
            )


def find_sites(
    model: nn.Module,
    *,
    include: Collection[Selector] | None = None,
    exclude: Collection[Selector] = (),
) -> Survey:
    """Every linear map with a trained parameter, and a reason for every other trained parameter.

    Args:
        model: as `unwrap` gives it.
        include: names (a module and everything in it) or types to treat; None for all.
        exclude: names or types to leave alone.
    """
    found, untreated = _walk(model, include, exclude)
    found = _without_contested_biases(model, found, untreated)
    sharing: defaultdict[Hashable, list[_Found]] = defaultdict(list)
    for one in found:
        sharing[_identity(model, one.weight or one.bias)].append(one)
    sites = []
    for together in sharing.values():
        if not _compatible(together):
            others = ", ".join(f"{one.kind} '{one.name}'" for one in together)
            untreated |= {
                one.name: f"{others} share a weight and read it differently." for one in together
            }
        else:
            sites.append(_joined(model, together))
    return Survey({site.name: site for site in sites}, untreated)


@dataclass(frozen=True)
class _Found:
    """A linear map with a trained parameter, before maps that share a weight are joined."""

    name: str
    kind: str
    module: str
    map: str
    rows: RowsFunction
    weight: Column | None
    bias: Column | None
    lookup: bool


def _walk(
    model: nn.Module, include: Collection[Selector] | None, exclude: Collection[Selector]
) -> tuple[list[_Found], dict[str, str]]:
    """All linear maps with a trained parameter, and why other trained parameters have none."""
    found: list[_Found] = []
    untreated: dict[str, str] = {}
    spoken_for: set[str] = set()  # parameters, some in submodules that are never called themselves

    def take(one: _Found, module: nn.Module) -> None:
        if include is not None and not selected(include, one.name, module):
            untreated[one.name] = "not included."
        elif selected(exclude, one.name, module):
            untreated[one.name] = "excluded."
        else:
            found.append(one)

    for name, module in model.named_modules():
        kind = type(module).__name__
        layer, maps, why = _known(module)
        if any(_computed(module, linear_map.weight) for linear_map in maps.values()):
            maps = {}
            why = f"a weight of {kind} is computed from other parameters; it cannot be treated."
            inner = getattr(module, "parametrizations", nn.Module()).named_parameters()
            computing = {join(name, "parametrizations", key) for key, _ in inner}
            untreated |= dict.fromkeys(sorted(computing), why)
            spoken_for |= computing
        here: set[str] = set()
        for map_name, linear_map in maps.items():
            weight = _column(name, module, linear_map.weight)
            bias = _column(name, module, linear_map.bias)
            names = {column.name for column in (weight, bias) if column is not None}
            if layer is None or not names or names & spoken_for:
                continue
            here |= names
            site, lookup = join(name, map_name), linear_map.lookup
            take(_Found(site, kind, name, map_name, layer.rows, weight, bias, lookup), module)
        spoken_for |= here
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and join(name, key) not in spoken_for:
                if why is None:
                    column = Column(name, Part(key))
                    one = _Found(column.name, BARE, name, key, _no_rows, column, None, False)
                    take(one, module)
                else:
                    untreated[join(name, key)] = why
    return found, untreated


def _known(module: nn.Module) -> tuple[Layer | None, Mapping[str, LinearMap], str | None]:
    """What is registered for a module, its maps, and why it has none; no reason for bare ones."""
    why, layer = overriding(module), find_layer(module)
    if why is not None or layer is None:
        return None, {}, why
    maps = layer.maps(module)
    if isinstance(maps, str):
        return None, {}, maps
    return layer, maps, f"no linear map of {type(module).__name__} reads it."


def _no_rows(*args: object) -> Tensor:
    """Bare parameters have their rows from a `Tracer`, not from a call of a module."""
    raise NotImplementedError


def _computed(module: nn.Module, part: Part | None) -> bool:
    """Whether a tensor is there in place of a parameter, as ``weight_norm`` has it."""
    if part is None:
        return False
    value: object = module
    for name in part.parameter.split("."):
        value = getattr(value, name, None)
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def _column(name: str, module: nn.Module, part: Part | None) -> Column | None:
    """The part as a column, if its parameter exists and is trained."""
    if part is None:
        return None
    try:
        parameter = module.get_parameter(part.parameter)
    except AttributeError:  # switched off, or computed from other parameters
        return None
    return Column(name, part) if parameter.requires_grad else None


def _identity(model: nn.Module, column: Column | None) -> Hashable:
    """The same for columns that are the same numbers, whatever the name."""
    if column is None:
        return None
    part = column.part
    return id(column.parameter(model)), part.start, part.stop, part.swap


def _without_contested_biases(
    model: nn.Module, found: list[_Found], untreated: dict[str, str]
) -> list[_Found]:
    """Leave alone every bias that maps with different weights share."""
    weights_of: defaultdict[Hashable, set[Hashable]] = defaultdict(set)
    for one in found:
        weights_of[_identity(model, one.bias)].add(_identity(model, one.weight))
    kept = []
    for one in found:
        if one.bias is not None and len(weights_of[_identity(model, one.bias)]) > 1:
            untreated[one.bias.name] = "a bias shared by layers with different weights."
            one = replace(one, bias=None)
        if one.weight is not None or one.bias is not None:
            kept.append(one)
    return kept


def _compatible(sharing: list[_Found]) -> bool:
    """Whether the rows of these maps add up: all alike, besides those that only pick rows."""
    alike = {one.rows for one in sharing if not one.lookup}
    if len(alike) > 1:
        return False
    swapped = any(one.weight is not None and one.weight.part.swap for one in sharing)
    return not (alike and swapped and any(one.lookup for one in sharing))


def _joined(model: nn.Module, sharing: list[_Found]) -> Site:
    """One site for all maps that read the same weight, with those that pick rows last."""
    sharing = sorted(sharing, key=lambda one: one.lookup)
    first = sharing[0]
    biases: dict[Hashable, Column] = {}
    members = []
    for one in sharing:
        index = None
        if one.bias is not None:
            identity = _identity(model, one.bias)
            biases.setdefault(identity, one.bias)
            index = list(biases).index(identity)
        members.append(Member(one.module, one.map, index, one.lookup))
    return Site(first.name, first.kind, first.weight, tuple(biases.values()), tuple(members))
