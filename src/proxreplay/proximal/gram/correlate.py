"""Lagged products ``R[lag] = sum_p x[p] x[p + lag]'``: by shifted views, or from the spectrum."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import pi, prod

import torch
from torch import Tensor

from proxreplay.proximal.gram.axis import Lags
from proxreplay.proximal.gram.scratch import scratch

CHUNK = 1 << 20  # elements of a spectrum at a time: a cache holds them, and memory stays small


def correlate_by_shifts(X: Tensor, lags: Sequence[Lags]) -> Tensor:
    """``R[lag] = sum_p x[p] x[p + lag]'`` by products of shifted views.

    All places and rows are one long dimension, in which a lag is a shift by a constant number of
    rows. Zeros after every dimension but the first keep products that wrap around at 0.

    Args:
        X: ``[groups, *lengths, rows, channels]``, each length but the first ending in as many zeros
            as its largest lag.
        lags: of which the first that is not 0 is positive.

    Returns:
        ``[groups, lags, channels, channels]``.
    """
    *_, rows, _ = X.shape
    lengths = X.shape[1:-2]
    M = X.flatten(1, -2)
    total = M.shape[1]
    out = []
    for lag in lags:
        shift = 0
        for length, step in zip(lengths, lag, strict=True):
            shift = shift * length + step
        shift *= rows
        out.append(M[:, : max(0, total - shift)].mT @ M[:, shift:])
    return torch.stack(out, dim=1)


def correlate_by_spectrum(X: Tensor, lags: Sequence[Lags]) -> Tensor:
    """``R[lag] = sum_p x[p] x[p + lag]'`` from the spectrum (Wiener-Khinchin).

    With ``x^(f) = a + ib`` the transform with periods long enough that no lag wraps around, and
    ``S(f) = sum_rows conj(x^) x^' = (a'a + b'b) + i (a'b - b'a)``,

        R[lag] = mean_f  cos(f.lag) Re S(f) - sin(f.lag) Im S(f).

    ``Re S`` is symmetric and ``Im S`` antisymmetric, so one real sum ``T`` has both:
    ``T = a'(a + b) + b'(b - a) = Re S + Im S`` and ``T' = Re S - Im S``. Twice the above is then
    the mean of ``(cos - sin) T + ((cos + sin) T)'``.

    Transforms are products with a matrix, from the last dimension to the first: maps are small, so
    that a fast transform would gain little and lose the layout in which every frequency is one
    contiguous ``[rows, channels]``. The last of them is one product for all other frequencies.

    Args:
        X: ``[groups, *lengths, rows, channels]``.
        lags: as above.

    Returns:
        ``[groups, lags, channels, channels]``.
    """
    groups, *lengths, rows, channels = X.shape
    longest = [max(abs(lag[i]) for lag in lags) for i in range(len(lengths))]
    periods = tuple(length + lag for length, lag in zip(lengths, longest, strict=True))
    first, *others = (
        _fourier(length, period, last, X.dtype, X.device)
        for length, period, last in zip(lengths, periods, _lasts(len(lengths)), strict=True)
    )
    Y, frequencies = X, 1
    for D in reversed(others):
        Y, frequencies = _transformed(D, Y, frequencies, rows * channels)
    Y = Y.view(groups, first.shape[1], frequencies, rows * channels)
    weights = _lag_weights(tuple(lags), periods, X.dtype, X.device)
    weights = weights.view(len(weights), len(first) // 2, frequencies)
    sums = X.new_zeros(groups, len(weights), channels * channels)
    for some, span in _chunks(groups, frequencies, len(first) * rows * channels):
        S = _cross_spectrum(first, Y[some, :, span], rows)
        some_weights = weights[:, :, span].flatten(1)
        sums[some] += some_weights @ S.view(len(sums[some]), -1, channels**2)
    there, back = sums.view(groups, 2, len(lags), channels, channels).unbind(1)
    return there + back.mT


def _lasts(dims: int) -> list[bool]:
    """Which dimension is transformed first, as real numbers: the last."""
    return [i == dims - 1 for i in range(dims)]


def _transformed(D: Tensor, Y: Tensor, frequencies: int, each: int) -> tuple[Tensor, int]:
    """One dimension transformed, ``[(batch), (re|im, f), (frequencies so far, each)]``."""
    before = Y.view(-1, D.shape[1], frequencies * each)
    after = scratch(f"transform to {frequencies}", (len(before), len(D), before.shape[2]), Y)
    torch.matmul(D, before, out=after)
    return after, frequencies * (len(D) // 2)


def _chunks(groups: int, frequencies: int, elements: int) -> Iterator[tuple[slice, slice]]:
    """Slices of groups and of frequencies with up to `CHUNK` elements, whole groups if they fit."""
    span = min(frequencies, max(1, CHUNK // elements))
    some = max(1, CHUNK // (elements * frequencies))
    for group in range(0, groups, some):
        for start in range(0, frequencies, span):
            yield slice(group, group + some), slice(start, start + span)


def _cross_spectrum(D: Tensor, Y: Tensor, rows: int) -> Tensor:
    """``Re S + Im S`` at all frequencies of the first dimension and some of the others.

    Args:
        D: the matrix of the first dimension, which is transformed last.
        Y: transformed in the others, ``[groups, (length, re|im), f, (rows, channels)]``.
        rows: number of rows.

    Returns:
        ``[groups * (f of the first, f), channels, channels]``.
    """
    groups, _, some, each = Y.shape
    spectrum = scratch("spectrum", (groups, len(D), some * each), Y)
    if groups == 1:  # on several threads much faster than a batch of one
        torch.mm(D, Y[0].flatten(1), out=spectrum[0])
    else:
        torch.matmul(D, Y.flatten(2), out=spectrum)
    ab = spectrum.view(groups, 2, len(D) // 2 * some, rows, -1)
    turned = scratch("turned", ab.shape, ab)
    torch.add(ab[:, 0], ab[:, 1], out=turned[:, 0])
    torch.sub(ab[:, 1], ab[:, 0], out=turned[:, 1])
    S = ab[:, 0].mT @ turned[:, 0]
    return S.flatten(0, 1).baddbmm_(ab[:, 1].mT.flatten(0, 1), turned[:, 1].flatten(0, 1))


@lru_cache(maxsize=256)
def _fourier(
    length: int, period: int, real: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The matrix of the transform: ``[(re|im, f), length]`` or ``[(re|im, f), (length, re|im)]``.

    Of a ``real`` signal half of the frequencies tell all.
    """
    frequencies = period // 2 + 1 if real else period
    angle = torch.outer(torch.arange(frequencies), torch.arange(length)) % period
    angle = angle.double() * (2 * pi / period)
    cosine, sine = angle.cos(), angle.sin()
    D = torch.stack([cosine, -sine])
    if not real:
        D = torch.stack([D, torch.stack([sine, cosine])], dim=3)
    return D.reshape(2 * frequencies, -1).to(device, dtype)


@lru_cache(maxsize=256)
def _lag_weights(
    lags: tuple[Lags, ...], periods: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Half the mean over frequencies as weights, ``[(cos - sin | cos + sin, lags), f]``."""
    angle = torch.zeros(len(lags), 1, dtype=torch.double)
    for i, (period, last) in enumerate(zip(periods, _lasts(len(periods)), strict=True)):
        frequencies = torch.arange(period // 2 + 1 if last else period)
        steps = torch.tensor([lag[i] for lag in lags])
        here = (torch.outer(steps, frequencies) % period).double() * (2 * pi / period)
        angle = (angle[:, :, None] + here[:, None, :]).flatten(1)
    half = torch.arange(periods[-1] // 2 + 1)
    once = (half == 0) | (2 * half == periods[-1])
    weight = torch.where(once, 0.5, 1.0).double() / prod(periods)
    weight = weight.repeat(prod(periods[:-1]))
    cosine, sine = angle.cos(), angle.sin()
    return (torch.cat([cosine - sine, cosine + sine]) * weight).to(device, dtype)
