"""Archives without surprises: every member is checked before one byte is read or written.

Refused are absolute and ``..`` paths, links and devices, encrypted and doubled members, too many
members and too many bytes. No read takes more memory than its limit, whatever a file announces.
"""

import gzip
import os
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from proxreplay.data.fingerprints import UNREADABLE, regular, walk_files
from proxreplay.errors import DataError, ProxreplayError
from proxreplay.files import make_folder, sync_folder
from proxreplay.locking import locked

COPY_CHUNK = 1 << 20
MAX_READ = 32 * 2**20  # at a time: a list of members or an extended header, not content
MAX_TEXT = 16 * 2**20
_DAMAGED = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, struct.error),
    *(EOFError, OSError, ValueError, RuntimeError, IndexError, KeyError, OverflowError),
)


@dataclass(frozen=True)
class Limits:
    """Bounds on what an archive may hold: above the largest set here, below a full disk."""

    members: int = 500_000  # files and folders
    total_bytes: int = 32 * 2**30  # unpacked size of all files together


@dataclass(frozen=True)
class Files:
    """Files by name, wherever they are: in a tar, in a zip or in a folder."""

    where: Path  # the archive or folder
    sizes: Mapping[str, int]  # bytes of every file, by its path with forward slashes
    open: Callable[[str], IO[bytes]]  # a file's content

    def read(self, name: str, limit: int) -> bytes:
        """A whole file of at most ``limit`` bytes."""
        if name not in self.sizes:
            raise DataError(f"{self.where}: {name} is missing; get the data again.")
        if self.sizes[name] > limit:
            raise DataError(
                f"{self.where}: {name} has {self.sizes[name]} bytes, more than {limit}; replace or "
                "remove it."
            )
        try:
            with self.open(name) as file:
                return file.read(self.sizes[name])
        except _DAMAGED as error:
            raise DataError(
                f"{self.where}: {name} cannot be read ({error}); get it again."
            ) from error

    def text(self, name: str) -> str:
        """A whole text file."""
        try:
            return self.read(name, MAX_TEXT).decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where}: {name} is no text ({error}); get it again.") from error


@contextmanager
def open_files(path: Path, limits: Limits | None = None) -> Iterator[Files]:
    """Read an archive (``.tar``, ``.tar.gz``, ``.tgz``, ``.zip``) or a folder in place.

    Raises:
        DataError: it is damaged or holds what no data set should; also while it is being read.
    """
    limits = limits or Limits()
    try:
        if path.is_dir():
            sizes = {name: found.st_size for name, found in walk_files(path)}
            yield Files(path, sizes, lambda name: (path / name).open("rb"))
            return
        regular(path)
        if path.name.endswith((".zip", ".npz")):
            with path.open("rb") as raw:
                listing = _Listing(raw, path)
                yield _zip_files(zipfile.ZipFile(cast("IO[bytes]", listing)), listing, limits)
        elif path.name.endswith((".tar", ".tar.gz", ".tgz")):
            with path.open("rb") if path.name.endswith(".tar") else gzip.open(path) as raw:
                listing = _Listing(cast("IO[bytes]", raw), path)
                with tarfile.open(fileobj=cast("IO[bytes]", listing), mode="r:") as archive:
                    yield _tar_files(archive, listing, limits)
        else:
            raise DataError(f"{path}: expected a folder, or a .tar, .tar.gz, .tgz or .zip archive.")
    except ProxreplayError:
        raise
    except _DAMAGED as error:
        raise DataError(
            f"{path} is damaged ({type(error).__name__}: {error}); get it again."
        ) from error


class _Listing:
    """An archive's file; while its members are listed, no read takes more than `MAX_READ` bytes."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self.path, self.complete, self._file = path, False, file

    def read(self, size: int = -1) -> bytes:
        if self.complete:
            return self._file.read(size)
        data = self._file.read(min(size, MAX_READ + 1) if size >= 0 else MAX_READ + 1)
        if len(data) > MAX_READ:
            raise DataError(f"{self.path}: its list of members is too large; do not use this file.")
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def unpack(archive: Path, folder: Path, limits: Limits | None = None) -> None:
    """Unpack an archive into a new folder, which appears only when it is complete.

    If the archive holds one folder with everything inside, that folder is the new one.
    """
    make_folder(folder.parent)
    with open_files(archive, limits) as files, _unpacking(folder) as scratch:
        if folder.exists():
            raise DataError(f"{folder} exists already; move it away to unpack {archive.name}.")
        scratch.mkdir()
        for name, size in files.sizes.items():
            target = scratch.joinpath(*PurePosixPath(name).parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            with files.open(name) as content, target.open("xb") as file:
                _copy(content, file, size, f"{archive}: member '{name}'")
        inside = list(scratch.iterdir())
        top = inside[0] if len(inside) == 1 and inside[0].is_dir() else scratch
        if hasattr(os, "sync"):  # once, for perhaps 100,000 files
            os.sync()
        top.rename(folder)
        sync_folder(folder.parent)


def unpacked(folder: Path) -> bool:
    """Whether `unpack` has made a folder; waits for one at work, cleans up after a killed one."""
    if any(path.exists() for path in _beside(folder)):
        with _unpacking(folder):
            pass
    return folder.exists()


@contextmanager
def _unpacking(folder: Path) -> Iterator[Path]:
    """The place to unpack to, which is ours alone; nothing is left of it afterwards."""
    scratch, lock = _beside(folder)
    with locked(lock, wait=True):
        try:
            shutil.rmtree(scratch, ignore_errors=True)  # of a killed process
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            lock.unlink()


def _beside(folder: Path) -> tuple[Path, Path]:
    endings = ("proxreplay-unpacking", "proxreplay-lock")
    scratch, lock = (folder.with_name(f".{folder.name}.{ending}") for ending in endings)
    return scratch, lock


def _copy(content: IO[bytes], file: IO[bytes], size: int, what: str) -> None:
    """Copy exactly the announced bytes; an archive that holds more or fewer lies."""
    left = size
    while chunk := content.read(min(COPY_CHUNK, left + 1)):
        left -= len(chunk)
        if left < 0:
            break
        file.write(chunk)
    if left:
        raise DataError(f"{what} is not the {size} bytes long it claims to be; get it again.")


def _check_name(name: str, archive: Path, taken: Mapping[str, Any]) -> str:
    """The member's path in one spelling, if it stays inside the folder it is unpacked into."""
    path = PurePosixPath(name)
    plain = name.replace("\\", "/")
    parts = plain.split("/")
    if UNREADABLE.search(name):
        raise DataError(f"{archive}: member {name!a} has no readable name; repack it.")
    if path.is_absolute() or ".." in parts or ":" in parts[0] or not path.parts:
        raise DataError(
            f"{archive}: member '{name}' would be written outside the folder; do not use this file."
        )
    if plain != name:
        raise DataError(f"{archive}: member '{name}' has a backslash in its path; repack it.")
    if str(path) in taken:
        raise DataError(f"{archive}: member '{name}' occurs twice; repack it.")
    return str(path)


def _check_total(archive: Path, members: int, total: int, limits: Limits) -> None:
    if members > limits.members or total > limits.total_bytes:
        raise DataError(
            f"{archive}: more than {limits.members} members or {limits.total_bytes} bytes; this "
            "is no data set."
        )


def _link_or_device(archive: Path, name: str) -> DataError:
    return DataError(f"{archive}: member '{name}' is a link or device; do not use this file.")


def _tar_files(archive: tarfile.TarFile, listing: _Listing, limits: Limits) -> Files:
    path = listing.path
    members: dict[str, tarfile.TarInfo] = {}
    total = 0
    for count, member in enumerate(archive, start=1):
        total += member.size
        _check_total(path, count, total, limits)  # before tarfile skips over the content
        if member.isdir():
            continue
        name = _check_name(member.name, path, members)
        if not member.isreg():
            raise _link_or_device(path, member.name)
        members[name] = tarfile.data_filter(member, str(path.parent))
    listing.complete = True

    def open_member(name: str) -> IO[bytes]:
        content = archive.extractfile(members[name])
        assert content is not None  # it is a regular file
        return content

    return Files(path, {name: m.size for name, m in members.items()}, open_member)


def _zip_files(archive: zipfile.ZipFile, listing: _Listing, limits: Limits) -> Files:
    path = listing.path
    infos = archive.infolist()
    _check_total(path, len(infos), sum(m.file_size for m in infos), limits)
    members: dict[str, zipfile.ZipInfo] = {}
    for member in infos:
        if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise _link_or_device(path, member.filename)
        if member.flag_bits & 0x1:
            raise DataError(f"{path}: member '{member.filename}' is encrypted; decrypt the zip.")
        name = _check_name(member.filename, path, members)
        if not member.is_dir():
            members[name] = member
    listing.complete = True
    sizes = {name: m.file_size for name, m in members.items()}
    return Files(path, sizes, lambda name: archive.open(members[name]))
