"""What a rule will cost, layer by layer, before any of it is done."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from proxreplay.proximal.layers.calling import Caller
from proxreplay.proximal.layers.capture import Call, visit
from proxreplay.proximal.layers.sites import Site, Survey
from proxreplay.proximal.layers.torch_layers import TokenRows
from proxreplay.proximal.rules.layerwise import Treatment
from proxreplay.proximal.shrinkage.forms import SpectralShrinkage
from proxreplay.proximal.shrinkage.rowspace import RowShrinkage
from proxreplay.proximal.statistics.collect import Source
from proxreplay.proximal.statistics.sketch import Sketch


@dataclass(frozen=True)
class LayerCost:
    """The cost of one linear map.

    Args:
        name: of the module, with the map's name where it holds several.
        kind: the module's type.
        d: columns, those of trained biases included.
        groups: independent maps of that size.
        positions: rows per example.
        bytes: memory that stays taken, by the factor and by what is remembered of earlier
            refreshes.
        refresh_bytes: the most that sums, or the next factor, take on top while a refresh runs; the
            activations of one batch of it come on top.
        refresh_flops: of the Gram (as a plain product of rows) and its inverse; the forward pass
            comes on top.
        step_flops: of the product of gradient and factor.
    """

    name: str
    kind: str
    d: int
    groups: int
    positions: float
    bytes: int
    refresh_bytes: int
    refresh_flops: int
    step_flops: int


@dataclass(frozen=True)
class Cost:
    """The cost of a rule.

    Args:
        layers: by name.
        samples: the number of examples of a refresh that the cost is for.
        untreated: what will be left alone, with the reason.
    """

    layers: dict[str, LayerCost]
    samples: int
    untreated: dict[str, str]

    @property
    def bytes(self) -> int:
        """Memory that stays taken."""
        return sum(layer.bytes for layer in self.layers.values())

    @property
    def refresh_bytes(self) -> int:
        """Memory taken on top while a refresh runs."""
        return sum(layer.refresh_bytes for layer in self.layers.values())

    @property
    def refresh_flops(self) -> int:
        """Of one refresh, besides the forward passes."""
        return sum(layer.refresh_flops for layer in self.layers.values())

    @property
    def step_flops(self) -> int:
        """Of one `precondition_`."""
        return sum(layer.step_flops for layer in self.layers.values())

    def __str__(self) -> str:
        """A table with a line per layer."""
        lines = [
            f"{'layer':30} {'d':>6} {'groups':>6} {'positions':>9} {'MB':>9} {'refresh':>9} step"
        ]
        for one in self.layers.values():
            lines.append(
                f"{one.name:30} {one.d:6d} {one.groups:6d} {one.positions:9.1f} "
                f"{one.bytes / 1e6:9.3f} {one.refresh_flops:9.2e} {one.step_flops:.2e}"
            )
        lines.append(
            f"in all: {self.bytes / 1e6:.3f} MB kept, {self.refresh_bytes / 1e6:.3f} MB more "
            f"during a refresh, {self.refresh_flops:.2e} FLOP for {self.samples} examples, "
            f"{self.step_flops:.2e} FLOP per step"
        )
        lines += [f"left alone: {name}: {reason}" for name, reason in self.untreated.items()]
        return "\n".join(lines)


def cost_of(
    model: nn.Module,
    survey: Survey,
    batches: Iterable[Any],
    *,
    source: Source,
    samples: int | None,
    batch_dim: int,
    history: bool = False,
    call: Caller | None = None,
) -> Cost:
    """The cost of every site, from the shapes that one pass over example batches shows.

    Args:
        model: as `unwrap` gives it; left without a trace.
        survey: from `find_sites`.
        batches: anything the model can be called with.
        source: of the rule's statistics.
        samples: the number of examples of the refresh; None for those given.
        batch_dim: the dimension of the examples in a batch.
        history: whether the rule keeps the statistics of earlier refreshes.
        call: how the model is called with a batch; None for the usual way.
    """
    calls: defaultdict[str, list[tuple[tuple[int, int, int], bool]]] = defaultdict(list)

    def note(call: Call) -> None:
        counted = isinstance(call.rows, TokenRows)
        at = len(calls[call.site.name]) if counted else 0  # the shape is that of the first
        calls[call.site.name].insert(at, (call.rows.shape, counted))

    seen = visit(model, survey.sites, batches, note, batch_dim=batch_dim, call=call)
    planned = seen if samples is None else samples
    layers, untreated = {}, dict(survey.untreated)
    for name, site in survey.sites.items():
        if name not in calls:
            untreated[name] = "not called in this forward pass."
        elif site.width(calls[name][0][0][2]) > source.max_dim and not source.sketch:
            untreated[name] = f"more than max_dim = {source.max_dim} columns."
        else:
            layers[name] = _cost(model, site, calls[name], seen, planned, source.max_dim, history)
    return Cost(layers, planned, untreated)


def _cost(
    model: nn.Module,
    site: Site,
    calls: list[tuple[tuple[int, int, int], bool]],
    seen: int,
    planned: int,
    max_dim: int,
    history: bool,
) -> LayerCost:
    (groups, _, d), counted = calls[0]
    D = site.width(d)
    positions = sum(rows for (_, rows, _), _ in calls) / seen
    rows = positions * planned
    size = torch.promote_types(site.columns[0].parameter(model).dtype, torch.float32).itemsize
    columns = zip(site.columns, site.widths(D), strict=True)
    out = max(c.part.read(c.parameter(model), groups, width).shape[1] for c, width in columns)
    if max_dim >= D:
        kept, working = groups * D * D * size, groups * D * D * 8
        refresh = (rows if counted else 2 * groups * rows * D * D) + groups * D**3
        step = 2 * groups * out * D * D
        if site.mixed:  # one number per row and column on top, and a product back
            kept, step = kept + (out + D) * size, 2 * step
        kept += history * groups * D * D * size
    else:  # a sketch of m rows: products with and eigenvectors of B B' for every m new rows
        m = Sketch.rank_for(groups, D, max_dim)
        kept, working = groups * m * D * size, 2 * groups * m * D * size
        kept += history * 2 * groups * m * D * size
        refresh = groups * (rows / m + 1) * (4 * m * m * D * 2 + 10 * (2 * m) ** 3)
        step = 4 * groups * out * m * D
    return LayerCost(
        site.name, site.kind, D, groups, positions, kept, working, int(refresh), int(step)
    )


def counted_work(
    model: nn.Module, treatments: Mapping[str, Treatment], samples: int
) -> tuple[float, float]:
    """Multiplications of a training step per example, and of a refresh.

    A map with ``w`` weights and ``t`` rows per example takes ``3 t w`` in a step. In a refresh it
    takes ``t w`` forward and ``t D^2 / 2`` for the Gram matrix per example (a third of that for
    convolutions, whose patches overlap), and about ``D^3`` for a dense factor, ``D^3 / 3`` for
    leading directions, ``n^2 D`` for ``n`` rows.

    Args:
        model: as `unwrap` gives it.
        treatments: of the last refresh.
        samples: examples of a refresh.
    """
    step = refresh = 0.0
    for one in treatments.values():
        factor, site = one.factor, one.site
        groups, D = factor.groups, factor.width
        weights = max(column.parameter(model).numel() for column in site.columns)
        step += 3 * one.positions * weights
        refresh += samples * one.positions * weights
        if isinstance(factor, RowShrinkage):
            refresh += factor.Wt.shape[2] ** 2 * D * groups
            continue
        overlap = 3 if site.kind.startswith("Conv") else 1
        refresh += samples * one.positions * groups * D * D / (2 * overlap)
        refresh += groups * D**3 / (3 if isinstance(factor, SpectralShrinkage) else 1)
    return step, refresh
