"""CIFAR-10 and CIFAR-100 in their authors' binary format, from the archive as it is or unpacked.

A record is one label byte (CIFAR-100: coarse, then fine), then 3072 bytes of a 3x32x32 image.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from proxreplay.data.archives import Files, Limits, open_files
from proxreplay.data.cache import Block, Decoded, Split
from proxreplay.errors import DataError

IMAGE = (3, 32, 32)
RECORDS_PER_BLOCK = 1000
LIMITS = Limits(members=1000, total_bytes=2**30)


@dataclass(frozen=True)
class Layout:
    """The files of a CIFAR data set and the labels in its records."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    class_names: str
    label_bytes: int  # the last of them is the label

    @property
    def record(self) -> int:
        """Bytes of one image with its labels."""
        return self.label_bytes + int(np.prod(IMAGE))


_BATCHES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
LAYOUTS = {
    "cifar10": Layout(_BATCHES, ("test_batch.bin",), "batches.meta.txt", label_bytes=1),
    "cifar100": Layout(("train.bin",), ("test.bin",), "fine_label_names.txt", label_bytes=2),
}


@contextmanager
def read(source: Path, layout: Layout) -> Iterator[Decoded]:
    """Decode the archive or folder."""
    with open_files(source, LIMITS) as files:
        where = _find(files, [*layout.train, *layout.test, layout.class_names])
        classes = tuple(files.text(where[layout.class_names]).split())
        parts = {}
        for part, names in (("train", layout.train), ("test", layout.test)):
            count = sum(_records(layout, files, where[name]) for name in names)
            blocks = _blocks(layout, files, [where[name] for name in names], len(classes))
            parts[part] = Split(count, IMAGE, blocks)
        yield Decoded(classes, parts)


def _find(files: Files, wanted: Sequence[str]) -> dict[str, str]:
    """Where the wanted files are, in any folder of the archive."""
    where = {path.rpartition("/")[2]: path for path in files.sizes}
    missing = [name for name in wanted if name not in where]
    if missing:
        raise DataError(
            f"{files.where}: {', '.join(missing)} missing; expected the binary version of the data "
            f"set, which holds {', '.join(wanted)}."
        )
    return where


def _records(layout: Layout, files: Files, path: str) -> int:
    size = files.sizes[path]
    if size == 0 or size % layout.record:
        raise DataError(
            f"{files.where}: {path} has {size} bytes, expected a multiple of {layout.record}; get "
            "it again."
        )
    return size // layout.record


def _blocks(
    layout: Layout, files: Files, paths: Sequence[str], num_classes: int
) -> Iterator[Block]:
    for path in paths:
        with files.open(path) as file:
            while data := file.read(RECORDS_PER_BLOCK * layout.record):
                if len(data) % layout.record:
                    raise DataError(f"{files.where}: {path} ends inside an image; get it again.")
                records = np.frombuffer(data, np.uint8).reshape(-1, layout.record)
                labels = records[:, layout.label_bytes - 1]
                if labels.max() >= num_classes:
                    raise DataError(
                        f"{files.where}: {path} holds label {labels.max()}, but there are "
                        f"{num_classes} classes; get it again."
                    )
                yield Block(records[:, layout.label_bytes :].reshape(-1, *IMAGE), labels)
