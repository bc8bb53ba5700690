"""From stored inputs to what the network sees: random crop and flip, scaling, normalisation.

Whole batches at a time, in the stored dtype until the last step: images are cropped and mirrored
as uint8 and become floats once. The tensor work is in `augment`, so that declaring a transform
needs no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

from proxreplay.errors import InputError
from proxreplay.lazy import LazyModule
from proxreplay.options import Count, Options, Positive, count

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from proxreplay.data import augment
else:
    augment = LazyModule("proxreplay.data.augment")


@dataclass(frozen=True)
class Transform(Options, prefix="Transform: "):
    """``(x / scale - mean) / std``, per channel; random changes only with a generator.

    With a generator, every image is padded with zeros (black, before normalisation), cropped at a
    random place and mirrored with probability 1/2. Without one, the centre is taken.

    Args:
        scale: the stored value that stands for 1.
        mean: one number per channel, or one for all.
        std: one number per channel, or one for all.
        crop_padding: zeros added on every side before a random crop.
        flip: mirror images (left for right) half of the time.
        crop_size: height and width of the crop; None for those of the image.

    >>> import torch
    >>> cifar = Transform(scale=255.0, mean=(0.5,), std=(0.25,), crop_padding=4, flip=True)
    >>> images = torch.zeros(10, 3, 32, 32, dtype=torch.uint8)
    >>> cifar(images, torch.Generator()).shape
    torch.Size([10, 3, 32, 32])
    """

    scale: Positive = 1.0
    mean: Sequence[float] = (0.0,)
    std: Sequence[float] = (1.0,)
    crop_padding: Annotated[int, partial(count, 0)] = 0
    flip: bool = False
    crop_size: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mean", tuple(self.mean))
        object.__setattr__(self, "std", tuple(self.std))
        if not self.mean or not self.std or not all(value > 0 for value in self.std):
            raise InputError(
                f"Transform: mean={self.mean}, std={self.std}; give one number, or one per "
                "channel, and stds above 0."
            )

    def __call__(self, inputs: "Tensor", generator: "torch.Generator | None" = None) -> "Tensor":
        """Stored inputs as floats; a generator switches augmentation on and draws it.

        Inputs are ``[n, channels, height, width]``, in any order of memory, which is kept; without
        crops and flips, ``[n, ...]``.
        """
        seen = self._view(inputs, generator)
        channels = seen.shape[1] if seen.ndim > 1 else 1
        if not {len(self.mean), len(self.std)} <= {1, channels}:
            raise InputError(
                f"Transform: {len(self.mean)} means and {len(self.std)} stds for inputs of shape "
                f"{tuple(seen.shape)}; give one, or one for each of the {channels} channels."
            )
        return augment.normalise(seen, self.scale, tuple(self.mean), tuple(self.std))

    def _view(self, inputs: "Tensor", generator: "torch.Generator | None") -> "Tensor":
        """The crop of every image, in the stored dtype."""
        if not (self.crop_padding or self.flip or self.crop_size):
            return inputs
        if inputs.ndim != 4:
            raise InputError(
                f"Transform: inputs of shape {tuple(inputs.shape)} cannot be cropped or flipped; "
                "give [n, channels, height, width], or a Transform without those."
            )
        padding = self.crop_padding if generator is not None else 0
        height, width = inputs.shape[2:]
        size = (self.crop_size or height, self.crop_size or width)
        if size[0] > height + 2 * padding or size[1] > width + 2 * padding:
            raise InputError(
                f"Transform: images of {height}x{width} are smaller than "
                f"crop_size={self.crop_size}; resize them, or add crop_padding."
            )
        if generator is None:
            return augment.center_crop(inputs, size)
        return augment.random_view(inputs, size, padding, flip=self.flip, generator=generator)
