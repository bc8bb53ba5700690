"""Files that are replaced as a whole: readers find the old content or the new, never a mixture.

New content is written beside its target as ``.NAME.XXXXXXXX.proxreplay-writing``, synced to disk
and renamed. Its writer holds a lock on it. So several processes may write one target at the same
time (the last one to finish wins), and the next one removes what a killed process left behind.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from proxreplay.locking import acquire

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.proxreplay-writing")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of ``path`` once the block is left; on an error nothing changes.

    Folders that are missing are made. When this returns, the new content and its name are on disk.
    """
    make_folder(path.parent)
    remove_leftovers(path.parent, path.name)
    file, temporary = _create(path)
    try:
        with file:
            yield file
            sync_file(file)
            _rename_or_remove(file, temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a write knows no name
            error.filename = str(path)
        raise
    sync_folder(path.parent)


@contextmanager
def marker(folder: Path) -> Iterator[Path]:
    """A hidden empty file that is in ``folder`` while the block runs; the folder is made.

    The name is new every time. What a killed process left is removed by the next one.
    """
    make_folder(folder)
    remove_leftovers(folder, "marker")
    file, path = _create(folder / "marker")
    with file:
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a text file (UTF-8)."""
    with replacing(path) as file:
        file.write(text.encode())


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a JSON file; its last key is a checksum of the others."""
    signed = {**values, "sha256": _digest(values)}
    write_text(path, json.dumps(signed, indent=2) + "\n")


def unsigned(values: dict[str, Any]) -> dict[str, Any]:
    """What `write_json` was given; files without a checksum, as earlier versions wrote, are too.

    Raises:
        ValueError: the values are not those that were written.
    """
    signed = values.pop("sha256", None)
    if signed is not None and signed != _digest(values):
        raise ValueError("damaged: its checksum is wrong")
    if signed is None and values:
        *others, (name, last) = values.items()
        if last == _digest(dict(others)):
            raise ValueError(f"damaged: its checksum is called {name!r}, not 'sha256'")
    return values


def file_digest(path: Path, algorithm: str) -> str:
    """Hexadecimal digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove what killed processes left of ``name``, or of any file that `replacing` wrote here."""
    for path in folder.iterdir():
        found = _TEMPORARY.fullmatch(path.name)
        if found and name in (None, found[1]) and path.is_file():
            with suppress(OSError), open(path, "rb") as file:
                acquire(file.fileno(), wait=False)
                _rename_or_remove(file, path, None)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, on disk when this returns."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_file(file: IO[bytes]) -> None:
    """See that what was written is on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """See that the names in a folder are on disk; Windows does so by itself."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _create(path: Path) -> tuple[IO[bytes], Path]:
    """A new file beside ``path``, locked as long as it is open if the file system has locks."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.proxreplay-writing")
        file = open(temporary, "xb")  # noqa: SIM115 (the caller closes it)
        try:
            acquire(file.fileno(), wait=False)
            file.seek(0)
        except BlockingIOError:  # taken for a leftover before it was locked
            file.close()
            continue
        except OSError:
            return file, temporary
        if temporary.exists():
            return file, temporary
        file.close()


def _rename_or_remove(file: IO[bytes], path: Path, target: Path | None) -> None:
    """Do it while the lock is held, except on Windows, where the file must be closed first."""
    if os.name == "nt":
        file.close()
    if target is None:
        path.unlink()
    else:
        os.replace(path, target)
