"""CLEAR-10: ten years of photographs, eleven classes; the time buckets are the domains.

``<root>/{train,test}/`` each hold ``class_names.txt``, ``labeled_metadata.json`` (bucket -> class
-> a JSON file) and those JSON files (image -> record with ``IMG_PATH``).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from proxreplay.data.archives import Files, open_files
from proxreplay.data.cache import Decoded, cached
from proxreplay.data.datasets import Dataset
from proxreplay.data.images import ImageFile, image_part
from proxreplay.data.roots import data_root as resolve_root
from proxreplay.data.roots import not_found
from proxreplay.errors import DataError

PLACES = ("clear10", "CLEAR10", "clear-10")
FOLDERS = {"train": ("train", "train_image_only"), "test": ("test",)}
METADATA = "labeled_metadata.json"
MAX_TEXT = 256 * 2**20


def clear10(data_root: str | Path | None = None, *, stored_size: int = 224) -> Dataset:
    """CLEAR-10: 33,000 photographs for training, in ten time buckets.

    Stored images have one size: the shorter side is resized to ``stored_size`` and the centre
    square is kept. At 224 that is exactly the protocol's view for evaluation; for training, the
    random crop along the longer side is gone. A larger ``stored_size`` brings random crops back.
    """
    (source,) = locate(resolve_root(data_root))
    return cached(
        "clear10", [source], lambda: _reading(source, stored_size), variant=f"{stored_size}px"
    )


def locate(root: Path) -> list[Path]:
    """The first folder below the root that holds both train and test."""
    for place in PLACES:
        if all(
            any((root / place / folder / METADATA).is_file() for folder in folders)
            for folders in FOLDERS.values()
        ):
            return [root / place]
    raise not_found(
        "clear10", root, [f"{place}/{part}/{METADATA}" for place in PLACES for part in FOLDERS]
    )


@contextmanager
def _reading(source: Path, size: int) -> Iterator[Decoded]:
    with open_files(source) as files:
        folders = {part: _part_folder(files, names, source) for part, names in FOLDERS.items()}
        classes = {
            part: _text(files, f"{folder}/class_names.txt", source).split("\n")
            for part, folder in folders.items()
        }
        names = [name.strip() for name in classes["train"] if name.strip()]
        metadata = {
            part: _json(files, f"{folder}/{METADATA}", source) for part, folder in folders.items()
        }
        if classes["train"] != classes["test"] or set(metadata["train"]) != set(metadata["test"]):
            raise DataError(
                f"{source}: train and test differ in their classes or buckets; get both again."
            )
        buckets = list(metadata["train"])
        parts = {
            part: image_part(files, _images(files, folder, metadata[part], names, buckets), size)
            for part, folder in folders.items()
        }
        yield Decoded(tuple(names), parts, tuple(buckets))


def _part_folder(files: Files, folders: tuple[str, ...], source: Path) -> str:
    for folder in folders:
        if f"{folder}/{METADATA}" in files.sizes():
            return folder
    raise DataError(f"{source}: {folders[0]}/{METADATA} missing; get the data again.")


def _images(
    files: Files,
    folder: str,
    metadata: Mapping[str, Any],
    classes: Sequence[str],
    buckets: Sequence[str],
) -> list[ImageFile]:
    """The images of a part, bucket by bucket and class by class."""
    images = []
    for domain, bucket in enumerate(buckets):
        listings = metadata[bucket]
        for label, name in enumerate(classes):
            if not isinstance(listings, dict) or name not in listings:
                raise DataError(
                    f"{folder}/{METADATA}: bucket {bucket} has no class {name}, which "
                    "class_names.txt lists; get the data again."
                )
            for record in _json(files, _inside(folder, listings[name]), Path(folder)).values():
                path = record.get("IMG_PATH") if isinstance(record, dict) else None
                images.append(ImageFile(_existing(files, folder, path), label, domain))
    return images


def _existing(files: Files, folder: str, path: object) -> str:
    image = _inside(folder, path)
    if image not in files.sizes():
        raise DataError(f"CLEAR-10: {image} is listed but not there; get the data again.")
    return image


def _inside(folder: str, path: object) -> str:
    """A path from the metadata, if it stays inside its folder."""
    if not isinstance(path, str) or PurePosixPath(path).is_absolute() or ".." in path.split("/"):
        raise DataError(
            f"CLEAR-10: the metadata names {path!r}, which is no path inside {folder}/; do not use "
            "these files."
        )
    return str(PurePosixPath(folder, path))


def _json(files: Files, name: str, source: Path) -> dict[str, Any]:
    try:
        content = json.loads(_text(files, name, source))
    except ValueError as error:
        raise DataError(f"{source}: {name} is no JSON ({error}); get it again.") from error
    if not isinstance(content, dict):
        raise DataError(f"{source}: {name} holds no object; get it again.")
    return content


def _text(files: Files, name: str, source: Path) -> str:
    if files.sizes().get(name, MAX_TEXT) >= MAX_TEXT:
        raise DataError(f"{source}: {name} is missing or too large; get the data again.")
    with files.open(name) as file:
        return file.read().decode("utf-8")
