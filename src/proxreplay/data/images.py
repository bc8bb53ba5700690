"""Image files to uint8 arrays of one size, block by block and on a few threads."""

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from proxreplay.data.archives import Files
from proxreplay.data.cache import Block, Split
from proxreplay.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
MAX_FILE_BYTES = 64 * 2**20
MAX_PIXELS = 64 * 10**6
LARGE_PIXELS = 4 * 10**6
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV")
_LARGE = Lock()
IMAGES_PER_BLOCK = 256
NAMED = 10  # of the broken ones, in an error
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImageFile:
    """An image that is still a file."""

    path: str  # within its `Files`
    label: int  # of its class
    domain: int | None = None  # its domain, or None


def image_splits(
    files: Files, parts: Mapping[str, Sequence[ImageFile]], size: int
) -> dict[str, Split]:
    """Images on their way to disk, as RGB squares ``[3, size, size]``; see `decode`.

    If one of them is broken, all are looked at, and the error names all that are.
    """
    everything = [image for images in parts.values() for image in images]
    return {
        part: Split(len(images), (3, size, size), _blocks(files, images, size, everything))
        for part, images in parts.items()
    }


def _blocks(
    files: Files, images: Sequence[ImageFile], size: int, everything: Sequence[ImageFile]
) -> Iterator[Block]:
    read = partial(_read, files, size)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for start in range(0, len(images), IMAGES_PER_BLOCK):
            some = images[start : start + IMAGES_PER_BLOCK]
            domains = [i.domain for i in some if i.domain is not None]
            try:
                inputs = np.stack(list(pool.map(read, some)))
            except DataError as error:
                raise all_broken(files, everything, size, error) from error
            yield Block(
                inputs, np.array([i.label for i in some]), np.array(domains) if domains else None
            )


def _read(files: Files, size: int, image: ImageFile) -> npt.NDArray[np.uint8]:
    return decode(files.read(image.path, MAX_FILE_BYTES), size, image.path)


def all_broken(files: Files, images: Sequence[ImageFile], size: int, first: DataError) -> DataError:
    """One error about every image that cannot be decoded; ``first`` if there is but one."""

    def problem(image: ImageFile) -> str | None:
        try:
            _read(files, size, image)
        except DataError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        problems = list(pool.map(problem, images))
    names = [image.path for image, found in zip(images, problems, strict=True) if found]
    if len(names) < 2:
        return first
    named, others = names[:NAMED], names[NAMED:]
    if others:
        log.warning("%s: cannot be used either: %s", files.where, ", ".join(others))
    more = f" and {len(others)} others (see the log)" if others else ""
    return DataError(
        f"{files.where}: {len(names)} of {len(images)} images cannot be used: {', '.join(named)}"
        f"{more}; replace or remove them. The first: {next(filter(None, problems))}"
    )


def decode(data: bytes, size: int, what: str) -> npt.NDArray[np.uint8]:
    """One image as RGB ``[3, size, size]``: shorter side resized (bilinear), centre cropped."""
    from PIL import Image

    image = open_image(data, what)
    width, height = image.size
    scale = size / min(width, height)
    if scale * width * scale * height > MAX_PIXELS:
        raise DataError(f"{what}: {width}x{height} is too narrow; crop or remove it.")
    # Threads decode side by side, but large images one at a time, so that memory stays bounded.
    with _LARGE if width * height > LARGE_PIXELS else nullcontext():
        rgb = _rgb(image, what)
        if (width, height) != (size, size):
            short = min(width, height)
            width, height = int(size * width / short), int(size * height / short)
            rgb = rgb.resize((width, height), Image.Resampling.BILINEAR)
            left, top = round((width - size) / 2), round((height - size) / 2)
            rgb = rgb.crop((left, top, left + size, top + size))
    return np.ascontiguousarray(np.asarray(rgb).transpose(2, 0, 1))


def _rgb(image: "Image", what: str) -> "Image":
    """Eight bits per colour: 16-bit grey values lose their lower half; other depths are refused."""
    from PIL import Image

    # 16-bit grey PNG and PPM are "I;16" or "I", depending on the version of Pillow
    deep = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    if not deep and image.mode not in MODES:
        raise DataError(
            f"{what}: pixels of type '{image.mode}' have no known range; save it with 8 or 16 bits."
        )
    try:
        if deep:
            return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
        return image.convert("RGB")
    except Exception as error:  # decoders raise all kinds of errors on damaged files
        raise DataError(f"{what}: the image is damaged ({error}); replace or remove it.") from error


def open_image(data: bytes, what: str) -> "Image":
    """Read an image's header, and refuse what is no image or would fill the memory."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of too many pixels, which are refused below
            image: Any = Image.open(BytesIO(data), formats=FORMATS)
    except Exception as error:  # decoders raise all kinds of errors on damaged files
        known = isinstance(error, UnidentifiedImageError)  # names the buffer, not the file
        raise DataError(
            f"{what}: not an image in one of {', '.join(FORMATS)}{'' if known else f' ({error})'}; "
            "replace or remove it."
        ) from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise DataError(
            f"{what}: {width}x{height} is more than {MAX_PIXELS} pixels; shrink or remove it."
        )
    opened: Image.Image = image
    return opened
