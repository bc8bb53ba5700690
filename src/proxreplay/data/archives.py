"""Archives without surprises: every member is checked before one byte is read or written.

Refused are absolute and ``..`` paths, links and devices, too many members and too many bytes.
"""

import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Protocol

from proxreplay.data.sources import walk_files
from proxreplay.errors import DataError

COPY_CHUNK = 1 << 20
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    OSError,
    NotImplementedError,
)


@dataclass(frozen=True)
class Limits:
    """Bounds on what an archive may hold, well above the largest set here and below a disk.

    Args:
        members: files and folders.
        total_bytes: unpacked size of all files together.
    """

    members: int = 1_000_000
    total_bytes: int = 32 * 2**30


class Files(Protocol):
    """Files by name, wherever they lie: in a tar, in a zip or in a folder."""

    def sizes(self) -> Mapping[str, int]:
        """Bytes of every file, by its path with forward slashes."""

    def open(self, name: str) -> IO[bytes]:
        """A file's content."""


@contextmanager
def open_files(path: Path, limits: Limits | None = None) -> Iterator[Files]:
    """Read an archive (``.tar``, ``.tar.gz``, ``.tgz``, ``.zip``) or a folder in place.

    Raises:
        DataError: it is damaged or holds what no data set should; also while it is being read.
    """
    limits = limits or Limits()
    try:
        if path.is_dir():
            yield _Folder(path)
        elif path.name.endswith((".zip", ".npz")):
            with zipfile.ZipFile(path) as archive:
                yield _Zip(archive, path, limits)
        elif path.name.endswith((".tar", ".tar.gz", ".tgz")):
            with tarfile.open(path) as archive:
                yield _Tar(archive, path, limits)
        else:
            raise DataError(f"{path}: expected a folder, or a .tar, .tar.gz, .tgz or .zip archive.")
    except _DAMAGED as error:
        raise DataError(
            f"{path} is damaged ({type(error).__name__}: {error}); delete it and get it again."
        ) from error


def unpack(archive: Path, folder: Path, limits: Limits | None = None) -> None:
    """Unpack an archive into a new folder, which appears only when it is complete.

    Where the archive holds one folder with everything inside, that folder is the new one.

    Args:
        archive: as for `open_files`.
        folder: must not exist yet.
        limits: bounds on members and bytes.
    """
    if folder.exists():
        raise DataError(f"{folder} exists already; move it away before unpacking {archive.name}.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        open_files(archive, limits) as files,
        tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch,
    ):
        fresh = Path(scratch, "fresh")
        fresh.mkdir()
        for name, size in files.sizes().items():
            target = fresh.joinpath(*PurePosixPath(name).parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            with files.open(name) as content, target.open("xb") as file:
                _copy(content, file, size, f"{archive}: member '{name}'")
        inside = list(fresh.iterdir())
        top = inside[0] if len(inside) == 1 and inside[0].is_dir() else fresh
        top.rename(folder)


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


def _check_name(name: str, archive: Path, taken: Mapping[str, int]) -> str:
    """The member's path in one spelling, if it stays inside the folder it is unpacked into."""
    path = PurePosixPath(name)
    plain = name.replace("\\", "/")
    parts = plain.split("/")
    if path.is_absolute() or ".." in parts or ":" in parts[0] or "\0" in name or not path.parts:
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
            "is no data set, or raise the limits."
        )


class _Tar:
    def __init__(self, archive: tarfile.TarFile, path: Path, limits: Limits) -> None:
        self._archive = archive
        self._members: dict[str, tarfile.TarInfo] = {}
        self._sizes: dict[str, int] = {}
        total = 0
        for count, member in enumerate(archive, start=1):
            total += member.size
            _check_total(path, count, total, limits)  # before tarfile skips over the content
            if member.isdir():
                continue
            name = _check_name(member.name, path, self._sizes)
            if not member.isreg():
                raise DataError(
                    f"{path}: member '{member.name}' is a link or device; do not use this file."
                )
            self._members[name], self._sizes[name] = member, member.size

    def sizes(self) -> Mapping[str, int]:
        return self._sizes

    def open(self, name: str) -> IO[bytes]:
        content = self._archive.extractfile(self._members[name])
        assert content is not None  # it is a regular file
        return content


class _Zip:
    def __init__(self, archive: zipfile.ZipFile, path: Path, limits: Limits) -> None:
        self._archive = archive
        self._members: dict[str, zipfile.ZipInfo] = {}
        self._sizes: dict[str, int] = {}
        members = archive.infolist()
        _check_total(path, len(members), sum(m.file_size for m in members), limits)
        for member in members:
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise DataError(
                    f"{path}: member '{member.filename}' is a link or device; do not use this file."
                )
            name = _check_name(member.filename, path, self._sizes)
            if not member.is_dir():
                self._members[name], self._sizes[name] = member, member.file_size

    def sizes(self) -> Mapping[str, int]:
        return self._sizes

    def open(self, name: str) -> IO[bytes]:
        return self._archive.open(self._members[name])


class _Folder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._sizes = {name: found.st_size for name, found in walk_files(path)}

    def sizes(self) -> Mapping[str, int]:
        return self._sizes

    def open(self, name: str) -> IO[bytes]:
        return (self._path / name).open("rb")
