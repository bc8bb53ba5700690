"""Image files to uint8 arrays of one size, block by block and on a few threads."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from proxreplay.data.archives import Files
from proxreplay.data.cache import Block, Part
from proxreplay.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
MAX_FILE_BYTES = 64 * 2**20
MAX_PIXELS = 64 * 10**6
IMAGES_PER_BLOCK = 256


@dataclass(frozen=True)
class ImageFile:
    """An image that is still a file.

    Args:
        path: within its `Files`.
        label: of its class.
        domain: its domain, or None.
    """

    path: str
    label: int
    domain: int | None = None


def image_part(files: Files, images: Sequence[ImageFile], size: int) -> Part:
    """Images on their way to disk, as RGB squares ``[3, size, size]``; see `decode`."""
    return Part(len(images), (3, size, size), _blocks(files, images, size))


def _blocks(files: Files, images: Sequence[ImageFile], size: int) -> Iterator[Block]:
    def read(image: ImageFile) -> npt.NDArray[np.uint8]:
        return decode(files.read(image.path, MAX_FILE_BYTES), size, image.path)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for start in range(0, len(images), IMAGES_PER_BLOCK):
            some = images[start : start + IMAGES_PER_BLOCK]
            domains = [i.domain for i in some if i.domain is not None]
            yield Block(
                np.stack(list(pool.map(read, some))),
                np.array([i.label for i in some]),
                np.array(domains) if domains else None,
            )


def decode(data: bytes, size: int, what: str) -> npt.NDArray[np.uint8]:
    """One image as RGB ``[3, size, size]``: shorter side resized (bilinear), centre cropped.

    Args:
        data: content of the file.
        size: side of the square; an image that has it already is left as it is.
        what: names the image in errors.
    """
    from PIL import Image

    image = open_image(data, what)
    try:
        rgb = image.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{what}: the image is damaged ({error}); replace or remove it.") from error
    width, height = rgb.size
    if (width, height) != (size, size):
        short = min(width, height)
        width, height = int(size * width / short), int(size * height / short)
        rgb = rgb.resize((width, height), Image.Resampling.BILINEAR)
        left, top = round((width - size) / 2), round((height - size) / 2)
        rgb = rgb.crop((left, top, left + size, top + size))
    return np.ascontiguousarray(np.asarray(rgb).transpose(2, 0, 1))


def open_image(data: bytes, what: str) -> "Image":
    """Read an image's header, and refuse what is no image or would fill the memory."""
    from PIL import Image

    try:
        image: Any = Image.open(BytesIO(data), formats=FORMATS)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{what}: not an image in one of {', '.join(FORMATS)} ({error}); replace or remove it."
        ) from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise DataError(
            f"{what}: {width}x{height} is more than {MAX_PIXELS} pixels; shrink or remove it."
        )
    opened: Image.Image = image
    return opened
