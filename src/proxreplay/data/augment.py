"""The tensor work behind `Transform`: crops, mirror images and normalisation of whole batches."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F


def normalise(
    inputs: Tensor, scale: float, mean: tuple[float, ...], std: tuple[float, ...]
) -> Tensor:
    """``(x / scale - mean) / std`` as ``(x - scale mean) / (scale std)``, per channel."""
    dtype = inputs.dtype if inputs.is_floating_point() else torch.float32
    channels = inputs.shape[1] if inputs.ndim > 1 else 1
    last = _is_channels_last(inputs)
    shape = (channels, 1, inputs.shape[3]) if last else (-1, *[1] * (inputs.ndim - 2))
    shift, divisor = _constants(scale, mean, std, shape, dtype, inputs.device)
    return (inputs - shift).div_(divisor)


def random_view(
    images: Tensor, size: tuple[int, int], padding: int, *, flip: bool, generator: torch.Generator
) -> Tensor:
    """A random crop of every padded image, mirrored half of the time with ``flip``."""
    n, device = len(images), generator.device
    free = [images.shape[2 + i] + 2 * padding - size[i] + 1 for i in (0, 1)]
    top = torch.randint(free[0], (n,), generator=generator, device=device)
    left = torch.randint(free[1], (n,), generator=generator, device=device)
    mirror = torch.randint(2, (n,), generator=generator, device=device) if flip else None
    return crop_and_flip(images, top, left, mirror, size, padding)


def center_crop(images: Tensor, size: tuple[int, int]) -> Tensor:
    """The middle of every image ``[n, channels, height, width]``, a view."""
    top, left = (round((images.shape[2 + i] - size[i]) / 2) for i in (0, 1))
    return images[:, :, top : top + size[0], left : left + size[1]]


def crop_and_flip(
    images: Tensor,
    top: Tensor,
    left: Tensor,
    mirror: Tensor | None,
    size: tuple[int, int],
    padding: int = 0,
) -> Tensor:
    """``out[i, c, y, x] = padded[i, c, top[i] + y, left[i] + x]``, then mirrored where asked.

    One buffer holds the padded images and, behind them, their mirror images. Every line of the
    result is a run of consecutive elements of it, so one selection of rows from its overlapping
    windows gives everything.

    Args:
        images: ``[n, channels, height, width]``, any dtype; channels_last is kept.
        top: ``[n]``, first line of the crop in the padded image.
        left: ``[n]``, first column of the crop in the padded image.
        mirror: ``[n]``, 1 where the crop is mirrored and 0 elsewhere; None for nowhere.
        size: height and width of the crop.
        padding: zeros on every side.
    """
    n, channels, height, width = images.shape
    last = _is_channels_last(images)
    planes, unit = (1, channels) if last else (channels, 1)
    source = (images.permute(0, 2, 3, 1) if last else images).reshape(
        n * planes, height, width, unit
    )
    buffer = _padded(source, padding, mirrored=mirror is not None)
    tall, wide = buffer.shape[1:3]
    if mirror is not None:
        # the mirror image of a crop is a crop of the mirror image, as far from the other side
        behind = n * planes * tall * wide
        left = torch.addcmul(left, mirror, torch.rsub(left, behind + wide - size[1], alpha=2))
    shift = torch.add(left, top, alpha=wide).to(images.device).view(n, 1, 1)
    starts = _line_starts(n, planes, size[0], tall, wide * unit, images.device)
    starts = torch.add(starts, shift, alpha=unit).flatten()
    run = size[1] * unit
    windows = buffer.view(-1).as_strided((max(0, buffer.numel() - run + 1), run), (1, 1))
    crops = windows.index_select(0, starts)
    if last:
        return crops.view(n, *size, channels).permute(0, 3, 1, 2)
    return crops.view(n, channels, *size)


def _padded(source: Tensor, padding: int, *, mirrored: bool) -> Tensor:
    """Images ``[n, height, width, unit]`` between zeros, and behind them their mirror images."""
    padded = F.pad(source, (0, 0, *[padding] * 4)) if padding else source.contiguous()
    return torch.cat((padded, padded.flip(2))) if mirrored else padded


@lru_cache(maxsize=32)
def _line_starts(
    n: int, planes: int, height: int, tall: int, wide: int, device: torch.device
) -> Tensor:
    """Where the first ``height`` lines of every plane begin, ``[n, planes, height]``."""
    plane = torch.arange(n * planes, device=device).view(n, planes, 1)
    return (plane * tall + torch.arange(height, device=device)) * wide


@lru_cache(maxsize=32)
def _constants(
    scale: float,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """``scale mean`` and ``scale std`` as tensors of a shape that meets the inputs.

    A channels_last batch gets them as whole lines in its own memory order: broadcasting one number
    per channel along its lines would cost four times as much.
    """
    tensors = []
    for values in (mean, std):
        constant = torch.tensor(values, dtype=dtype, device=device) * scale
        if -1 in shape:
            tensors.append(constant.view(shape))
        else:
            channels, _, width = shape
            line = constant.expand(width, channels).contiguous()
            tensors.append(line.t().view(channels, 1, width))
    return tensors[0], tensors[1]


def _is_channels_last(images: Tensor) -> bool:
    return (
        images.ndim == 4
        and images.shape[1] > 1
        and images.is_contiguous(memory_format=torch.channels_last)
        and not images.is_contiguous()
    )
