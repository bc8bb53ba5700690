"""Anybody's own images: a folder or zip of ``<class>/<image>`` or ``<domain>/<class>/<image>``."""

import hashlib
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from proxreplay.data.archives import Files, open_files
from proxreplay.data.cache import Decoded, cached
from proxreplay.data.datasets import Dataset
from proxreplay.data.images import (
    MAX_FILE_BYTES,
    SUFFIXES,
    ImageFile,
    all_broken,
    image_splits,
    open_image,
)
from proxreplay.errors import DataError

TEST_FRACTION = 0.2
DEFAULT_SIZE = 64
LARGEST_KEPT = 128
PARTS = {"train": "train", "test": "test"}  # by what people call them
PARTS |= dict.fromkeys(("val", "valid", "validation"), "validation")
LAYOUTS = "<class>/<image> or <domain>/<class>/<image>, maybe below train/ and test/"
Places = dict[str, tuple[str, ...]]  # by file: its folders (domain and class) and its name
log = logging.getLogger(__name__)


def image_tree(path: str | Path, *, image_size: int | None = None) -> Dataset:
    """Images sorted into folders; the folders are the classes.

    Layouts: ``<class>/<image>`` or ``<domain>/<class>/<image>``, either maybe below ``train/``,
    ``test/`` and ``val/``. Without ``test/``, a fifth of every class (in every domain), chosen by
    a hash of the file names, is set aside as test. Hidden files are ignored; other files that are
    no images are ignored and counted in the log.

    Args:
        path: the folder, or a zip of it.
        image_size: side of the stored RGB squares. None keeps a common square size of up to 128,
            and takes 64 otherwise.
    """
    path = Path(os.path.abspath(path))  # "." has no name of its own
    if not path.exists():
        raise DataError(f"{path} does not exist; give a folder or zip of images as {LAYOUTS}.")
    if image_size is not None and image_size < 1:
        raise DataError(f"image_size={image_size}; give at least 1.")
    name = path.stem or "images"
    key = name if image_size is None else f"{name}-{image_size}px"
    return cached(name, path, lambda: read(path, image_size), key)


@contextmanager
def read(path: Path, image_size: int | None) -> Iterator[Decoded]:
    """Decode a folder or zip of images."""
    if path.name.endswith((".tar", ".tar.gz", ".tgz")):
        raise DataError(f"{path}: images are read from a folder or a zip; unpack the tar first.")
    with open_files(path) as files:
        places = {file: tuple(file.split("/")) for file in _image_files(files, path)}
        if path.is_file():
            places = _inside_common_folder(places)
        parts = _by_part(places)
        _check_layout(parts, path)
        classes = sorted_naturally({p[-2] for part in parts.values() for p in part.values()})
        domains = sorted_naturally(
            {p[0] for part in parts.values() for p in part.values() if len(p) == 3}
        )
        if len(classes) < 2:
            raise DataError(f"{path}: one class only ({classes[0]}); arrange images as {LAYOUTS}.")
        label = {name: i for i, name in enumerate(classes)}
        domain = {name: i for i, name in enumerate(domains)}
        images = {
            part: [ImageFile(f, label[p[-2]], domain.get(p[0])) for f, p in members.items()]
            for part, members in parts.items()
        }
        if "test" not in images:
            images["train"], images["test"] = split_by_hash(images["train"])
        size = image_size or _common_size(files, [i for part in images.values() for i in part])
        yield Decoded(tuple(classes), image_splits(files, images, size), tuple(domains))


def _image_files(files: Files, path: Path) -> list[str]:
    """Images in natural order; what is no image is counted and left out."""
    visible = [
        n for n in files.sizes if not any(s.startswith((".", "__MACOSX")) for s in n.split("/"))
    ]
    images = [n for n in visible if n.lower().endswith(SUFFIXES)]
    if len(images) < len(visible):
        log.warning("%s: %d files that are no images are ignored", path, len(visible) - len(images))
    if not images:
        raise DataError(
            f"{path}: no images ({', '.join(SUFFIXES)}) found; arrange them as {LAYOUTS}."
        )
    return sorted_naturally(images)


def _inside_common_folder(places: Places) -> Places:
    """A zip often holds one folder with everything inside; look inside it."""
    if len({place[0] for place in places.values()}) == 1 and all(
        len(p) > 2 for p in places.values()
    ):
        return {file: place[1:] for file, place in places.items()}
    return places


def _by_part(places: Places) -> dict[str, Places]:
    """Train, test and validation by their folders; everything is train if there are none."""
    parts: dict[str, Places] = defaultdict(dict)
    for file, place in places.items():
        parts[PARTS.get(place[0].lower(), "")][file] = place[1:]
    if "" in parts or "train" not in parts:
        return {"train": places}
    return dict(parts)


def _check_layout(parts: Mapping[str, Places], path: Path) -> None:
    depths = {len(place): file for part in parts.values() for file, place in part.items()}
    if len(depths) > 1 or not {2, 3} & depths.keys():
        odd = ", ".join(f"'{file}'" for file in depths.values())
        raise DataError(f"{path}: {odd} do not fit one layout; arrange images as {LAYOUTS}.")


def split_by_hash(images: Sequence[ImageFile]) -> tuple[list[ImageFile], list[ImageFile]]:
    """A fixed stratified split: of each class in each domain, a fifth (rounded down) is test.

    Which ones is decided by the SHA-256 of the path, so it does not depend on machine or order.
    """
    groups: dict[tuple[int | None, int], list[ImageFile]] = defaultdict(list)
    for image in images:
        groups[image.domain, image.label].append(image)
    test = set()
    for members in groups.values():
        ranked = sorted(members, key=lambda i: hashlib.sha256(i.path.encode()).digest())
        test.update(ranked[: int(TEST_FRACTION * len(ranked))])
    return [i for i in images if i not in test], [i for i in images if i in test]


def _common_size(files: Files, images: Sequence[ImageFile]) -> int:
    sizes = set()
    for image in images:
        try:
            sizes.add(open_image(files.read(image.path, MAX_FILE_BYTES), image.path).size)
        except DataError as error:
            raise all_broken(files, images, DEFAULT_SIZE, error) from error
        if len(sizes) > 1:
            break
    width, height = next(iter(sizes))
    if len(sizes) == 1 and width == height <= LARGEST_KEPT:
        return width
    log.warning("images of several sizes or above %d: stored as %d", LARGEST_KEPT, DEFAULT_SIZE)
    return DEFAULT_SIZE


def sorted_naturally(names: Sequence[str] | set[str]) -> list[str]:
    """Sorted with numbers as numbers: bucket 9 comes before bucket 10."""
    return sorted(
        names,
        key=lambda name: [
            (0, int(piece), "") if piece.isdecimal() else (1, 0, piece)
            for piece in re.findall(r"\d+|\D+", name)
        ],
    )
