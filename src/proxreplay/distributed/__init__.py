"""Several processes that learn one model together, on torch.distributed (docs/scale.md)."""

from proxreplay.distributed.agreement import compare
from proxreplay.distributed.calls import CallShare, mean_, share_of_call, shared_calls
from proxreplay.distributed.processes import ALONE, Processes, current, start_of

__all__ = [
    "ALONE",
    "CallShare",
    "Processes",
    "compare",
    "current",
    "mean_",
    "share_of_call",
    "shared_calls",
    "start_of",
]
