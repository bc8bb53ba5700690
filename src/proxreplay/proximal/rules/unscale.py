"""What a loss was multiplied with, as mixed precision does it, found from the gradients."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from proxreplay.distributed import Processes
from proxreplay.proximal.layers.sites import Site

NEAR = 1e-3  # relative: gradients in half precision are no closer
LEFT = 1e-2  # of the gradients of all processes: a mean smaller than that may be their rounding
KEPT = 2**12  # numbers of small gradients that are kept from a backward pass until the step


class ScaleWitness:
    """Compares one small gradient as it arrives with what is there when the step is made.

    ``torch.amp.GradScaler`` multiplies the loss with a power of two, and divides the gradients by
    it before the step. Clipping divides too, but by any number: `scale` takes only powers of two
    for a scale, `ratio` tells all of it.

    A gradient of zeros, as of dead units or of a head that is not used, tells nothing. So the
    smallest parameters are all kept in mind, and the first one that tells something is asked.

    Args:
        model: as `unwrap` gives it.
        sites: whose parameters are looked at.
    """

    def __init__(self, model: nn.Module, sites: Mapping[str, Site]) -> None:
        columns = {column.name: column for site in sites.values() for column in site.columns}
        sizes = {name: column.parameter(model).numel() for name, column in columns.items()}
        names = sorted(columns, key=sizes.__getitem__)
        up_to = accumulate(sizes[name] for name in names)
        kept = sum(numbers <= KEPT for numbers in up_to)
        self.model = model
        self.columns = [columns[name] for name in names]  # the smallest first
        self.asked = self.columns[: max(1, kept)]
        self.arrived: dict[str, Tensor] = {}
        self._known = 1.0  # the last factor that was certain
        self._hooks: dict[str, tuple[nn.Parameter, RemovableHandle]] = {}

    def _follow(self) -> None:
        """A growing head replaces its parameters."""
        for column in self.asked:
            name, parameter = column.name, column.parameter(self.model)
            before = self._hooks.get(name)
            if before is not None and before[0] is not parameter:
                before[1].remove()
                del self._hooks[name]
            if name not in self._hooks and parameter.requires_grad:
                hook = parameter.register_hook(partial(self._note, name))
                self._hooks[name] = parameter, hook

    def _note(self, name: str, gradient: Tensor) -> None:
        gradient, before = gradient.detach(), self.arrived.get(name)
        self.arrived[name] = gradient.clone() if before is None else before + gradient

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The hooks are there inside only."""
        self._follow()
        try:
            yield
        finally:
            for _, handle in self._hooks.values():
                handle.remove()
            self._hooks = {}

    def nothing_accumulated(self) -> bool:
        """Whether the gradients were zeroed since the last backward pass: none is not zero."""
        gradients = (column.parameter(self.model).grad for column in self.columns)
        return not any(one is not None and bool(one.any()) for one in gradients)

    def forget(self) -> None:
        """What arrived is not of the next step."""
        self.arrived = {}

    def ratio(self, processes: Processes) -> tuple[float, bool]:
        """How much larger gradients were when they arrived, and whether nothing else has changed.

        Of those that arrived since it was asked last; as before if none tells it.

        Args:
            processes: over which gradients are averaged; all of them have to ask.
        """
        parameters = [column.parameter(self.model) for column in self.asked]
        arrived = [self._arrived_at(c.name, p) for c, p in zip(self.asked, parameters, strict=True)]
        self.forget()
        at = _first_nonzero(arrived, processes)
        if at is None:
            return self._known, True
        one, gradient = arrived[at], parameters[at].grad
        if processes.alone and _untouched(one, gradient):
            self._known = 1.0
            return 1.0, True
        a, of_each = _mean(torch.zeros_like(parameters[at]) if one is None else one, processes)
        if gradient is None:
            return 1.0, True
        b = gradient.double().flatten()
        own, size = float(b @ b), float(a.norm())
        if own == 0:
            return 1.0, True
        ratio = float(a @ b) / own
        proportional = float((a - ratio * b).norm()) <= NEAR * size
        if proportional:
            self._known = ratio
        elif size < LEFT * of_each:  # they cancel, and what is left was rounded on the way
            return self._known, True
        return ratio, proportional

    def _arrived_at(self, name: str, parameter: Tensor) -> Tensor | None:
        """None also if the head has grown meanwhile."""
        one = self.arrived.get(name)
        return None if one is None or one.shape != parameter.shape else one

    def scale(self, processes: Processes) -> float:
        """The scale of the gradients that arrived since it was asked last, as `ratio` has it.

        Args:
            processes: as for `ratio`.
        """
        ratio, _ = self.ratio(processes)
        self._follow()
        if not math.isfinite(ratio) or ratio <= 0:
            return 1.0
        power = 2.0 ** round(math.log2(ratio))
        return power if abs(ratio / power - 1) < NEAR else 1.0


def _first_nonzero(arrived: Sequence[Tensor | None], processes: Processes) -> int | None:
    """The first gradient that is not zero in one process at least; None if all are."""
    there = (i for i, one in enumerate(arrived) if one is not None and bool(one.any()))
    first = next(there, None)
    if processes.alone:
        return first
    told = torch.zeros(len(arrived))
    if first is not None:
        told[first] = 1
    processes.sum_([told])
    return next((i for i, number in enumerate(told.tolist()) if number), None)


def _untouched(arrived: Tensor | None, gradient: Tensor | None) -> bool:
    """Whether a gradient is bit by bit what arrived, as in most steps."""
    return arrived is not None and gradient is not None and torch.equal(arrived, gradient)


@torch.no_grad()
def _mean(arrived: Tensor, processes: Processes) -> tuple[Tensor, float]:
    """The mean over processes of a gradient that arrived, and how large those of each are.

    Returns:
        The mean ``[numel]`` and the root mean square of the norms.
    """
    own = arrived.double().flatten()
    said = torch.cat([own, (own @ own)[None]])
    processes.sum_([said])
    said /= processes.size
    return said[:-1], math.sqrt(float(said[-1]))
