"""What a data set is made from: fingerprints that tell whether a file or folder has changed."""

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from proxreplay.errors import DataError
from proxreplay.files import file_digest

MAX_FILES = 1_000_000
MAX_DEPTH = 8
UNREADABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters; no Unicode


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a source."""

    name: str  # of the file or folder, without the folders above
    size: int  # bytes of a file; number of files in a folder
    mtime_ns: int  # last change of a file; 0 for a folder
    sha256: str  # of a file's content; of the names, sizes and times in a folder


def fingerprint(source: Path) -> Fingerprint:
    """The identity of a file or folder; reads a whole file but only the listing of a folder."""
    if source.is_dir():
        digest, count = hashlib.sha256(), 0
        for relative, found in walk_files(source):
            digest.update(f"{relative}\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
            count += 1
        return Fingerprint(source.name, count, 0, digest.hexdigest())
    found = regular(source)
    return Fingerprint(source.name, found.st_size, found.st_mtime_ns, file_digest(source, "sha256"))


def is_unchanged(before: Fingerprint, source: Path) -> bool:
    """Whether a source is still the same; a file with the same size and time is not read."""
    if not source.is_dir():
        found = regular(source)
        if (before.size, before.mtime_ns) == (found.st_size, found.st_mtime_ns):
            return True
        if before.size != found.st_size:
            return False
    return before.sha256 == fingerprint(source).sha256


def regular(path: Path) -> os.stat_result:
    """The size and time of a file; a pipe or device is refused, since reading may never end."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); check the path.") from error
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path} is no regular file (a pipe, device or folder); give a file.")
    return found


def walk_files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Files below a folder, sorted, through links; the depth is bounded because links can loop."""
    for count, found in enumerate(_walk(folder, "", MAX_DEPTH)):
        if count == MAX_FILES:
            raise DataError(f"{folder}: more than {MAX_FILES} files; choose a smaller folder.")
        yield found


def _walk(folder: Path, prefix: str, depth: int) -> Iterator[tuple[str, os.stat_result]]:
    if depth == 0:
        raise DataError(
            f"{folder}: folders nest more than {MAX_DEPTH} deep; is there a link to a parent?"
        )
    try:
        with os.scandir(folder) as listing:
            entries = sorted(listing, key=lambda e: e.name)
    except OSError as error:
        raise DataError(f"{folder} cannot be read ({error}); check the folder.") from error
    for entry in entries:
        if UNREADABLE.search(entry.name):
            raise DataError(
                f"{folder}: {entry.name!a} is no readable file name; rename or remove it."
            )
        if entry.is_dir():
            yield from _walk(Path(entry.path), f"{prefix}{entry.name}/", depth - 1)
        else:
            yield f"{prefix}{entry.name}", regular(Path(entry.path))
