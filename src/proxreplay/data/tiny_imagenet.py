"""TinyImageNet: ``tiny-imagenet-200.zip`` as it is or unpacked; its val folder serves as test."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxreplay.data.archives import Files, open_files
from proxreplay.data.cache import Decoded, cached
from proxreplay.data.datasets import Dataset
from proxreplay.data.images import SUFFIXES, ImageFile, image_part
from proxreplay.data.roots import data_root as resolve_root
from proxreplay.data.roots import first_existing
from proxreplay.errors import DataError

PLACES = ("tiny-imagenet-200.zip", "tiny-imagenet-200")
SIZE = 64
MAX_TEXT = 16 * 2**20


def tinyimagenet(data_root: str | Path | None = None) -> Dataset:
    """TinyImageNet: 100,000 and 10,000 colour images of 64x64 in 200 classes.

    Labels follow ``wnids.txt``. Images of another size are resized; see `images.decode`.
    """
    source = first_existing("tinyimagenet", resolve_root(data_root), PLACES)
    return cached("tinyimagenet", [source], lambda: _reading(source))


@contextmanager
def _reading(source: Path) -> Iterator[Decoded]:
    with open_files(source) as files:
        top = _top(files, source)
        wnids = _lines(files, f"{top}wnids.txt", source)
        label = {wnid: i for i, wnid in enumerate(wnids)}
        train = _train(files, f"{top}train/", label)
        test = _test(files, f"{top}val/", label, source)
        missing = set(range(len(wnids))) - {image.label for image in train}
        if missing:
            raise DataError(
                f"{source}: no training images for {wnids[min(missing)]} and {len(missing) - 1} "
                "other classes; get the data again."
            )
        yield Decoded(
            _names(files, f"{top}words.txt", wnids, source),
            {"train": image_part(files, train, SIZE), "test": image_part(files, test, SIZE)},
        )


def _top(files: Files, source: Path) -> str:
    """The folder inside the archive that holds everything, as a prefix."""
    for name in files.sizes():
        if name == "wnids.txt" or name.endswith("/wnids.txt"):
            return name.removesuffix("wnids.txt")
    raise DataError(f"{source}: wnids.txt missing; expected TinyImageNet as its authors ship it.")


def _lines(files: Files, name: str, source: Path) -> list[str]:
    if files.sizes().get(name, MAX_TEXT) >= MAX_TEXT:
        raise DataError(f"{source}: {name} is missing or too large; get the data again.")
    with files.open(name) as file:
        return [line for line in file.read().decode("utf-8").splitlines() if line.strip()]


def _names(files: Files, name: str, wnids: list[str], source: Path) -> tuple[str, ...]:
    """The first word for every class; its id where there are no words."""
    words = dict.fromkeys(wnids, "")
    if name in files.sizes():
        for line in _lines(files, name, source):
            wnid, _, synonyms = line.partition("\t")
            if wnid in words:
                words[wnid] = synonyms.split(",")[0].strip()
    return tuple(word or wnid for wnid, word in words.items())


def _train(files: Files, folder: str, label: dict[str, int]) -> list[ImageFile]:
    images = []
    for name in files.sizes():
        wnid = name.removeprefix(folder).split("/", 1)[0]
        if name.startswith(folder) and wnid in label and name.lower().endswith(SUFFIXES):
            images.append(ImageFile(name, label[wnid]))
    return sorted(images, key=lambda image: (image.label, image.path))


def _test(files: Files, folder: str, label: dict[str, int], source: Path) -> list[ImageFile]:
    images = []
    for line in _lines(files, f"{folder}val_annotations.txt", source):
        image, wnid = [*line.split("\t"), ""][:2]
        path = f"{folder}images/{image}"
        if wnid not in label or path not in files.sizes():
            raise DataError(
                f"{source}: val_annotations.txt names '{image}' of class '{wnid}', which is not "
                "there; get the data again."
            )
        images.append(ImageFile(path, label[wnid]))
    return images
