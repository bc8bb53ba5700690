"""Statistics of several processes added up: those of all examples, in every process.

With ``Z_r`` the rows that process ``r`` has seen, ``Z'Z = sum_r Z_r'Z_r``. Only the upper triangles
are sent, in float64.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from proxreplay.distributed import Processes
from proxreplay.errors import RefreshError
from proxreplay.proximal.statistics.few import FewRows
from proxreplay.proximal.statistics.sketch import Sketch
from proxreplay.proximal.statistics.statistic import Statistic

Statistics = dict[str, Statistic | Sketch]
Collected = tuple[Statistics, dict[str, str]]


def summed(
    processes: Processes, collect: Callable[[], Collected], device: torch.device
) -> Collected:
    """What all processes have collected, added up; a failure in one is a failure in all.

    Args:
        processes: that collect.
        collect: gives the statistics of this process's examples by site, and why sites have none.
        device: of sites that this process has not met.
    """
    if processes.alone:
        return collect()
    mine, left_out = processes.together("refresh", collect)
    mine = {name: one.dense() if isinstance(one, FewRows) else one for name, one in mine.items()}
    everyone = processes.tell(({name: _layout(one) for name, one in mine.items()}, left_out))
    layouts: dict[str, list[Statistic | Sketch]] = {}
    for sites, _ in everyone:
        for name, layout in sites.items():
            layouts.setdefault(name, []).append(layout)
    _check_alike(layouts)
    # the sites of a process all know how many examples it has seen
    samples = sum(next((one.samples for one in sites.values()), 0) for sites, _ in everyone)
    total: Statistics = {}
    for name, (first, *others) in layouts.items():
        rows = first.rows + sum(one.rows for one in others)
        total[name] = mine.pop(name) if name in mine else _empty(first, device)
        total[name] = replace(total[name], rows=rows, samples=samples)
    _add_up_(processes, total)
    reasons = {name: why for _, said in everyone for name, why in said.items()}
    return total, {name: why for name, why in reasons.items() if name not in total}


def _add_up_(processes: Processes, total: Statistics) -> None:
    """Put the sums over all processes in the place of the own ones."""
    grams = {name: one for name, one in total.items() if isinstance(one, Statistic)}
    packed = {}
    for name, one in grams.items():  # not both at a time: they are large
        packed[name], one.G = pack(one.G), one.G.new_empty(0, *one.G.shape[1:])
    outputs = {name: pack(one.H) for name, one in grams.items() if one.H is not None}
    picked = [one.picked for one in grams.values() if one.picked is not None]
    processes.sum_([*packed.values(), *outputs.values(), *picked])
    for name, one in grams.items():
        one.G = unpack(packed.pop(name), one.G.shape[1])
        if one.H is not None:
            one.H = unpack(outputs.pop(name), one.H.shape[1]).to(one.H.dtype)
    for sketch in total.values():
        if isinstance(sketch, Sketch):
            _join_(processes, sketch)


def _join_(processes: Processes, sketch: Sketch) -> None:
    """One sketch of the rows of all; process 0 has the last word on rounding."""
    lengths = processes.tell(sketch.B.shape[1])
    rows = processes.gather([sketch.B.transpose(0, 1).contiguous()], lengths)[0]
    dropped = sketch.dropped.clone()
    processes.sum_([dropped])
    sketch.B, sketch.dropped = sketch.B[:, :0], dropped
    for part in rows.transpose(0, 1).split(lengths, dim=1):
        sketch.add_(part)
    sketch.B = sketch.B.contiguous()
    processes.broadcast_([sketch.B, sketch.dropped], 0)


def pack(G: Tensor) -> Tensor:
    """The upper triangles of ``[groups, D, D]`` in float64, ``[groups, D (D + 1) / 2]``."""
    packed = G.masked_select(_upper(G)).view(len(G), -1)
    return packed if G.device.type == "mps" else packed.double()


def unpack(packed: Tensor, width: int) -> Tensor:
    """The symmetric matrices of which `pack` gave the upper triangles."""
    G = packed.new_zeros(len(packed), width, width)
    G.masked_scatter_(_upper(G), packed)
    return G.add_(G.triu(1).mT)


def _upper(G: Tensor) -> Tensor:
    return torch.ones(G.shape[1:], dtype=torch.bool, device=G.device).triu()


def _layout(one: Statistic | Sketch) -> Statistic | Sketch:
    """The same with tensors that have no values: no rows of a sketch, no precision of a sum."""
    tensors = _tensors(one, lambda tensor: tensor.to("meta"))
    if isinstance(one, Sketch):
        return replace(one, **tensors | {"B": tensors["B"][:, :0]})
    return replace(one, **tensors | {"G": tensors["G"].to(one.dtype)})


def _empty(layout: Statistic | Sketch, device: torch.device) -> Statistic | Sketch:
    """The statistic of no rows, of a site that only other processes have met."""
    return replace(layout, **_tensors(layout, partial(torch.zeros_like, device=device)))


def _tensors(one: Statistic | Sketch, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {name: change(value) for name, value in vars(one).items() if isinstance(value, Tensor)}


def _check_alike(layouts: dict[str, list[Statistic | Sketch]]) -> None:
    for name, found in layouts.items():
        kinds = {repr(replace(one, rows=0, samples=0)) for one in found}
        if len(kinds) > 1:
            raise RefreshError(
                f"refresh: '{name}' was called with rows of different shapes in different "
                f"processes ({'; '.join(sorted(kinds))}); they do not add up. Leave it out with "
                "exclude."
            )
