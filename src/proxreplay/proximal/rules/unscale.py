"""What a loss was multiplied with, as mixed precision does it, found from the gradients."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from proxreplay.proximal.layers.sites import Site

NEAR = 1e-3  # relative: gradients in half precision are no closer


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

    def ratio(self) -> tuple[float, bool]:
        """How much larger gradients were when they arrived, and whether nothing else has changed.

        Of those that arrived since it was asked last; 1 for none.
        """
        arrived, self.arrived = self.arrived, None
        parameter = None if self.column is None else self.column.parameter(self.model)
        if arrived is None or parameter is None or parameter.grad is None:
            return 1.0, True
        if arrived.shape != parameter.grad.shape:  # the head has grown meanwhile
            return 1.0, True
        a, b = arrived.double().flatten(), parameter.grad.double().flatten()
        own = float(b @ b)
        if own == 0:
            return 1.0, True
        ratio = float(a @ b) / own
        return ratio, float((a - ratio * b).norm()) <= NEAR * float(a.norm())

    def scale(self) -> float:
        """The scale of the gradients that arrived since it was asked last; 1 for none."""
        ratio, _ = self.ratio()
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
