"""What a loss was multiplied with, as mixed precision does it, found from the gradients."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from proxreplay.distributed import Processes
from proxreplay.proximal.layers.sites import Site

NEAR = 1e-3  # relative: gradients in half precision are no closer
LEFT = 1e-2  # of the gradients of all processes: a mean smaller than that may be their rounding


class ScaleWitness:
    """Compares one small gradient as it arrives with what is there when the step is made.

    ``torch.amp.GradScaler`` multiplies the loss with a power of two, and divides the gradients by
    it before the step. Clipping divides too, but by any number: `scale` takes only powers of two
    for a scale, `ratio` tells all of it.

    Args:
        model: as `unwrap` gives it.
        sites: whose parameters are looked at.
    """

    def __init__(self, model: nn.Module, sites: Mapping[str, Site]) -> None:
        columns = [column for site in sites.values() for column in site.columns]
        column = min(columns, key=lambda c: c.parameter(model).numel(), default=None)
        self.model = model
        self.column = column
        self.arrived: Tensor | None = None
        self._known = 1.0  # the last factor that was certain
        self._handle: RemovableHandle | None = None
        self._parameter: nn.Parameter | None = None

    def _follow(self) -> None:
        """A growing head replaces its parameters."""
        if self.column is None:
            return
        parameter = self.column.parameter(self.model)
        if parameter is not self._parameter:
            self._release()
            self._parameter = parameter
            self._handle = parameter.register_hook(self._note)

    def install(self) -> Self:
        """Put the hook in place until `remove`."""
        self._follow()
        return self

    def _note(self, gradient: Tensor) -> None:
        gradient = gradient.detach()
        self.arrived = gradient.clone() if self.arrived is None else self.arrived + gradient

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The hook is there inside only; gradients that were zeroed before begin a new sum."""
        self._follow()
        if self.nothing_accumulated():
            self.arrived = None
        try:
            yield
        finally:
            self._release()

    def nothing_accumulated(self) -> bool:
        """Whether the gradients were zeroed since the last backward pass."""
        gradient = None if self.column is None else self.column.parameter(self.model).grad
        return gradient is None or not bool(gradient.any())

    def ratio(self, processes: Processes) -> tuple[float, bool]:
        """How much larger gradients were when they arrived, and whether nothing else has changed.

        Of those that arrived since it was asked last; 1 for none.

        Args:
            processes: over which gradients are averaged; all of them have to ask.
        """
        arrived, self.arrived = self.arrived, None
        parameter = None if self.column is None else self.column.parameter(self.model)
        if processes.alone and _untouched(arrived, parameter):
            return 1.0, True
        mean = None if parameter is None else _mean(arrived, parameter, processes)
        if mean is None or parameter is None or parameter.grad is None:
            return 1.0, True
        (a, of_each), b = mean, parameter.grad.double().flatten()
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

    def scale(self, processes: Processes) -> float:
        """The scale of the gradients that arrived since it was asked last; 1 for none.

        Args:
            processes: as for `ratio`.
        """
        ratio, _ = self.ratio(processes)
        self._follow()
        if not math.isfinite(ratio) or ratio <= 0:
            return 1.0
        power = 2.0 ** round(math.log2(ratio))
        return power if abs(ratio / power - 1) < NEAR else 1.0

    def remove(self) -> None:
        """Take the hook away, and forget what arrived."""
        self._release()
        self.arrived = None

    def _release(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._parameter = None


def _untouched(arrived: Tensor | None, parameter: Tensor | None) -> bool:
    """Whether a gradient is bit by bit what arrived, as in most steps."""
    grad = None if parameter is None else parameter.grad
    return arrived is not None and grad is not None and torch.equal(arrived, grad)


@torch.no_grad()
def _mean(
    arrived: Tensor | None, like: Tensor, processes: Processes
) -> tuple[Tensor, float] | None:
    """The mean over processes of a gradient that arrived, and how large those of each are.

    Args:
        arrived: here; None, or of another shape if the head has grown meanwhile, for none.
        like: the parameter.
        processes: whose gradients.

    Returns:
        The mean ``[numel]`` and the root mean square of the norms; None if there is no gradient.
    """
    here = arrived is not None and arrived.shape == like.shape
    own = (arrived if arrived is not None and here else torch.zeros_like(like)).double().flatten()
    said = torch.cat([own, torch.stack([own @ own, own.new_tensor(float(here))])])
    processes.sum_([said])
    said /= processes.size
    squares, present = said[-2:].tolist()
    return (said[:-2], math.sqrt(squares)) if present else None
