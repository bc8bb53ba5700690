"""Lagged products ``R[lag] = sum_p x[p] x[p + lag]'``: by shifted views, or from the spectrum."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import pi, prod

import torch
from torch import Tensor

from proxreplay.proximal.gram_axis import Lags

CHUNK = 1 << 19  # elements of a spectrum at a time: a cache holds them, and memory stays small


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

    ``Re S`` is symmetric and ``Im S`` is not, so one real product has both:
    ``[a; b]' [a + b; b - a] = Re S + Im S``.

    Transforms are products with a matrix: maps are small, so that a fast transform would gain
    little and lose the layout in which every frequency is one contiguous ``[rows, channels]``.

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
        _fourier(length, period, i == 0, X.dtype, X.device)
        for i, (length, period) in enumerate(zip(lengths, periods, strict=True))
    )
    Y = (first @ X.view(groups, lengths[0], -1)).view(groups, len(first) // 2, 2, -1)
    weights = _lag_weights(tuple(lags), periods, X.dtype, X.device)
    weights = weights.view(len(weights), -1, prod(periods[1:]))
    sums = X.new_zeros(groups, len(weights), channels * channels)
    for some, span in _chunks(groups, Y.shape[1], 2 * prod(periods[1:]) * rows * channels):
        S = _cross_spectrum(Y[some, span].flatten(0, 1), others, rows)
        sums[some] += weights[:, span].flatten(1) @ S.view(len(sums[some]), -1, channels**2)
    even, odd = sums.view(groups, 2, len(lags), channels, channels).unbind(1)
    return even + even.mT - odd + odd.mT


def _chunks(groups: int, frequencies: int, elements: int) -> Iterator[tuple[slice, slice]]:
    """Slices of groups and of frequencies with up to `CHUNK` elements, whole groups if they fit."""
    span = min(frequencies, max(1, CHUNK // elements))
    some = max(1, CHUNK // (elements * frequencies))
    for group in range(0, groups, some):
        for start in range(0, frequencies, span):
            yield slice(group, group + some), slice(start, start + span)


def _cross_spectrum(Y: Tensor, transforms: Sequence[Tensor], rows: int) -> Tensor:
    """``Re S + Im S`` at some frequencies of the first dimension and all of the others.

    Args:
        Y: transformed in its first dimension only, ``[f, re|im, (*lengths, rows, channels)]``.
        transforms: the matrices of the other dimensions.
        rows: number of rows.

    Returns:
        ``[(f, *others), channels, channels]``.
    """
    batch = len(Y)
    for D in transforms:
        Y = D @ Y.view(batch, D.shape[1], -1)
        batch *= len(D) // 2
    Y = Y.view(batch, 2, rows, -1)
    turned = torch.empty_like(Y)
    torch.add(Y[:, 0], Y[:, 1], out=turned[:, 0])
    torch.sub(Y[:, 1], Y[:, 0], out=turned[:, 1])
    return Y.flatten(1, 2).mT @ turned.flatten(1, 2)


@lru_cache(maxsize=256)
def _fourier(
    length: int, period: int, real: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The matrix of the transform: ``[(f, re|im), length]`` or ``[(f, re|im), (re|im, length)]``.

    Args:
        length: of the signal.
        period: of the transform.
        real: the signal is real, and half of the frequencies tell all.
        dtype: of the matrix.
        device: of the matrix.
    """
    frequencies = period // 2 + 1 if real else period
    angle = torch.outer(torch.arange(frequencies), torch.arange(length)) % period
    angle = angle.double() * (2 * pi / period)
    cosine, sine = angle.cos(), angle.sin()
    D = torch.stack([cosine, -sine], dim=1)
    if not real:
        D = torch.stack([D, torch.stack([sine, cosine], dim=1)], dim=2)
    return D.reshape(2 * frequencies, -1).to(device, dtype)


@lru_cache(maxsize=256)
def _lag_weights(
    lags: tuple[Lags, ...], periods: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Half the mean over frequencies of cos and sin of ``f.lag``, ``[(cos|sin, lags), f]``."""
    angle = torch.zeros(len(lags), 1, dtype=torch.double)
    for i, period in enumerate(periods):
        frequencies = torch.arange(period // 2 + 1 if i == 0 else period)
        steps = torch.tensor([lag[i] for lag in lags])
        here = (torch.outer(steps, frequencies) % period).double() * (2 * pi / period)
        angle = (angle[:, :, None] + here[:, None, :]).flatten(1)
    first = torch.arange(periods[0] // 2 + 1)
    once = (first == 0) | (2 * first == periods[0])
    weight = torch.where(once, 0.5, 1.0).double() / prod(periods)
    weight = weight.repeat_interleave(prod(periods[1:]))
    return (torch.cat([angle.cos(), angle.sin()]) * weight).to(device, dtype)
