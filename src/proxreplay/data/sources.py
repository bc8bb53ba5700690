"""What a data set is made from: fingerprints that tell whether a file or folder has changed."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from proxreplay.errors import DataError


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a source.

    Args:
        name: of the file or folder, without the folders above.
        size: bytes of a file; files in a folder.
        mtime_ns: last change of a file; 0 for a folder.
        sha256: of a file's content; of the names, sizes and times in a folder.
    """

    name: str
    size: int
    mtime_ns: int
    sha256: str


def fingerprint(source: Path) -> Fingerprint:
    """The identity of a file or folder; reads a whole file but only the listing of a folder."""
    if source.is_dir():
        digest, count = hashlib.sha256(), 0
        for relative, stat in walk_files(source):
            digest.update(f"{relative}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
            count += 1
        return Fingerprint(source.name, count, 0, digest.hexdigest())
    stat = _stat(source)
    return Fingerprint(source.name, stat.st_size, stat.st_mtime_ns, file_digest(source, "sha256"))


def is_unchanged(before: Sequence[Fingerprint], sources: Sequence[Path]) -> bool:
    """Whether the sources are still the same; a file with the same size and time is not read."""
    if len(before) != len(sources):
        return False
    for old, source in zip(before, sources, strict=True):
        if not source.is_dir():
            stat = _stat(source)
            if (old.size, old.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
                continue
            if old.size != stat.st_size:
                return False
        if old.sha256 != fingerprint(source).sha256:
            return False
    return True


def file_digest(path: Path, algorithm: str) -> str:
    """Hexadecimal digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); check the path.") from error


def walk_files(
    folder: Path, prefix: str = "", depth: int = 8
) -> Iterator[tuple[str, os.stat_result]]:
    """Files below a folder, sorted, through links; the depth is bounded because links can loop."""
    if depth == 0:
        raise DataError(f"{folder}: folders nest more than 8 deep; is there a link to a parent?")
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            if entry.is_dir():
                yield from walk_files(Path(entry.path), f"{prefix}{entry.name}/", depth - 1)
            else:
                yield f"{prefix}{entry.name}", entry.stat()
