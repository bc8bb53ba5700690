"""The statistic of every site over some examples: Gram matrix, rows, examples.

It is kept apart from the strength, and from the running of the model: a `GramCollector` takes rows
wherever they come from.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proxreplay.errors import RefreshError
from proxreplay.proximal.capture import Call, visit
from proxreplay.proximal.gram import Rows, gram_with_bias
from proxreplay.proximal.registry import RowsFunction
from proxreplay.proximal.sites import Site
from proxreplay.proximal.sketch import Sketch, dense_pieces


@dataclass
class Statistic:
    """What is known of the rows of one site.

    Args:
        G: ``Z'Z`` over all rows, ``[groups, D, D]``, columns ``[weight | biases]``; float64 where
            the device has it, so that many batches can be added up.
        d: columns of the weight, trained or not.
        rows: number of rows a group.
        samples: ``n``, the number of examples.
        dtype: precision of the rows, at least float32, and thus of what is made from them.
        picked: how often every row of the weight was picked by an Embedding that shares it with a
            Linear, ``[out]``; None where there is no such thing.
    """

    G: Tensor
    d: int
    rows: int
    samples: int
    dtype: torch.dtype
    picked: Tensor | None = None

    @property
    def positions(self) -> float:
        """``n_eff``: rows an example."""
        return self.rows / self.samples


class GramCollector:
    """Adds up ``Z'Z`` for every site.

    Args:
        max_dim: sites with more columns get a `Sketch`, or are skipped and named; no ``d x d`` is
            made for them.
        sketch: whether the rule can do something with a sketch.
    """

    def __init__(self, max_dim: int, *, sketch: bool = False) -> None:
        self.max_dim = max_dim
        self.sketch = sketch
        self.skipped: dict[str, str] = {}
        self._statistics: dict[str, Statistic | Sketch] = {}
        self._picked: dict[str, tuple[Tensor, int]] = {}
        self._last: tuple[Rows, bool, bool, Tensor] | None = None

    def add(self, call: Call) -> None:
        """Take the rows of one call."""
        width = call.site.width(call.rows.shape[2])
        if call.site.mixed and call.member.lookup:
            before, rows = self._picked.get(call.site.name, (0, 0))
            counts = call.rows.gram()[:, 0, 0]
            total = before + counts.to(_sum_dtype(counts))
            self._picked[call.site.name] = (total, rows + call.rows.shape[1])
        elif width <= self.max_dim:
            self._add_gram(call, width)
        elif self.sketch and len(call.site.biases) < 2 and not call.site.mixed:
            self._add_to_sketch(call, width)
        else:
            self.skipped[call.site.name] = f"d = {width} is more than max_dim = {self.max_dim}."

    def finish(self, samples: int) -> dict[str, Statistic | Sketch]:
        """The statistics by site, given the number of examples."""
        for statistic in self._statistics.values():
            statistic.samples = samples
        for name, (picked, rows) in self._picked.items():
            tied = self._statistics.get(name)
            if isinstance(tied, Statistic):
                tied.picked = picked
                tied.rows += rows
            else:
                self.skipped.setdefault(name, "only picked from in the last refresh.")
        return self._statistics

    def _add_gram(self, call: Call, width: int) -> None:
        G = self._gram(call)
        _check_finite(G.diagonal(dim1=1, dim2=2), call)  # bounds all other entries
        statistic = self._statistics.get(call.site.name)
        if statistic is None:
            zeros = torch.zeros(G.shape[0], width, width, dtype=_sum_dtype(G), device=G.device)
            statistic = Statistic(zeros, call.rows.shape[2], 0, 0, G.dtype)
            self._statistics[call.site.name] = statistic
        if not isinstance(statistic, Statistic) or statistic.G.shape[:2] != (G.shape[0], width):
            raise _does_not_add_up(call)
        _add_columns_(statistic.G, G, call.site, call.member.bias)
        statistic.rows += call.rows.shape[1]

    def _add_to_sketch(self, call: Call, width: int) -> None:
        groups, count, d = call.rows.shape
        for Z in dense_pieces(_widened(call.rows)):
            _check_finite(Z.square().sum(), call)
            sketch = self._statistics.get(call.site.name)
            if sketch is None:
                sketch = Sketch.empty(groups, width, d, self.max_dim, Z)
                self._statistics[call.site.name] = sketch
            if not isinstance(sketch, Sketch) or sketch.B.shape[::2] != (groups, width):
                raise _does_not_add_up(call)
            if call.site.biases:
                Z = F.pad(Z, (0, 1), value=float(call.member.bias is not None))
            sketch.add_(Z)
        self._statistics[call.site.name].rows += count

    def _gram(self, call: Call) -> Tensor:
        """``Z'Z`` of one call; maps that read the same rows one after the other share it."""
        weight, bias = call.site.weight is not None, call.member.bias is not None
        if self._last is not None:
            rows, *trained, G = self._last
            if rows is call.rows and trained == [weight, bias]:
                return G
        G = gram_with_bias(_widened(call.rows), weight=weight, bias=bias)
        self._last = (call.rows, weight, bias, G)
        return G


def collect(
    model: nn.Module,
    sites: Mapping[str, Site],
    batches: Iterable[Any],
    collector: GramCollector,
    *,
    batch_dim: int = 0,
    instead: Mapping[type[nn.Module], RowsFunction] | None = None,
) -> tuple[dict[str, Statistic | Sketch], dict[str, str]]:
    """The statistic of every site over some batches, and why a site has none.

    Args:
        model: as `unwrap` gives it; left without a trace.
        sites: from `find_sites`.
        batches: anything the model can be called with.
        collector: adds up.
        batch_dim: the dimension of the examples in a batch.
        instead: rows functions to use for these types, in place of the registered ones.
    """
    samples = visit(model, sites, batches, collector.add, batch_dim=batch_dim, instead=instead)
    statistics = collector.finish(samples)
    silent = sites.keys() - statistics.keys() - collector.skipped.keys()
    missing = dict.fromkeys(sorted(silent), "not called in the forward pass of the last refresh.")
    return statistics, collector.skipped | missing


def _check_finite(values: Tensor, call: Call) -> None:
    if not torch.isfinite(values).all():
        raise RefreshError(
            f"refresh: the inputs of {call.site} in batch {call.batch} are not finite; the "
            "previous preconditioner stays in force. Look for NaN or infinity in that batch or in "
            "the weights before that layer."
        )


def _does_not_add_up(call: Call) -> RefreshError:
    return RefreshError(
        f"refresh: {call.site} was called with rows of different shapes, now (groups, rows, d) = "
        f"{call.rows.shape}; they do not add up. Leave it out with exclude."
    )


def _add_columns_(total: Tensor, G: Tensor, site: Site, bias: int | None) -> None:
    """Add to the columns that one map uses; all of them, unless maps with other biases share."""
    if total.shape == G.shape:
        total.add_(G)
        return
    weight = total.shape[1] - len(site.biases)
    columns = torch.arange(weight + (bias is not None), device=total.device)
    if bias is not None:
        columns[-1] = weight + bias
    total[:, columns[:, None], columns] += G.to(total.dtype)


def _widened(rows: Rows) -> Rows:
    """Half-precision rows in float32; a product of half-precision numbers is kept in full."""
    if not is_dataclass(rows) or isinstance(rows, type):
        return rows
    half = {
        key: value.float()
        for key, value in vars(rows).items()
        if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    }
    return replace(rows, **half) if half else rows


def _sum_dtype(G: Tensor) -> torch.dtype:
    return torch.float32 if G.device.type == "mps" else torch.float64
