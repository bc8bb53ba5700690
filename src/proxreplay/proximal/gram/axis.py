"""The geometry of one dimension of a convolution: phases, lags between taps, and edges."""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product

Lags = tuple[int, ...]  # one lag per dimension
Slab = tuple[int, int]  # a place, and that place plus a lag


@dataclass(frozen=True)
class Axis:
    """One dimension of a convolution as windows of stride 1 over the phases of its input."""

    size: int  # length of the input, without padding
    before: int  # zeros in front of it
    positions: int  # length of the output
    kernel: int  # number of taps
    stride: int  # as the layer's
    dilation: int  # as the layer's

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """``(start, length)`` of every phase that some tap reads: ``x[start::stride]``.

        Only elements inside the window of at least one tap are kept.
        """
        spans = []
        for phase in sorted({i % self.stride for i in self._reach}):
            shifts = [i // self.stride for i in self._reach if i % self.stride == phase]
            skipped = phase - self.before
            first = max(-(skipped // self.stride), shifts[0])
            end = min((self.size - 1 - skipped) // self.stride, shifts[-1] + self.positions - 1) + 1
            spans.append((self.stride * first + skipped, max(0, end - first)))
        return tuple(spans)

    @cached_property
    def taps(self) -> tuple[tuple[int, int], ...]:
        """``(phase, shift)``: at output ``o`` a tap reads element ``o + shift`` of its phase."""
        phases = sorted({i % self.stride for i in self._reach})
        taps = []
        for i in self._reach:
            phase = phases.index(i % self.stride)
            taps.append((phase, (i - self.before - self.spans[phase][0]) // self.stride))
        return tuple(taps)

    @property
    def _reach(self) -> range:
        return range(0, self.kernel * self.dilation, self.dilation)

    @cached_property
    def length(self) -> int:
        """Of the longest phase."""
        return max(length for _, length in self.spans)

    @cached_property
    def lags(self) -> tuple[int, ...]:
        """The distances between taps, ascending and symmetric about 0."""
        return tuple(sorted({t - s for (_, s), (_, t) in product(self.taps, self.taps)}))

    @cached_property
    def outside(self) -> tuple[tuple[Slab, ...], ...]:
        """For every pair of taps the places that its window leaves out."""
        pairs = []
        for (a, s), (b, t) in product(self.taps, self.taps):
            lag = t - s
            first, end = max(0, -lag), min(self.spans[a][1], self.spans[b][1] - lag)
            places = chain(range(first, min(s, end)), range(max(s + self.positions, first), end))
            pairs.append(tuple((p, p + lag) for p in places))
        return tuple(pairs)

    @cached_property
    def slabs(self) -> tuple[Slab, ...]:
        """All that some window leaves out; with ``(p, q)`` also ``(q, p)``."""
        return tuple(sorted(set(chain.from_iterable(self.outside))))

    @cached_property
    def slab_phases(self) -> slice:
        """The phases from the first to the last that a slab belongs to."""
        pairs = zip(product(self.taps, self.taps), self.outside, strict=True)
        phases = {a for ((a, _), _), outside in pairs if outside}
        return slice(min(phases, default=0), max(phases, default=-1) + 1)

    @property
    def phases(self) -> int:
        """Number of phases that some tap reads."""
        return len(self.spans)

    @cached_property
    def atoms(self) -> dict[int | Slab, int]:
        """The lags and the slabs, numbered."""
        atoms: list[int | Slab] = [*self.lags, *self.slabs]
        return {atom: number for number, atom in enumerate(atoms)}

    @cached_property
    def mirror(self) -> tuple[int, ...]:
        """For every atom the number of the one with both places exchanged."""
        turned = ((atom[1], atom[0]) if isinstance(atom, tuple) else -atom for atom in self.atoms)
        return tuple(self.atoms[atom] for atom in turned)

    @property
    def flat(self) -> bool:
        """Whether places are rows like any others: no patches overlap, nothing is left out."""
        return len(self.atoms) == 1
