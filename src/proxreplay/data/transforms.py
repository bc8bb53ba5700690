"""From stored inputs to what the network sees: random crop and flip, scaling, normalisation.

All on whole batches, in the stored dtype until the last step: images are cropped and mirrored as
uint8 and become floats once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from proxreplay.errors import InputError


@dataclass(frozen=True)
class Transform:
    """``(x / scale - mean) / std``, a channel at a time; random changes only with a generator.

    With a generator, every image is padded with zeros (black, before normalisation), cropped at a
    random place and mirrored with probability 1/2. Without one, the centre is taken.

    Args:
        scale: the stored value that stands for 1.
        mean: one number a channel, or one for all.
        std: one number a channel, or one for all.
        crop_padding: zeros added on every side before a random crop.
        flip: whether images are mirrored, left for right, half of the time.
        crop_size: height and width of the crop; None for those of the image.

    >>> cifar = Transform(scale=255.0, mean=(0.5,), std=(0.25,), crop_padding=4, flip=True)
    >>> images = torch.zeros(10, 3, 32, 32, dtype=torch.uint8)
    >>> cifar(images, torch.Generator()).shape
    torch.Size([10, 3, 32, 32])
    """

    scale: float = 1.0
    mean: Sequence[float] = (0.0,)
    std: Sequence[float] = (1.0,)
    crop_padding: int = 0
    flip: bool = False
    crop_size: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", tuple(self.mean))
        object.__setattr__(self, "std", tuple(self.std))
        if not self.scale > 0 or not all(value > 0 for value in self.std):
            raise InputError(
                f"Transform: scale={self.scale}, std={self.std}; give numbers above 0."
            )
        if not self.mean or not self.std:
            raise InputError(
                f"Transform: mean={self.mean}, std={self.std}; give a number a channel, or one."
            )
        if self.crop_padding < 0 or (self.crop_size is not None and self.crop_size < 1):
            raise InputError(
                f"Transform: crop_padding={self.crop_padding}, crop_size={self.crop_size}; give a "
                "padding of at least 0 and a size of at least 1."
            )

    def __call__(self, inputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Stored inputs as floats; a generator switches augmentation on.

        Args:
            inputs: ``[n, channels, height, width]``, or ``[n, ...]`` where nothing is cropped or
                mirrored. An image batch in channels_last stays so.
            generator: draws the crops and flips.
        """
        return self._normalise(self._view(inputs, generator))

    def _view(self, inputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """The part of every image that is looked at, in the stored dtype."""
        if not (self.crop_padding or self.flip or self.crop_size):
            return inputs
        if inputs.ndim != 4:
            raise InputError(
                f"Transform: inputs of shape {tuple(inputs.shape)} cannot be cropped or flipped; "
                "give [n, channels, height, width], or a Transform without those."
            )
        padding = self.crop_padding if generator is not None else 0
        height, width = inputs.shape[2] + 2 * padding, inputs.shape[3] + 2 * padding
        size = (self.crop_size or inputs.shape[2], self.crop_size or inputs.shape[3])
        if size[0] > height or size[1] > width:
            raise InputError(
                f"Transform: images of {tuple(inputs.shape[2:])} are smaller than "
                f"crop_size={self.crop_size}; resize them, or add crop_padding."
            )
        if generator is None:
            return center_crop(inputs, size)
        n, device = len(inputs), generator.device
        top = torch.randint(height - size[0] + 1, (n,), generator=generator, device=device)
        left = torch.randint(width - size[1] + 1, (n,), generator=generator, device=device)
        mirror = torch.randint(2, (n,), generator=generator, device=device) if self.flip else None
        return crop_and_flip(inputs, top, left, mirror, size, padding)

    def _normalise(self, inputs: Tensor) -> Tensor:
        """``(x / scale - mean) / std`` as ``(x - scale mean) / (scale std)``."""
        dtype = inputs.dtype if inputs.is_floating_point() else torch.float32
        channels = inputs.shape[1] if inputs.ndim > 1 else 1
        if not {len(self.mean), len(self.std)} <= {1, channels}:
            raise InputError(
                f"Transform: {len(self.mean)} means and {len(self.std)} stds for inputs of shape "
                f"{tuple(inputs.shape)}; give one, or one for each of the {channels} channels."
            )
        last = _is_channels_last(inputs)
        shape = (channels, 1, inputs.shape[3]) if last else (-1, *[1] * (inputs.ndim - 2))
        mean, std = _constants(self.scale, self.mean, self.std, shape, dtype, inputs.device)
        return (inputs - mean).div_(std)


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

    Every line of the result is a run of consecutive elements of the padded images, or of their
    mirror images, which lie behind them in one buffer. So it is all one selection of rows from the
    overlapping windows of that buffer.

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

    A channels_last batch gets them as whole lines in its own order of memory: broadcasting a number
    a channel along its lines would cost four times as much.
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
