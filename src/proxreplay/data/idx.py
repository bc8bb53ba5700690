"""MNIST and Fashion-MNIST: IDX files, plain or gzipped.

An IDX file is a big-endian header (magic ``0 0 8 dims``, then one 32-bit size per dimension) and
the bytes of the array.
"""

import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import numpy as np
import numpy.typing as npt

from proxreplay.data.cache import Block, Decoded, Split
from proxreplay.data.fingerprints import regular
from proxreplay.errors import DataError

MAX_BYTES = 256 * 2**20  # the largest file here has 47 million
CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion-mnist": (
        *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
}


@contextmanager
def read(folder: Path, names: Sequence[str], classes: tuple[str, ...]) -> Iterator[Decoded]:
    """Decode the images and labels for training, then those for test, plain or gzipped."""
    paths = [folder / name for name in names]
    paths = [p if p.is_file() else p.with_name(f"{p.name}.gz") for p in paths]
    parts = {}
    for i, part in ((0, "train"), (2, "test")):
        path = paths[i + 1]
        images, labels = read_idx(paths[i]), read_idx(path)
        if images.ndim != 3 or labels.shape != images.shape[:1] or not len(labels):
            raise DataError(
                f"{path}: labels of shape {labels.shape} for images of shape {images.shape}; get "
                "both files again."
            )
        if labels.max() >= len(classes):
            raise DataError(f"{path}: label {labels.max()} is above 9; get the file again.")
        shape = (1, *images.shape[1:])
        parts[part] = Split(len(images), shape, [Block(images.reshape(-1, *shape), labels)])
    yield Decoded(classes, parts)


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """An IDX file of unsigned bytes, plain or gzipped."""
    regular(path)
    opener = gzip.open if path.name.endswith(".gz") else open
    try:
        with cast("IO[bytes]", opener(path, "rb")) as file:
            return _read_array(file, path)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}); delete it and get it again.") from error


def _read_array(file: IO[bytes], path: Path) -> npt.NDArray[np.uint8]:
    magic = file.read(4)
    if len(magic) < 4 or magic[:3] != b"\0\0\x08" or not 1 <= magic[3] <= 4:
        raise DataError(
            f"{path}: starts with {magic!r}, expected an IDX file of unsigned bytes; delete it "
            "and get it again."
        )
    header = file.read(4 * magic[3])
    shape = tuple(int(n) for n in np.frombuffer(header[: len(header) // 4 * 4], ">u4"))
    size = math.prod(shape)
    if len(shape) != magic[3] or size > MAX_BYTES:
        raise DataError(f"{path}: sizes {shape} in its header; delete it and get it again.")
    data = file.read(size + 1)
    if len(data) != size:
        more = "more" if len(data) > size else f"{len(data)}"
        raise DataError(
            f"{path}: {more} bytes where the header says {size}; delete it and get it again."
        )
    return np.frombuffer(data, np.uint8).reshape(shape)
