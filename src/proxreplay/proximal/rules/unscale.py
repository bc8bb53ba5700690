"""What a loss was multiplied with, as mixed precision does it, found from the gradients."""

import math
from collections.abc import Mapping

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from proxreplay.proximal.layers.sites import Site

NEAR = 1e-3  # relative: gradients in half precision are no closer


class ScaleWitness:
    """Compares one small gradient as it arrives with what is there when the step is made.

    ``torch.amp.GradScaler`` multiplies the loss with a power of two, and divides the gradients by
    it before the step. Clipping divides too, but by any number: only powers of two are taken for a
    scale.

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
        self._follow()

    def _follow(self) -> None:
        """A growing head replaces its parameters."""
        if self.column is None:
            return
        parameter = self.column.parameter(self.model)
        if parameter is not self._parameter:
            self.remove()
            self._parameter = parameter
            self._handle = parameter.register_hook(self._note)

    def _note(self, gradient: Tensor) -> None:
        gradient = gradient.detach()
        self.arrived = gradient.clone() if self.arrived is None else self.arrived + gradient

    def scale(self) -> float:
        """The scale of the gradients that arrived since it was asked last; 1 for none."""
        arrived, self.arrived = self.arrived, None
        parameter = self._parameter
        self._follow()
        if arrived is None or parameter is None or parameter.grad is None:
            return 1.0
        a, b = arrived.double().flatten(), parameter.grad.double().flatten()
        own = float(b @ b)
        ratio = float(a @ b) / own if own > 0 else 1.0
        if not math.isfinite(ratio) or ratio <= 0:
            return 1.0
        power = 2.0 ** round(math.log2(ratio))
        return power if abs(ratio / power - 1) < NEAR else 1.0

    def remove(self) -> None:
        """Take the hook away."""
        if self._handle is not None:
            self._handle.remove()
        self._handle, self.arrived = None, None
