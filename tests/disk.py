"""A disk that remembers: every operation below a folder is recorded, and can be made to fail.

`Recorder` stands between Python's file functions and the disk. `Disk` plays a recording again up
to any operation: what a killed process leaves behind, or what a power loss does, where everything
may be lost that was not synced.
"""

import builtins
import io
import os
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

DATA = ("write", "truncate")
NAMES = ("create", "mkdir", "rename", "unlink", "rmdir")


@dataclass(frozen=True)
class Operation:
    """What was done: ``target`` is a file or folder, ``details`` depend on the kind."""

    kind: str
    target: int
    details: tuple[Any, ...] = ()


class Recorder:
    """Records what is written below ``root``; raises ``error`` instead of operation ``fail_at``.

    Args:
        root: a folder that exists.
        fail_at: number of the operation that fails, from 0; None for none.
        error: what is raised then.
        lasting: whether everything that needs room fails afterwards, too.
    """

    def __init__(
        self,
        root: Path,
        fail_at: int | None = None,
        error: Callable[[], BaseException] = lambda: OSError(28, "No space left on device"),
        lasting: bool = False,
    ) -> None:
        self.root = root
        self.operations: list[Operation] = []
        self.disk = Disk.of(root)
        self._fail_at, self._error, self._lasting = fail_at, error, lasting
        self._count = 0
        self._ids: dict[int, int] = {inode: inode for inode in self.disk.inodes}

    def _id(self, path: Path) -> int:
        """A number of our own: the system gives those of removed files to new ones."""
        return self._ids[_inode(path)]

    def _new_id(self, path: Path) -> int:
        self._ids[_inode(path)] = number = -1 - self._count
        return number

    def note(self, kind: str, target: int | None, *details: Any) -> None:
        """One operation is about to happen."""
        now, self._count = self._count, self._count + 1
        if self._fail_at is not None:
            later = self._lasting and now > self._fail_at and kind in ("write", "create", "mkdir")
            if now == self._fail_at or later:
                raise self._error()
        assert target is not None
        self.operations.append(Operation(kind, target, details))

    def inside(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and self.root in Path(path).absolute().parents

    @contextmanager
    def __call__(self) -> Iterator["Recorder"]:
        with (
            mock.patch.object(builtins, "open", self._open),
            mock.patch.object(io, "open", self._open),
            mock.patch.object(os, "open", self._os_open),
            mock.patch.object(os, "write", self._os_write),
            mock.patch.object(os, "fsync", self._fsync),
            mock.patch.object(os, "truncate", self._truncate),
            mock.patch.object(os, "ftruncate", self._ftruncate),
            mock.patch.object(os, "replace", self._rename(os.replace)),
            mock.patch.object(os, "rename", self._rename(os.rename)),
            mock.patch.object(os, "unlink", self._remove("unlink", os.unlink)),
            mock.patch.object(os, "remove", self._remove("unlink", os.remove)),
            mock.patch.object(os, "rmdir", self._remove("rmdir", os.rmdir)),
            mock.patch.object(os, "mkdir", self._mkdir),
            mock.patch.object(os, "sync", self._sync),
        ):
            yield self

    def _creating(self, path: Path) -> Callable[[], None]:
        """Note that a file is made; the returned function tells its inode once it is."""
        if path.exists() or not path.parent.is_dir():
            return lambda: None
        self.note("create", self._id(path.parent), path.name, None)
        at = len(self.operations) - 1

        def made() -> None:
            details = (path.name, self._new_id(path))
            self.operations[at] = Operation("create", self._id(path.parent), details)

        return made

    def _open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not self.inside(file) or not set(mode) & set("wxa+"):
            return _OPEN(file, mode, *args, **kwargs)
        path, existed = Path(file), Path(file).exists()
        if "x" in mode and existed:
            raise FileExistsError(17, "File exists", str(path))
        made = self._creating(path)
        if "w" in mode and existed:
            self.note("truncate", self._id(path), 0)
        raw = _Raw(path, mode.replace("b", "").replace("t", ""), self)
        made()
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding=kwargs.get("encoding"))

    def _os_open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if not (self.inside(path) and flags & os.O_CREAT):
            return _OS["open"](path, flags, *args, **kwargs)
        made = self._creating(Path(path))
        descriptor: int = _OS["open"](path, flags, *args, **kwargs)
        made()
        return descriptor

    def known(self, descriptor: int) -> int | None:
        """The inode behind a descriptor if it is of ours."""
        return self._ids.get(os.fstat(descriptor).st_ino)

    def _os_write(self, descriptor: int, data: bytes) -> int:
        if (inode := self.known(descriptor)) is not None:
            self.note("write", inode, os.lseek(descriptor, 0, os.SEEK_CUR), bytes(data))
        written: int = _OS["write"](descriptor, data)
        return written

    def _fsync(self, descriptor: int) -> None:
        if (inode := self.known(descriptor)) is not None:
            folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            self.note("fsync-folder" if folder else "fsync", inode)
        # the recording knows what is synced; the disk of the tests need not

    def _sync(self) -> None:
        self.note("sync", self.disk.root)

    def _truncate(self, path: Any, length: int) -> None:
        if self.inside(path):
            self.note("truncate", self._id(Path(path)), length)
        _OS["truncate"](path, length)

    def _ftruncate(self, descriptor: int, length: int) -> None:
        if (inode := self.known(descriptor)) is not None:
            self.note("truncate", inode, length)
        _OS["ftruncate"](descriptor, length)

    def _rename(self, real: Callable[..., None]) -> Callable[..., None]:
        def rename(source: Any, target: Any, **kwargs: Any) -> None:
            if self.inside(target):
                old, new = Path(source), Path(target)
                folders = self._id(new.parent), self._id(old.parent)
                self.note("rename", folders[0], old.name, new.name, self._id(old), folders[1])
            real(source, target, **kwargs)

        return rename

    def _remove(self, kind: str, real: Callable[..., None]) -> Callable[..., None]:
        def remove(path: Any, **kwargs: Any) -> None:
            gone = Path(path)
            if (folder := kwargs.get("dir_fd")) is not None:  # as shutil.rmtree does
                gone = Path(os.readlink(f"/proc/self/fd/{folder}")) / gone
            if (
                self.inside(gone)
                and gone.exists()
                and (kind == "unlink" or not any(gone.iterdir()))
            ):
                self.note(kind, self._id(gone.parent), gone.name)
            real(path, **kwargs)

        return remove

    def _mkdir(self, path: Any, *args: Any, **kwargs: Any) -> None:
        made = Path(path)
        if not self.inside(path) or made.exists():
            return _OS["mkdir"](path, *args, **kwargs)
        self.note("mkdir", self._id(made.parent), made.name, None)
        at = len(self.operations) - 1
        _OS["mkdir"](path, *args, **kwargs)
        details = (made.name, self._new_id(made))
        self.operations[at] = Operation("mkdir", self._id(made.parent), details)
        return None


class _Raw(io.FileIO):
    """A file whose every write is noted."""

    def __init__(self, path: Path, mode: str, recorder: Recorder) -> None:
        super().__init__(str(path), mode)
        self._recorder, self._append = recorder, "a" in mode

    def write(self, data: Any, /) -> int:
        at = os.fstat(self.fileno()).st_size if self._append else self.tell()
        self._recorder.note("write", self._recorder.known(self.fileno()), at, bytes(data))
        return super().write(data)

    def truncate(self, size: int | None = None, /) -> int:
        length = self.tell() if size is None else size
        self._recorder.note("truncate", self._recorder.known(self.fileno()), length)
        return super().truncate(size)


@dataclass
class Disk:
    """Files and folders by inode, as they are on the disk itself."""

    root: int
    files: dict[int, bytearray] = field(default_factory=dict)
    folders: dict[int, dict[str, int]] = field(default_factory=dict)

    @property
    def inodes(self) -> set[int]:
        return {*self.files, *self.folders}

    @classmethod
    def of(cls, root: Path) -> "Disk":
        """The disk as it is, all of it synced."""
        disk = cls(_inode(root))
        for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
            disk.folders[_inode(folder)] = {path.name: _inode(path) for path in folder.iterdir()}
        for path in root.rglob("*"):
            if path.is_file():
                disk.files[_inode(path)] = bytearray(path.read_bytes())
        return disk

    def copy(self) -> "Disk":
        files = {inode: bytearray(content) for inode, content in self.files.items()}
        return Disk(self.root, files, {inode: dict(names) for inode, names in self.folders.items()})

    def apply(self, operation: Operation) -> None:
        kind, target, details = operation.kind, operation.target, operation.details
        if kind in DATA:
            content = self.files.setdefault(target, bytearray())
            if kind == "truncate":
                content[details[0] :] = bytes(max(0, details[0] - len(content)))
            else:
                at, data = details
                content.extend(bytes(max(0, at - len(content))))
                content[at : at + len(data)] = data
        if kind not in NAMES:
            return
        names = self.folders.setdefault(target, {})
        if kind in ("create", "mkdir"):
            name, inode = details
            names[name] = inode
            if kind == "mkdir":
                self.folders.setdefault(inode, {})
        elif kind == "rename":
            old, new, inode, source = details
            self.folders.get(source, {}).pop(old, None)
            names[new] = inode
        elif kind in ("unlink", "rmdir"):
            names.pop(details[0], None)

    def write_to(self, folder: Path) -> None:
        """Make a folder that looks like this disk."""

        def fill(inode: int, path: Path) -> None:
            path.mkdir(parents=True, exist_ok=True)
            for name, child in self.folders.get(inode, {}).items():
                if child in self.folders:
                    fill(child, path / name)
                else:
                    (path / name).write_bytes(self.files.get(child, b""))

        fill(self.root, folder)


def after_kill(recorder: Recorder, count: int) -> Disk:
    """The disk after so many operations; every other time the last write is torn."""
    disk = recorder.disk.copy()
    for operation in recorder.operations[:count]:
        disk.apply(operation)
    if count < len(recorder.operations) and count % 2:
        torn = recorder.operations[count]
        if torn.kind == "write":
            at, data = torn.details
            disk.apply(Operation("write", torn.target, (at, data[: len(data) // 2])))
    return disk


def after_power_loss(recorder: Recorder, count: int, rng: random.Random) -> Disk:
    """The disk when power fails after so many operations.

    Data that was not synced may be missing, may be there in part, or may be zeros. Names made,
    renamed and removed since a folder was synced may each be there or not.
    """
    disk = recorder.disk.copy()
    pending: dict[int, list[Operation]] = {}
    for operation in recorder.operations[:count]:
        if operation.kind == "sync":
            for synced in chain.from_iterable(pending.values()):
                disk.apply(synced)
            pending.clear()
        elif operation.kind in ("fsync", "fsync-folder"):
            for synced in pending.pop(operation.target, []):
                disk.apply(synced)
        else:
            pending.setdefault(operation.target, []).append(operation)
    names_kept = rng.choice((0.0, 0.5, 1.0))
    for operations in pending.values():
        fate = rng.choice(("lost", "part", "zeros"))
        kept = rng.randrange(len(operations) + 1)
        for i, operation in enumerate(operations):
            if operation.kind in NAMES:
                if rng.random() < names_kept:
                    disk.apply(operation)
            elif fate == "part" and i < kept:
                disk.apply(operation)
            elif fate == "zeros" and operation.kind == "write":
                at, data = operation.details
                disk.apply(Operation("write", operation.target, (at, bytes(len(data)))))
    return disk


def _inode(path: Path) -> int:
    return os.stat(path).st_ino


_OPEN = builtins.open
_OS = {name: getattr(os, name) for name in ("open", "write", "truncate", "ftruncate", "mkdir")}
