"""MNIST and Fashion-MNIST: IDX files, plain or gzipped.

An IDX file is a big-endian header (magic ``0 0 8 dims``, then one 32-bit size a dimension) and the
bytes of the array.
"""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np
import numpy.typing as npt

from proxreplay.data.cache import Block, Decoded, Part, cached
from proxreplay.data.datasets import Dataset
from proxreplay.data.roots import data_root as resolve_root
from proxreplay.data.roots import not_found
from proxreplay.errors import DataError

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
MAX_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Layout:
    """Where an IDX data set lies and what its labels are called."""

    name: str
    folders: tuple[str, ...]
    classes: tuple[str, ...]


MNIST = Layout("mnist", ("mnist", "MNIST/raw", "MNIST"), tuple("0123456789"))
FASHION = Layout(
    "fashion-mnist",
    ("fashion-mnist", "FashionMNIST/raw", "FashionMNIST"),
    (
        "T-shirt/top",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    ),
)


def mnist(data_root: str | Path | None = None) -> Dataset:
    """MNIST: 60,000 and 10,000 grey images of 28x28, the digits."""
    return _load(MNIST, data_root)


def fashion_mnist(data_root: str | Path | None = None) -> Dataset:
    """Fashion-MNIST: 60,000 and 10,000 grey images of 28x28, ten kinds of clothes."""
    return _load(FASHION, data_root)


def locate(layout: Layout, root: Path) -> list[Path]:
    """The four files, plain or gzipped, in the first folder that has them all."""
    for folder in layout.folders:
        found = [_plain_or_gz(root / folder / name) for name in FILES]
        if all(found):
            return [path for path in found if path is not None]
    raise not_found(
        layout.name, root, [f"{folder}/{name}[.gz]" for folder in layout.folders for name in FILES]
    )


def _plain_or_gz(path: Path) -> Path | None:
    for candidate in (path, path.with_name(path.name + ".gz")):
        if candidate.is_file():
            return candidate
    return None


def _load(layout: Layout, data_root: str | Path | None) -> Dataset:
    sources = locate(layout, resolve_root(data_root))
    return cached(layout.name, sources, lambda: _reading(layout, sources))


@contextmanager
def _reading(layout: Layout, sources: list[Path]) -> Iterator[Decoded]:
    arrays = [read_idx(path) for path in sources]
    parts = {}
    for part, images, labels, path in (
        ("train", arrays[0], arrays[1], sources[1]),
        ("test", arrays[2], arrays[3], sources[3]),
    ):
        if images.ndim != 3 or labels.shape != images.shape[:1] or not len(labels):
            raise DataError(
                f"{path}: labels of shape {labels.shape} for images of shape {images.shape}; "
                "delete both files and get them again."
            )
        if labels.max() >= len(layout.classes):
            raise DataError(f"{path}: label {labels.max()} is above 9; get the file again.")
        shape = (1, *images.shape[1:])
        parts[part] = Part(len(images), shape, [Block(images.reshape(-1, *shape), labels)])
    yield Decoded(layout.classes, parts)


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """An IDX file of unsigned bytes, plain or gzipped."""
    opener = gzip.open if path.name.endswith(".gz") else open
    try:
        with cast("IO[bytes]", opener(path, "rb")) as file:
            return _read_array(file, path)
    except (OSError, EOFError, zlib.error) as error:
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
    size = 1
    for n in shape:
        size *= n
    if len(shape) != magic[3] or size > MAX_BYTES:
        raise DataError(f"{path}: sizes {shape} in its header; delete it and get it again.")
    data = file.read(size + 1)
    if len(data) != size:
        more = "more" if len(data) > size else f"{len(data)}"
        raise DataError(
            f"{path}: {more} bytes where the header says {size}; delete it and get it again."
        )
    return np.frombuffer(data, np.uint8).reshape(shape)
