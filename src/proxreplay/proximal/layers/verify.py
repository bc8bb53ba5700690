"""Whether a rows function tells the truth: ``W z`` must reproduce what the module really puts out.

Put a map's trained parameters at 0, then at random values ``D``: the output of a layer that is
linear in them changes by ``D z``, in whatever order it is laid out. So the squared norm of that
change must be the sum of ``||D z||^2`` over the rows.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from proxreplay.proximal.gram.rows import Rows
from proxreplay.proximal.layers.registry import RowsFunction, rows_by_map
from proxreplay.proximal.layers.sites import Column, Member, Site

DRAWS = 3  # of D: one alone may agree by chance
FEW = 2  # leading entries of a call's tensors that are looked at
SMALL = 0.01  # size of D, so that an Embedding with max_norm is not scaled down
TOLERANCE, HALF_TOLERANCE = 0.02, 0.1  # relative; the second for half precision

LayerCall = tuple[nn.Module, Sequence[Any], Mapping[str, Any]]  # a module with its arguments


class Verifier:
    """Looks at every layer of one map the first time that it is called.

    Layers of several maps (attention) and those that put out more than a tensor are trusted, and so
    are classes that say ``treated_as``.
    """

    def __init__(self) -> None:
        self.wrong: dict[str, str] = {}
        self._seen: set[tuple[str, RowsFunction]] = set()
        self._warned: set[str] = set()

    def __reduce__(self) -> tuple[type["Verifier"], tuple[()]]:
        return Verifier, ()  # a copy looks again

    def knows(self, module: nn.Module, member: Member, function: RowsFunction) -> bool:
        """Whether `trusts` has nothing to look at."""
        key = (member.module, function)
        return bool(member.map) or key in self._seen or hasattr(type(module), "treated_as")

    def trusts(
        self,
        model: nn.Module,
        site: Site,
        member: Member,
        function: RowsFunction,
        call: LayerCall,
    ) -> bool:
        """Whether the rows of a call may be used; if not, `wrong` has the reason."""
        module, args, kwargs = call
        if self.knows(module, member, function):
            return True
        try:
            few = module, *_few(args, kwargs)
            found = reproduces(model, site, member, function, few)
        except Exception:  # it may want all of its input, as the model gave it
            found = reproduces(model, site, member, function, call)
        if found:
            self._seen.add((member.module, function))
        if found is not False:
            return True
        kind = type(module).__name__
        self.wrong[site.name] = (
            f"the rows registered for {kind} do not reproduce its output; teach it with "
            f"register_layer({kind})."
        )
        if site.name not in self._warned:
            self._warned.add(site.name)
            warnings.warn(f"{site} is left alone: {self.wrong[site.name]}", stacklevel=2)
        return False


def reproduces(
    model: nn.Module, site: Site, member: Member, function: RowsFunction, call: LayerCall
) -> bool | None:
    """Whether the rows of a call explain what the module puts out.

    None if that is not finite: whoever sums the rows refuses them.
    """
    module, args, kwargs = call
    rows = rows_by_map(function(module, *args, **kwargs))[""]
    bias = None if member.bias is None else site.biases[member.bias]
    columns = [column for column in (site.weight, bias) if column is not None]
    if not all(column.part.whole for column in columns):
        return True
    rng = torch.Generator().manual_seed(0)
    half = columns[0].parameter(model).dtype.itemsize < 4
    for _ in range(DRAWS):
        D = {c: torch.randn(c.parameter(model).shape, generator=rng) * SMALL for c in columns}
        if member.lookup and site.weight is not None:  # a padding token passes no gradient
            D[site.weight][rows.gram()[:, 0, 0].cpu() == 0] = 0
        outputs = []
        for scale in (0.0, 1.0):
            values = {id(c.parameter(model)): D[c] * scale for c in columns}
            with _put_in_place(module, values):
                outputs.append(module.forward(*args, **kwargs))
        before, after = outputs
        if not isinstance(before, Tensor) or not isinstance(after, Tensor):
            return True
        half = half or before.dtype.itemsize < 4
        really = float((after.double() - before.double()).square().sum())
        expected = _by_rows(rows, D, site.weight, bias, lookup=member.lookup)
        tolerance = HALF_TOLERANCE if half else TOLERANCE
        if not math.isfinite(really + expected):
            return None
        if not abs(really - expected) <= tolerance * max(really, expected):
            return False
    return True


def _by_rows(
    rows: Rows, D: dict[Column, Tensor], weight: Column | None, bias: Column | None, *, lookup: bool
) -> float:
    """``sum ||D z||^2``."""
    groups, count, d = rows.shape
    if weight is not None and lookup:
        counts = rows.gram().double().cpu()
        return float((counts * weight.part.read(D[weight], groups, d).double().square()).sum())
    changes = torch.zeros(groups, count, 1, dtype=torch.float64)
    if weight is not None:
        W = weight.part.read(D[weight], groups, d).double()
        changes = changes + rows.dense().double().cpu() @ W.mT
    if bias is not None:
        changes = changes + bias.part.read(D[bias], groups, 1).double().mT
    return float(changes.square().sum())


def _few(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The first entries of all tensors of a call, if they have as many."""

    def cut(value: Any) -> Any:
        return value[:FEW] if isinstance(value, Tensor) and value.ndim > 1 else value

    return [cut(value) for value in args], {name: cut(value) for name, value in kwargs.items()}


@contextmanager
def _put_in_place(module: nn.Module, values: Mapping[int, Tensor]) -> Iterator[None]:
    """Other values for some parameters of a module, by the id of the parameter, for a moment."""
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None and id(parameter) in values:
                    before.append((owner, name, parameter))
                    value = values[id(parameter)].to(parameter)
                    owner._parameters[name] = nn.Parameter(value, requires_grad=False)
        yield
    finally:
        for owner, name, parameter in before:
            owner._parameters[name] = parameter
