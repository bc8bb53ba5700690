"""Several processes that learn one model together, on torch.distributed (docs/scale.md)."""

from proxreplay.distributed.agreement import compare
from proxreplay.distributed.calls import mean_, shared_calls
from proxreplay.distributed.processes import ALONE, Processes, current, start_of

__all__ = ["ALONE", "Processes", "compare", "current", "mean_", "shared_calls", "start_of"]
