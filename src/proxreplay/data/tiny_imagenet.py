"""TinyImageNet: ``tiny-imagenet-200.zip`` as it is or unpacked; its val folder serves as test."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxreplay.data.archives import Files, open_files
from proxreplay.data.cache import Decoded
from proxreplay.data.images import SUFFIXES, ImageFile, image_splits
from proxreplay.errors import DataError

SIZE = 64


@contextmanager
def read(source: Path) -> Iterator[Decoded]:
    """Decode the zip or folder; labels follow ``wnids.txt``. See `images.decode` for resizing."""
    with open_files(source) as files:
        top = _top(files)
        wnids = _lines(files, f"{top}wnids.txt")
        label = {wnid: i for i, wnid in enumerate(wnids)}
        train = _train(files, f"{top}train/", label)
        test = _test(files, f"{top}val/", label)
        missing = set(range(len(wnids))) - {image.label for image in train}
        if missing:
            raise DataError(
                f"{source}: no training images for {wnids[min(missing)]} and {len(missing) - 1} "
                "other classes; get the data again."
            )
        yield Decoded(
            _names(files, f"{top}words.txt", wnids),
            image_splits(files, {"train": train, "test": test}, SIZE),
        )


def _top(files: Files) -> str:
    """The folder inside the archive that holds everything, as a prefix."""
    for name in files.sizes:
        if name == "wnids.txt" or name.endswith("/wnids.txt"):
            return name.removesuffix("wnids.txt")
    raise DataError(
        f"{files.where}: wnids.txt missing; expected TinyImageNet as its authors ship it."
    )


def _lines(files: Files, name: str) -> list[str]:
    return [line for line in files.text(name).splitlines() if line.strip()]


def _names(files: Files, name: str, wnids: list[str]) -> tuple[str, ...]:
    """The first word for every class; its id if there are no words."""
    words = dict.fromkeys(wnids, "")
    if name in files.sizes:
        for line in _lines(files, name):
            wnid, _, synonyms = line.partition("\t")
            if wnid in words:
                words[wnid] = synonyms.split(",")[0].strip()
    return tuple(word or wnid for wnid, word in words.items())


def _train(files: Files, folder: str, label: dict[str, int]) -> list[ImageFile]:
    images = []
    for name in files.sizes:
        wnid = name.removeprefix(folder).split("/", 1)[0]
        if name.startswith(folder) and wnid in label and name.lower().endswith(SUFFIXES):
            images.append(ImageFile(name, label[wnid]))
    return sorted(images, key=lambda image: (image.label, image.path))


def _test(files: Files, folder: str, label: dict[str, int]) -> list[ImageFile]:
    images = []
    for line in _lines(files, f"{folder}val_annotations.txt"):
        image, wnid = [*line.split("\t"), ""][:2]
        path = f"{folder}images/{image}"
        if wnid not in label or path not in files.sizes:
            raise DataError(
                f"{files.where}: val_annotations.txt names '{image}' of class '{wnid}', which is "
                "not there; get the data again."
            )
        images.append(ImageFile(path, label[wnid]))
    return images
