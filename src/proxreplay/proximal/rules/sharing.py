"""Factors that processes make for each other: each makes a part, and sends what it made."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

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
    tensors: dict[str, list[Tensor]] = {name: [] for name in makers}
    plans: dict[str, Any] = {}
    for said in processes.tell({name: _plan(one, tensors[name]) for name, one in made.items()}):
        plans |= said
    for owner in range(processes.size):
        names = [name for name, who in makers.items() if who == owner]
        for name in names:
            if owner != processes.rank:
                tensors[name] = [_room(plan, device) for plan in _tensor_plans(plans[name])]
        processes.broadcast_([tensor for name in names for tensor in tensors[name]], owner)
    return {name: _fill(plans[name], iter(tensors[name])) for name in makers}


def _plan(value: Any, tensors: list[Tensor]) -> Any:
    """A value with shapes in place of tensors, which go to the list."""
    if isinstance(value, Tensor):
        tensors.append(value.contiguous())
        return (tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {key: _plan(one, tensors) for key, one in value.items()}
    return value


def _tensor_plans(plan: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    if isinstance(plan, dict):
        return [found for one in plan.values() for found in _tensor_plans(one)]
    return [plan] if _is_tensor(plan) else []


def _fill(plan: Any, tensors: Any) -> Any:
    if isinstance(plan, dict):
        return {key: _fill(one, tensors) for key, one in plan.items()}
    return next(tensors) if _is_tensor(plan) else plan


def _is_tensor(plan: Any) -> bool:
    return isinstance(plan, tuple) and len(plan) == 2 and isinstance(plan[1], torch.dtype)


def _room(plan: tuple[tuple[int, ...], torch.dtype], device: torch.device) -> Tensor:
    return torch.empty(plan[0], dtype=plan[1], device=device)
