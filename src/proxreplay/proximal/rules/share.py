"""How much of a rule acts at present, from how unlike incoming and replayed examples are.

With moving averages of the mean loss of incoming and of replayed examples in the steps,

    share = min(1, | log2(loss_in / loss_re) |).

Where both are equally hard, the stream is like the memory: there is nothing to protect, and the
rule gets out of the way. Where one is at least twice as hard as the other, because new things
arrive, or because the newest are known much better than the rest, it acts fully.
"""

import math
from dataclasses import dataclass

DECAY = 0.97  # of the moving averages, per step
LEAST = 1e-12  # a loss of 0 would have no logarithm


@dataclass
class Share:
    """The controller; two numbers are all it remembers."""

    # moving average of the mean loss of incoming examples; None before the first step
    incoming: float | None = None
    replayed: float | None = None  # the same of replayed ones

    @property
    def value(self) -> float:
        """From 0 (the rule does nothing) to 1; 1 as long as nothing is known."""
        if self.incoming is None or self.replayed is None:
            return 1.0
        losses = max(self.incoming, LEAST), max(self.replayed, LEAST)
        return min(1.0, abs(math.log2(losses[0] / losses[1])))

    def note(self, incoming: float, replayed: float) -> None:
        """Take in the mean losses of one step; those that are not finite are not heeded."""
        if not (math.isfinite(incoming) and math.isfinite(replayed)):
            return
        self.incoming = _averaged(self.incoming, incoming)
        self.replayed = _averaged(self.replayed, replayed)

    def state(self) -> dict[str, float]:
        """Its numbers, if there are any yet: the arguments that make it again."""
        if self.incoming is None or self.replayed is None:
            return {}
        return {"incoming": self.incoming, "replayed": self.replayed}


def _averaged(before: float | None, new: float) -> float:
    return new if before is None else DECAY * before + (1 - DECAY) * new
