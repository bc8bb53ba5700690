"""The statistic of every site over some examples.

`GramCollector` takes rows wherever they come from; `Source` gets them by running the model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proxreplay.errors import RefreshError
from proxreplay.proximal.gram.patches import PatchRows
from proxreplay.proximal.gram.rows import DenseRows, Roots, Rows, widened
from proxreplay.proximal.gram.scratch import reusing
from proxreplay.proximal.gram.sums import GramSum, gram_with_bias
from proxreplay.proximal.layers.calling import Caller
from proxreplay.proximal.layers.capture import Call, visit
from proxreplay.proximal.layers.registry import RowsFunction
from proxreplay.proximal.layers.sites import Site
from proxreplay.proximal.layers.verify import Verifier
from proxreplay.proximal.statistics.few import FewRows, most_rows
from proxreplay.proximal.statistics.sketch import Sketch, dense_pieces
from proxreplay.proximal.statistics.statistic import Statistic

WORTH = 2  # times as many rows as columns are waited for: then a product is a large one


class GramCollector:
    """Adds up ``Z'Z`` for every site.

    What is added up over batches is a `GramSum` for every site and bias; the matrices are put
    together once, by `finish`. Whether all rows are finite is asked once per batch, so that a
    device is not waited for at every layer.

    Args:
        max_dim: sites with more columns get a `Sketch`, or are skipped and named; no ``d x d`` is
            made for them.
        sketch: whether the rule can do something with a sketch.
        wait: whether calls of few rows wait until there are enough of them for one product; sums
            are then in the precision of the rows.
    """

    def __init__(self, max_dim: int, *, sketch: bool = False, wait: bool = False) -> None:
        self.max_dim = max_dim
        self.sketch = sketch
        self.wait = wait
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
        statistics: dict[str, Statistic | Sketch] = dict(self._sketches)
        for name, sums in list(self._sums.items()):
            few = sums.few_rows()
            if few is not None:
                del self._sums[name]
                self._witnesses.append(_Witness(sums.site, 0, few.B.square().sum()))
                statistics[name] = replace(few, samples=samples)
                continue
            self._witnesses += [_Witness(sums.site, 0, added.energy) for added in sums.flush()]
        self._check_finite()
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

    def state(self) -> dict[str, Any]:
        """Tensors, numbers and strings: everything that is added up, and what waits."""
        return {
            "sums": {name: sums.state() for name, sums in self._sums.items()},
            "sketches": {
                name: {**one.state(), "samples": one.samples}
                for name, one in self._sketches.items()
            },
            "picked": {name: list(two) for name, two in self._picked.items()},
            "skipped": dict(self.skipped),
            "energies": [[w.site.name, w.batch, w.energy] for w in self._witnesses],
        }

    def load_state(self, state: Mapping[str, Any], sites: Mapping[str, Site]) -> None:
        """Go on from what `state` gave."""
        self._sums = {
            name: _SiteSum.from_state(sites[name], one, wait=self.wait, few=self.sketch)
            for name, one in state["sums"].items()
        }
        self._sketches = {name: Sketch.from_state(one) for name, one in state["sketches"].items()}
        for name, sketch in self._sketches.items():
            sketch.samples = state["sketches"][name]["samples"]
        self._picked = {name: (two[0], two[1]) for name, two in state["picked"].items()}
        self.skipped = dict(state["skipped"])
        self._witnesses = [_Witness(sites[n], batch, e) for n, batch, e in state["energies"]]

    def _add_gram(self, call: Call) -> None:
        if call.site.name in self._sketches:
            raise _does_not_add_up(call)
        sums = self._sums.setdefault(
            call.site.name, _SiteSum(call.site, wait=self.wait, few=self.sketch)
        )
        added = sums.add(call)
        if added is not None and call.site.weight is not None:
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

    def __init__(self, site: Site, *, wait: bool, few: bool) -> None:
        self.site = site
        self.few = few
        self.sums: dict[int | None, GramSum] = {}
        self.waiting: dict[int | None, list[Rows]] = {}
        self.dtype = torch.float32
        self.wait = wait

    def add(self, call: Call) -> GramSum | None:
        """Take the rows of a call; the sum they went to, or None if they wait for more."""
        bias, rows = call.member.bias, call.rows
        known = [one.shape for one in self.sums.values()]
        known += [some[0].shape for some in self.waiting.values()]
        if any(shape[::2] != rows.shape[::2] for shape in known):
            raise _does_not_add_up(call)
        kept = rows.kept() if self._waits(rows) else None
        if kept is None:
            return self._add(bias, rows)
        some = self.waiting.setdefault(bias, [])
        if some and some[0].geometry != kept.geometry:
            self._add_waiting(bias)
            some = self.waiting.setdefault(bias, [])
        some.append(kept)
        enough = WORTH * rows.shape[2] if self.wait else most_rows(self._width(rows)) + 1
        if sum(one.shape[1] for one in some) < enough:
            return None
        return self._add_waiting(bias)

    def _waits(self, rows: Rows) -> bool:
        """Whether rows are few, so that they are worth more together."""
        few = rows.shape[1] < rows.shape[2] * (WORTH if self.wait else 1)
        if self.site.weight is None or not few:
            return False
        return self.wait or (not self.sums and self._may_stay(rows))

    def _may_stay(self, rows: Rows) -> bool:
        """Whether rows may be kept as they are."""
        site, width = self.site, self._width(rows)
        one = len(site.members) == 1 and not site.mixed and not site.members[0].map
        dense = self.few and isinstance(rows, DenseRows) and rows.shape[0] == 1
        return dense and one and rows.shape[1] <= most_rows(width)

    def _width(self, rows: Rows) -> int:
        return self.site.width(rows.shape[2])

    def few_rows(self) -> FewRows | None:
        """All rows, where they are few and none has been added up; nothing is left then."""
        if self.sums or len(self.waiting) != 1:
            return None
        (bias, some), *_ = self.waiting.items()
        count = sum(one.shape[1] for one in some)
        if not all(map(self._may_stay, some)) or count > most_rows(self._width(some[0])):
            return None
        rows = some[0].joined(some[1:])
        Z = widened(rows.dense())
        if self.site.biases:
            Z = F.pad(Z, (0, 1), value=float(bias is not None))
            if bias is not None and isinstance(rows, DenseRows) and rows.roots is not None:
                Z[:, :, -1] = rows.roots.each
        return replace(FewRows.of(Z, some[0].shape[2]), rows=rows.mass)

    def _add(self, bias: int | None, rows: Rows) -> GramSum:
        if bias not in self.sums:
            self.sums[bias] = GramSum(None if self.wait else torch.float64)
        weight = self.site.weight is not None
        added = self.sums[bias].add(rows, gram=weight, total=bias is not None)
        self.dtype = added.rows_dtype
        return added

    def _add_waiting(self, bias: int | None) -> GramSum:
        first, *rest = self.waiting.pop(bias)
        return self._add(bias, first.joined(rest) if rest else first)

    def state(self) -> dict[str, Any]:
        """Sums and what waits, by bias; -1 stands for none."""
        return {
            "sums": {_key(bias): added.state() for bias, added in self.sums.items()},
            "waiting": {
                _key(bias): [one.state() for one in some] for bias, some in self.waiting.items()
            },
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    @classmethod
    def from_state(cls, site: Site, state: Mapping[str, Any], *, wait: bool, few: bool) -> Self:
        """The inverse of `state`."""
        own = cls(site, wait=wait, few=few)
        dtype = None if wait else torch.float64
        own.sums = {
            _bias(key): GramSum.from_state(one, dtype) for key, one in state["sums"].items()
        }
        own.waiting = {
            _bias(key): [rows_from_state(one) for one in some]
            for key, some in state["waiting"].items()
        }
        own.dtype = getattr(torch, state["dtype"])
        return own

    def flush(self) -> list[GramSum]:
        """Add up what waits; the sums it went to."""
        return [self._add_waiting(bias) for bias in list(self.waiting)]

    def statistic(self, samples: int) -> Statistic:
        """What is known of all rows."""
        grams = {
            bias: gram_with_bias(added, weight=self.site.weight is not None, bias=bias is not None)
            for bias, added in self.sums.items()
        }
        d = next(iter(self.sums.values())).shape[2]
        width = self.site.width(d)
        first = next(iter(grams.values()))
        if len(grams) > 1 or first.shape[1] < width:
            total = first.new_zeros(len(first), width, width)
            for bias, G in grams.items():
                _add_columns_(total, G, self.site, bias)
            first = total
        return Statistic(
            first, d, sum(added.mass for added in self.sums.values()), samples, self.dtype
        )


@dataclass(frozen=True)
class Source:
    """Where the statistics of a refresh come from: the rows of the model's layers, on batches."""

    max_dim: int  # sites with more columns get a `Sketch`, or none
    sketch: bool = False  # whether the rule can do something with a sketch
    # rows functions to use for these types, in place of the registered ones
    instead: Mapping[type[nn.Module], RowsFunction] = field(default_factory=dict)

    def collect(
        self,
        model: nn.Module,
        sites: Mapping[str, Site],
        batches: Iterable[Any],
        batch_dim: int,
        verifier: Verifier | None = None,
        call: Caller | None = None,
    ) -> tuple[dict[str, Statistic | Sketch], dict[str, str]]:
        """The statistic of every site over some batches, and why a site has none.

        Args:
            model: as `unwrap` gives it; left without a trace.
            sites: from `find_sites`.
            batches: anything the model can be called with.
            batch_dim: the dimension of the examples in a batch.
            verifier: looks at the first call of every layer.
            call: how the model is called with a batch; None for the usual way.
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
                call=call,
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


def _key(bias: int | None) -> int:
    return -1 if bias is None else bias


def _bias(key: int) -> int | None:
    return None if key < 0 else key


def rows_from_state(state: Mapping[str, Any]) -> Rows:
    """Rows that wait, from what their ``state()`` gave."""
    if "Z" in state:
        return DenseRows(state["Z"], Roots.from_state(state))
    padding = tuple((before, after) for before, after in state["padding"])
    kernel, stride, dilation = (tuple(state[key]) for key in ("kernel", "stride", "dilation"))
    geometry = (kernel, stride, dilation, state["groups"], padding)
    return PatchRows(state["x"], *geometry, Roots.from_state(state))


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
