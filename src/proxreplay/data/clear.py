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
from proxreplay.data.cache import Decoded
from proxreplay.data.images import ImageFile, image_splits
from proxreplay.errors import DataError

FOLDERS = {"train": ("train", "train_image_only"), "test": ("test",)}
METADATA = "labeled_metadata.json"


@contextmanager
def read(source: Path, size: int) -> Iterator[Decoded]:
    """Decode the folder into squares: shorter side resized to ``size``, centre kept.

    At 224 that is exactly the protocol's view for evaluation; for training, the random crop along
    the longer side is gone. A larger size brings random crops back.
    """
    with open_files(source) as files:
        folders = {part: _part_folder(files, names) for part, names in FOLDERS.items()}
        classes = {
            part: [name.strip() for name in files.text(f"{folder}/class_names.txt").split("\n")]
            for part, folder in folders.items()
        }
        names = [name for name in classes["train"] if name]
        metadata = {part: _json(files, f"{folder}/{METADATA}") for part, folder in folders.items()}
        if classes["train"] != classes["test"] or set(metadata["train"]) != set(metadata["test"]):
            raise DataError(
                f"{source}: train and test differ in their classes or buckets; get both again."
            )
        buckets = list(metadata["train"])
        parts = {
            part: _images(files, folder, metadata[part], names, buckets)
            for part, folder in folders.items()
        }
        yield Decoded(tuple(names), image_splits(files, parts, size), tuple(buckets))


def _part_folder(files: Files, folders: tuple[str, ...]) -> str:
    for folder in folders:
        if f"{folder}/{METADATA}" in files.sizes:
            return folder
    raise DataError(f"{files.where}: {folders[0]}/{METADATA} is missing; get the data again.")


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
            for record in _json(files, _inside(folder, listings[name])).values():
                path = record.get("IMG_PATH") if isinstance(record, dict) else None
                images.append(ImageFile(_existing(files, folder, path), label, domain))
    return images


def _existing(files: Files, folder: str, path: object) -> str:
    image = _inside(folder, path)
    if image not in files.sizes:
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


def _json(files: Files, name: str) -> dict[str, Any]:
    try:
        content = json.loads(files.text(name))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{files.where}: {name} is no JSON ({error}); get it again.") from error
    if not isinstance(content, dict):
        raise DataError(f"{files.where}: {name} holds no object; get it again.")
    return content
