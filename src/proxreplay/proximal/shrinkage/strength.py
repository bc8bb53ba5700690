"""How strongly the rows of a layer count: ``omega = omega_0 / (n n_eff^beta)``."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from proxreplay.errors import InputError
from proxreplay.proximal.layers.selection import Selector


@dataclass(frozen=True)
class Strength:
    """The paper's two numbers.

    Args:
        omega_0: strength; 0 leaves every gradient as it is.
        beta: how much layers with many positions are spared.
    """

    omega_0: float = 1.0
    beta: float = 1.0

    def __post_init__(self) -> None:
        for name, value in {"omega_0": self.omega_0, "beta": self.beta}.items():
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"LPR: {name}={value}; give a finite number of at least 0.")

    def omega(self, samples: int, positions: float) -> float:
        """``omega_0 / (n n_eff^beta)``."""
        return float(self.omega_0 / (samples * positions**self.beta))


Overrides = Mapping[Selector, Strength]
