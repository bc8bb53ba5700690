"""Factors that processes make for each other: each makes a part, and sends what it made."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from proxreplay.batch import tensors_in, with_tensors
from proxreplay.distributed import Processes
from proxreplay.proximal.statistics.sketch import Sketch
from proxreplay.proximal.statistics.statistic import Statistic


def cost_of_inverse(statistic: Statistic | Sketch) -> float:
    """Multiplications, up to a constant: ``groups d^3``, or ``groups m^2 d`` for a sketch."""
    if isinstance(statistic, Sketch):
        groups, m, d = statistic.B.shape
        return float(groups * m * m * d)
    groups, d, _ = statistic.G.shape
    return float(groups * d**3)


def owners(costs: Mapping[str, float], size: int) -> dict[str, int]:
    """Who makes what: the dearest first, each to the process that has least to do so far.

    >>> owners({"a": 1.0, "b": 3.0, "c": 2.0}, 2)
    {'b': 0, 'c': 1, 'a': 1}
    """
    loads = [0.0] * size
    found = {}
    for name, cost in sorted(costs.items(), key=lambda item: (-item[1], item[0])):
        found[name] = loads.index(min(loads))
        loads[found[name]] += cost
    return found


def shared_out(
    processes: Processes,
    makers: Mapping[str, int],
    make: Callable[[str], dict[str, Any]],
    device: torch.device,
) -> dict[str, dict[str, Any]]:
    """What all processes have made, in every process, with the same bytes.

    Args:
        processes: that make it.
        makers: the process that makes each thing.
        make: from a name to nested dicts of tensors, numbers and strings.
        device: where the tensors go.
    """
    mine = [name for name, owner in makers.items() if owner == processes.rank]
    made = processes.together("refresh", lambda: {name: make(name) for name in mine})
    shapes: dict[str, Any] = {}  # what was made, with tensors that have no values
    for said in processes.tell(with_tensors(made, lambda tensor: tensor.to("meta"))):
        shapes |= said

    def room(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    found: dict[str, dict[str, Any]] = {}
    for owner in range(processes.size):
        names = [name for name, who in makers.items() if who == owner]
        own = owner == processes.rank
        some = {name: made[name] if own else with_tensors(shapes[name], room) for name in names}
        some = with_tensors(some, Tensor.contiguous)
        processes.broadcast_(list(tensors_in(some)), owner)
        found |= some
    return {name: found[name] for name in makers}
