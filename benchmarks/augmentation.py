"""Batched crop and flip against the same one image at a time.

python -m benchmarks.augmentation
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

from proxreplay.data import Transform


def seconds_in_turn(*functions: Callable[[], object], repeats: int) -> list[float]:
    """The lower decile of each one's times; they take turns, so that a busy machine is fair."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, own in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            own.append(time.perf_counter() - start)
    return [statistics.quantiles(own, n=10)[0] for own in times]


def one_at_a_time(transform: Transform, images: Tensor, generator: torch.Generator) -> Tensor:
    """Pad, crop, flip, scale and normalise every image by itself, then stack them."""
    mean = torch.tensor(transform.mean).view(-1, 1, 1)
    std = torch.tensor(transform.std).view(-1, 1, 1)
    padding, (height, width) = transform.crop_padding, images.shape[2:]
    result = []
    for image in images:
        top, left = torch.randint(2 * padding + 1, (2,), generator=generator).tolist()
        image = F.pad(image, [padding] * 4)[:, top : top + height, left : left + width]
        if torch.rand((), generator=generator) < 0.5:
            image = image.flip(2)
        result.append((image.to(torch.float32) / transform.scale - mean) / std)
    return torch.stack(result)


def as_image_libraries_do(
    transform: Transform, stored: list[Image.Image], generator: torch.Generator
) -> Tensor:
    """What the transforms of image libraries do: pad, crop and flip a picture, then floats."""
    mean = torch.tensor(transform.mean).view(-1, 1, 1)
    std = torch.tensor(transform.std).view(-1, 1, 1)
    padding = transform.crop_padding
    result = []
    for picture in stored:
        width, height = picture.size
        left, top = torch.randint(2 * padding + 1, (2,), generator=generator).tolist()
        picture = ImageOps.expand(picture, padding)
        picture = picture.crop((left, top, left + width, top + height))
        if torch.rand((), generator=generator) < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        image = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()
        result.append((image.to(torch.float32) / transform.scale).sub_(mean).div_(std))
    return torch.stack(result)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    print("augmentation           batched      tensors one by one      pictures one by one")
    for batch, size, padding in ((20, 32, 4), (20, 64, 8), (20, 224, 8), (200, 32, 4)):
        transform = Transform(255.0, mean, std, crop_padding=padding, flip=True)
        images = torch.randint(0, 256, (batch, 3, size, size), generator=generator).byte()
        repeats = 300 if size < 100 and batch < 100 else 30
        pictures = [Image.fromarray(i.permute(1, 2, 0).numpy()) for i in images]
        fast, *others = seconds_in_turn(
            partial(transform, images, generator),
            partial(one_at_a_time, transform, images, generator),
            partial(as_image_libraries_do, transform, pictures, generator),
            repeats=repeats,
        )
        name = f"{batch} x 3x{size}x{size}"
        told = "".join(f"{1e6 * slow:12.0f} us ({slow / fast:4.1f}x)" for slow in others)
        print(f"{name:<20} {1e6 * fast:7.0f} us {told}")


if __name__ == "__main__":
    main()
