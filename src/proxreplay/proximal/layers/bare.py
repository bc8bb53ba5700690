"""Parameters that a model uses without a layer: class tokens, position embeddings, layer scales.

A forward pass shows what becomes of each. As long as its elements are only moved about (expanded,
reshaped, cut, put together), every number is one element of the parameter; we follow which. Where
they meet data, the output is linear in them:

    added or prepended     output = w + ...      z = 1
    chosen by a mask       where(mask, w, x)     z = 1 where it is chosen
    multiplied             output = w x          z = x

Each element is a group of its own, with one row for every place it goes to. Any other use has no
such rows: the parameter is left alone and the function that it goes into is named.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from proxreplay.batch import tensors_in
from proxreplay.proximal.gram.rows import DenseRows, Rows
from proxreplay.proximal.layers.hooks import Watcher
from proxreplay.proximal.layers.layout import Layout
from proxreplay.proximal.layers.sites import Site

CASTS = {"to", "type_as", "type", "float", "double", "half", "bfloat16", "cuda", "cpu"}
CASTS |= {"contiguous", "clone", "detach", "requires_grad_"}
MOVES = {"expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "tile", "view"}
MOVES |= {"reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "permute", "transpose", "t"}
MOVES |= {"movedim", "moveaxis", "swapaxes", "getitem", "select", "narrow", "index_select", "flip"}
MOVES |= {"chunk", "split", "unbind", "roll", "view_as", "reshape_as", "T", "mT", "data"}
SHAPES = {"zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones"}
SHAPES |= {"new_empty", "new_full", "new_tensor"}  # only the shape or type of it is asked for
SUMS = {"add", "add_", "iadd", "radd", "sub", "sub_", "rsub", "isub"}
PRODUCTS = {"mul", "mul_", "imul", "rmul", "multiply"}
JOINS = {"cat", "concat", "concatenate", "stack"}

OnUse = Callable[[Site, Rows], None]
Places = dict[str, Tensor]
"""By the name of a site, which element of its parameter is where in a tensor; -1 for none."""


@dataclass(frozen=True)
class PlacedRows(Rows):
    """Rows of elements that are added: ``z = 1`` wherever an element goes."""

    counts: Tensor  # how many places every element goes to, [elements]
    dtype: torch.dtype  # of the statistic

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(elements, rows, 1)``; some rows of elements that are used less often are 0."""
        return len(self.counts), int(self.counts.max()), 1

    def dense(self) -> Tensor:
        """``Z`` itself."""
        rows = torch.arange(self.shape[1], device=self.counts.device)
        return (rows < self.counts[:, None])[:, :, None].to(self.dtype)

    def gram(self) -> Tensor:
        """The counts, ``[elements, 1, 1]``."""
        return self.counts[:, None, None].to(self.dtype)

    def total(self) -> Tensor:
        """The counts, ``[elements, 1]``."""
        return self.counts[:, None].to(self.dtype)


class Tracer(TorchFunctionMode, Watcher):
    """Follows parameters through a forward pass and hands on the rows of their uses.

    Args:
        model: as `unwrap` gives it.
        sites: of bare parameters.
        on_use: receives the rows of every use.
    """

    def __init__(self, model: nn.Module, sites: Iterable[Site], on_use: OnUse) -> None:
        super().__init__()
        self.wrong: dict[str, str] = {}
        self._on_use = on_use
        self._bare = {site.name: (site, site.columns[0].parameter(model)) for site in sites}
        self._names = {id(parameter): name for name, (_, parameter) in self._bare.items()}
        self._kinds = {n: type(site.module(model)).__name__ for n, (site, _) in self._bare.items()}
        self._followed: dict[int, tuple[Tensor, Places]] = {}
        self._added: dict[str, Tensor] = {}
        self._layout = Layout(0)

    @contextmanager
    def on(self, layout: Layout) -> Iterator[None]:
        """Watch one forward pass over a batch of that layout."""
        self._layout = layout
        self._added.clear()
        try:
            with self:
                yield
            self._hand_on()
        finally:
            self._followed.clear()

    def _hand_on(self) -> None:
        """After a forward pass: the rows of elements that were added, wherever that was."""
        for of, counts in self._added.items():
            site, parameter = self._bare[of]
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            self._on_use(site, PlacedRows(counts, dtype))

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, and see whether a followed tensor goes into it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.busy and self._bare:
            with self.paused(), torch.no_grad():
                given = [(x, self._places(x)) for x in tensors_in((args, kwargs))]
                if any(places is not None for _, places in given):
                    self._look(_Use(func, args, kwargs, out, given))
        return out

    def _places(self, x: Tensor) -> Places | None:
        """Where which elements are in a tensor; None if it is not followed."""
        if id(x) in self._followed:
            return self._followed[id(x)][1]
        name = self._names.get(id(x))
        return (
            None if name is None else {name: torch.arange(x.numel(), device=x.device).view(x.shape)}
        )

    def _look(self, use: "_Use") -> None:
        """Follow what was only moved; hand on the rows of what met data; name every other use."""
        name, first = use.name, use.given[0][1]
        if not any(True for _ in tensors_in(use.out)) or name in SHAPES:
            return
        if name in CASTS | MOVES:
            if first is not None:  # else it only lent its shape or type
                self._moved(use, first)
        elif name in JOINS:
            self._joined(use)
        elif name in SUMS and "alpha" not in use.kwargs:
            self._summed(use)
        elif name in PRODUCTS and len(use.given) == 2 and len(use.followed) == 1:
            z = next(x for x, places in use.given if places is None)
            self._used(use.followed[0], use.out, z=z)
        elif name == "where" and len(use.given) == 3 and first is None:
            mask = use.given[0][0]
            for (_, places), chosen in zip(use.given[1:], (mask, ~mask), strict=True):
                if places is not None:
                    self._used(places, use.out, where=chosen)
        else:
            for of in (of for places in use.followed for of in places):
                self.wrong[of] = (
                    f"{self._kinds[of]} is not known, and this parameter goes into {name}(); "
                    f"teach it with register_layer({self._kinds[of]})."
                )

    def _moved(self, use: "_Use", places: Places) -> None:
        """The same is done to the numbers of the elements as was done to the elements."""
        if use.name in CASTS:
            self._follow(use.out, places)
            return
        moved = {of: use.func(at, *use.args[1:], **use.kwargs) for of, at in places.items()}
        if isinstance(use.out, Tensor):
            self._follow(use.out, moved)
        else:
            for i, one in enumerate(use.out):
                self._follow(one, {of: parts[i] for of, parts in moved.items()})

    def _joined(self, use: "_Use") -> None:
        """``cat`` and ``stack``: of parameters only, they are moved; with data, put beside it."""
        if len(use.followed) < len(use.given):
            for places in use.followed:
                self._used(places)
            return
        rest = use.args[1:] if use.args else ()
        named = {key: value for key, value in use.kwargs.items() if key != "tensors"}
        joined: Places = {}
        for of in {of for places in use.followed for of in places}:
            none = (torch.full(x.shape, -1, device=x.device) for x, _ in use.given)
            at = [places.get(of, no) for places, no in zip(use.followed, none, strict=True)]
            joined[of] = use.func(at, *rest, **named)
        self._follow(use.out, joined)

    def _summed(self, use: "_Use") -> None:
        """Sums: of parameters and numbers only, they are followed; with data, they are added."""
        names = [of for places in use.followed for of in places]
        if len(use.followed) == len(use.given) and len(names) == len(set(names)):
            shape = use.out.shape
            self._follow(
                use.out, {of: at.expand(shape) for one in use.followed for of, at in one.items()}
            )
            return
        for places in use.followed:
            self._used(places, use.out)

    def _follow(self, x: Tensor, places: Places) -> None:
        self._followed[id(x)] = (x, places)  # held, so that its id stays its own

    def _used(
        self,
        places: Places,
        out: Tensor | None = None,
        *,
        z: Tensor | None = None,
        where: Tensor | None = None,
    ) -> None:
        """Note the rows of elements that go to every place of ``out``, or stay where they are.

        Args:
            places: which element is where, before it is broadcast.
            out: what came of it; None if nothing is broadcast.
            z: what they are multiplied with; None for 1.
            where: which places of ``out`` they go to; None for all.
        """
        for of, at in places.items():
            site, parameter = self._bare[of]
            shape = at.shape if out is None else out.shape
            real = self._real(shape)
            if real is not None:
                at = at.expand(shape).masked_fill(~real.to(at.device), -1)
            if z is not None:
                Z = _multiplied(at, z.expand(shape), shape, parameter.numel())
                self._on_use(site, DenseRows(Z))
                continue
            copies = shape.numel() // max(1, at.numel())
            if where is not None:
                at, copies = at.expand(shape)[where.expand(shape)], 1
            counts = torch.bincount(at[at >= 0], minlength=parameter.numel()) * copies
            self._added[of] = self._added.get(of, 0) + counts

    def _real(self, shape: torch.Size) -> Tensor | None:
        """Which places of a tensor are data; None if all are."""
        mask = self._layout.masks[0]
        return None if mask is None or not shape else self._layout.places(mask, tuple(shape))


@dataclass(frozen=True)
class _Use:
    """One call of a function that followed tensors go into."""

    func: Any
    args: Any
    kwargs: Mapping[str, Any]
    out: Any
    given: list[tuple[Tensor, Places | None]]

    @property
    def name(self) -> str:
        """``add`` for ``__add__``; of a property, its name."""
        name: str = getattr(self.func, "__name__", str(self.func))
        if name == "__get__":
            name = self.func.__self__.__name__
        return name if name.endswith("_") and not name.endswith("__") else name.strip("_")

    @property
    def followed(self) -> list[Places]:
        """Those of the tensors that are followed."""
        return [places for _, places in self.given if places is not None]


def _multiplied(at: Tensor, z: Tensor, shape: torch.Size, elements: int) -> Tensor:
    """``Z: [elements, rows, 1]`` of elements at ``at``, broadcast, that are multiplied with ``z``.

    ``at`` is -1 where there is none; ``z`` and the product have that ``shape``.
    """
    at = at.reshape((1,) * (len(shape) - at.ndim) + at.shape)
    if at.numel() == elements and bool((torch.bincount(at[at >= 0]) == 1).all()):
        own = [dim for dim, size in enumerate(at.shape) if size > 1]
        Z = z.movedim(own, tuple(range(len(own)))).reshape(elements, -1)  # each is there once
        return torch.empty_like(Z).index_copy_(0, at.flatten(), Z)[:, :, None]
    at, z = at.expand(shape).flatten(), z.flatten()
    z, at = z[at >= 0], at[at >= 0]
    order = at.argsort(stable=True)
    counts = torch.bincount(at, minlength=elements)
    row = torch.arange(len(at), device=at.device) - (counts.cumsum(0) - counts)[at[order]]
    Z = z.new_zeros(elements, int(counts.max()))
    Z[at[order], row] = z[order]
    return Z[:, :, None]
