"""The statistic of every site over some examples.

`GramCollector` takes rows wherever they come from; `Source` gets them by running the model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proxreplay.errors import RefreshError
from proxreplay.proximal.gram.scratch import reusing
from proxreplay.proximal.gram.sums import GramSum, gram_with_bias
from proxreplay.proximal.layers.capture import Call, visit
from proxreplay.proximal.layers.registry import RowsFunction
from proxreplay.proximal.layers.sites import Site
from proxreplay.proximal.layers.verify import Verifier
from proxreplay.proximal.statistics.sketch import Sketch, dense_pieces
from proxreplay.proximal.statistics.statistic import Statistic


class GramCollector:
    """Adds up ``Z'Z`` for every site.

    What is added up over batches is a `GramSum` for every site and bias; the matrices are put
    together once, by `finish`. Whether all rows are finite is asked once a batch, so that a device
    is not waited for at every layer.

    Args:
        max_dim: sites with more columns get a `Sketch`, or are skipped and named; no ``d x d`` is
            made for them.
        sketch: whether the rule can do something with a sketch.
    """

    def __init__(self, max_dim: int, *, sketch: bool = False) -> None:
        self.max_dim = max_dim
        self.sketch = sketch
        self.skipped: dict[str, str] = {}
        self._sums: dict[str, _SiteSum] = {}
        self._sketches: dict[str, Sketch] = {}
        self._picked: dict[str, tuple[Tensor, int]] = {}
        self._witnesses: list[_Witness] = []

    def add(self, call: Call) -> None:
        """Take the rows of one call."""
        if self._witnesses and self._witnesses[0].batch != call.batch:
            self._check_finite()
        width = call.site.width(call.rows.shape[2])
        if call.site.mixed and call.member.lookup:
            before, rows = self._picked.get(call.site.name, (0, 0))
            counts = call.rows.gram()[:, 0, 0]
            total = before + counts.to(_sum_dtype(counts))
            self._picked[call.site.name] = (total, rows + call.rows.shape[1])
        elif width <= self.max_dim:
            self._add_gram(call)
        elif self.sketch and len(call.site.biases) < 2 and not call.site.mixed:
            self._add_to_sketch(call, width)
        else:
            self.skipped[call.site.name] = f"d = {width} is more than max_dim = {self.max_dim}."

    def finish(self, samples: int) -> dict[str, Statistic | Sketch]:
        """The statistics by site, given the number of examples."""
        self._check_finite()
        statistics: dict[str, Statistic | Sketch] = dict(self._sketches)
        for sketch in self._sketches.values():
            sketch.samples = samples
        for name in list(self._sums):
            statistics[name] = self._sums.pop(name).statistic(samples)  # its memory is free now
        for name, (picked, rows) in self._picked.items():
            tied = statistics.get(name)
            if isinstance(tied, Statistic):
                tied.picked = picked
                tied.rows += rows
            else:
                self.skipped.setdefault(name, "only picked from in the last refresh.")
        return statistics

    def _add_gram(self, call: Call) -> None:
        if call.site.name in self._sketches:
            raise _does_not_add_up(call)
        sums = self._sums.setdefault(call.site.name, _SiteSum(call.site))
        added = sums.add(call)
        if call.site.weight is not None:
            self._witnesses.append(_Witness(call.site, call.batch, added.energy))

    def _add_to_sketch(self, call: Call, width: int) -> None:
        groups, count, d = call.rows.shape
        if call.site.name in self._sums:
            raise _does_not_add_up(call)
        for Z in dense_pieces(call.rows):
            self._witnesses.append(_Witness(call.site, call.batch, Z.square().sum()))
            self._check_finite()  # before a decomposition meets it
            sketch = self._sketches.get(call.site.name)
            if sketch is None:
                sketch = Sketch.empty(groups, width, d, self.max_dim, Z)
                self._sketches[call.site.name] = sketch
            if sketch.B.shape[::2] != (groups, width):
                raise _does_not_add_up(call)
            if call.site.biases:
                Z = F.pad(Z, (0, 1), value=float(call.member.bias is not None))
            sketch.add_(Z)
        self._sketches[call.site.name].rows += count

    def _check_finite(self) -> None:
        """Look at the witnesses of a batch together; name the first call that is not finite."""
        if not self._witnesses:
            return
        device = self._witnesses[0].energy.device
        energies = [one.energy.to(device, _sum_dtype(one.energy)) for one in self._witnesses]
        finite = torch.isfinite(torch.stack(energies)).tolist()
        witnesses, self._witnesses = self._witnesses, []
        if not all(finite):
            first = witnesses[finite.index(False)]
            raise RefreshError(
                f"refresh: the inputs of {first.site} in batch {first.batch} are not finite; the "
                "previous preconditioner stays in force. Look for NaN or infinity in that batch or "
                "in the weights before that layer."
            )


@dataclass(frozen=True)
class _Witness:
    """Whether a call's rows are finite; not the rows, which would keep every layer's inputs."""

    site: Site
    batch: int
    energy: Tensor


class _SiteSum:
    """The sums of one site: one for each bias, as maps that share a weight may add others."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.sums: dict[int | None, GramSum] = {}
        self.dtype = torch.float32

    def add(self, call: Call) -> GramSum:
        """Take the rows of a call; the sum they went to."""
        bias, rows = call.member.bias, call.rows
        if any(added.shape[::2] != rows.shape[::2] for added in self.sums.values()):
            raise _does_not_add_up(call)
        if bias not in self.sums:
            self.sums[bias] = GramSum(torch.float64)
        weight = self.site.weight is not None
        added = self.sums[bias].add(rows, gram=weight, total=bias is not None)
        self.dtype = added.rows_dtype
        return added

    def statistic(self, samples: int) -> Statistic:
        """What is known of all rows."""
        grams = {
            bias: gram_with_bias(added, weight=self.site.weight is not None, bias=bias is not None)
            for bias, added in self.sums.items()
        }
        shapes = [added.shape for added in self.sums.values()]
        width = self.site.width(shapes[0][2])
        first = next(iter(grams.values()))
        if len(grams) > 1 or first.shape[1] < width:
            total = first.new_zeros(len(first), width, width)
            for bias, G in grams.items():
                _add_columns_(total, G, self.site, bias)
            first = total
        return Statistic(
            first, shapes[0][2], sum(rows for _, rows, _ in shapes), samples, self.dtype
        )


@dataclass(frozen=True)
class Source:
    """Where the statistics of a refresh come from: the rows of the model's layers, on batches.

    Args:
        max_dim: sites with more columns get a `Sketch`, or none.
        sketch: whether the rule can do something with a sketch.
        instead: rows functions to use for these types, in place of the registered ones.
    """

    max_dim: int
    sketch: bool = False
    instead: Mapping[type[nn.Module], RowsFunction] = field(default_factory=dict)

    def collect(
        self,
        model: nn.Module,
        sites: Mapping[str, Site],
        batches: Iterable[Any],
        batch_dim: int,
        verifier: Verifier | None = None,
    ) -> tuple[dict[str, Statistic | Sketch], dict[str, str]]:
        """The statistic of every site over some batches, and why a site has none.

        Args:
            model: as `unwrap` gives it; left without a trace.
            sites: from `find_sites`.
            batches: anything the model can be called with.
            batch_dim: the dimension of the examples in a batch.
            verifier: looks at the first call of every layer.
        """
        collector = GramCollector(self.max_dim, sketch=self.sketch)
        with reusing():
            samples = visit(
                model,
                sites,
                batches,
                collector.add,
                batch_dim=batch_dim,
                instead=self.instead,
                verifier=verifier,
            )
        statistics = collector.finish(samples)
        silent = sites.keys() - statistics.keys() - collector.skipped.keys()
        missing = dict.fromkeys(
            sorted(silent), "not called in the forward pass of the last refresh."
        )
        wrong = {} if verifier is None else verifier.wrong
        for name in wrong:
            statistics.pop(name, None)
        return statistics, collector.skipped | missing | wrong


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


def _sum_dtype(G: Tensor) -> torch.dtype:
    return torch.float32 if G.device.type == "mps" else torch.float64
