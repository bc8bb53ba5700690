"""CIFAR-10 and CIFAR-100 in their authors' binary format, from the archive as it is or unpacked.

A record is one label byte (CIFAR-100: coarse, then fine), then 3072 bytes of a 3x32x32 image.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from proxreplay.data.archives import Files, open_files
from proxreplay.data.cache import Block, Decoded, Part, cached
from proxreplay.data.datasets import Dataset
from proxreplay.data.roots import data_root as resolve_root
from proxreplay.data.roots import first_existing
from proxreplay.errors import DataError

IMAGE = (3, 32, 32)
RECORDS_A_BLOCK = 1000


@dataclass(frozen=True)
class Layout:
    """Where a CIFAR data set lies and how its records look."""

    name: str
    places: tuple[str, ...]
    train: tuple[str, ...]
    test: tuple[str, ...]
    class_names: str
    label_bytes: int  # the last of them is the label

    @property
    def record(self) -> int:
        """Bytes of one image with its labels."""
        return self.label_bytes + int(np.prod(IMAGE))


CIFAR10 = Layout(
    name="cifar10",
    places=("cifar-10-binary.tar.gz", "cifar-10-batches-bin", "cifar-10-binary"),
    train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    test=("test_batch.bin",),
    class_names="batches.meta.txt",
    label_bytes=1,
)
CIFAR100 = Layout(
    name="cifar100",
    places=("cifar-100-binary.tar.gz", "cifar-100-binary"),
    train=("train.bin",),
    test=("test.bin",),
    class_names="fine_label_names.txt",
    label_bytes=2,
)


def cifar10(data_root: str | Path | None = None) -> Dataset:
    """CIFAR-10: 50,000 and 10,000 colour images of 32x32 in 10 classes."""
    return _cifar(CIFAR10, data_root)


def cifar100(data_root: str | Path | None = None) -> Dataset:
    """CIFAR-100: 50,000 and 10,000 colour images of 32x32 in 100 classes (the fine labels)."""
    return _cifar(CIFAR100, data_root)


def _cifar(layout: Layout, data_root: str | Path | None) -> Dataset:
    source = first_existing(layout.name, resolve_root(data_root), layout.places)
    return cached(layout.name, [source], lambda: _reading(layout, source))


@contextmanager
def _reading(layout: Layout, source: Path) -> Iterator[Decoded]:
    with open_files(source) as files:
        yield _decode(layout, files, source)


def _decode(layout: Layout, files: Files, source: Path) -> Decoded:
    wanted = [*layout.train, *layout.test, layout.class_names]
    where = _find(files, wanted, source)
    with files.open(where[layout.class_names]) as file:
        classes = tuple(file.read(1 << 16).decode("ascii").split())
    parts = {}
    for part, names in (("train", layout.train), ("test", layout.test)):
        count = 0
        for name in names:
            size = files.sizes()[where[name]]
            if size == 0 or size % layout.record:
                raise DataError(
                    f"{source}: {name} has {size} bytes, expected a multiple of {layout.record}; "
                    "delete it and get it again."
                )
            count += size // layout.record
        blocks = _blocks(layout, files, [where[name] for name in names], source, len(classes))
        parts[part] = Part(count, IMAGE, blocks)
    return Decoded(classes, parts)


def _find(files: Files, wanted: Sequence[str], source: Path) -> dict[str, str]:
    """Where the wanted files lie, in whichever folder of the archive."""
    where = {path.rpartition("/")[2]: path for path in files.sizes()}
    missing = [name for name in wanted if name not in where]
    if missing:
        raise DataError(
            f"{source}: {', '.join(missing)} missing; expected the binary version of the data set, "
            "which holds " + ", ".join(wanted) + "."
        )
    return where


def _blocks(
    layout: Layout, files: Files, paths: Sequence[str], source: Path, num_classes: int
) -> Iterator[Block]:
    for path in paths:
        with files.open(path) as file:
            while data := file.read(RECORDS_A_BLOCK * layout.record):
                if len(data) % layout.record:
                    raise DataError(f"{source}: {path} ends inside an image; get it again.")
                records = np.frombuffer(data, np.uint8).reshape(-1, layout.record)
                labels = records[:, layout.label_bytes - 1]
                if labels.max() >= num_classes:
                    raise DataError(
                        f"{source}: {path} holds label {labels.max()}, but there are "
                        f"{num_classes} classes; get it again."
                    )
                yield Block(records[:, layout.label_bytes :].reshape(-1, *IMAGE), labels)
