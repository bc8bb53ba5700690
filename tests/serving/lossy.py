"""A disk for SQLite and Python together that remembers every operation, also after a kill -9.

`Recorder` sees what Python writes. What SQLite writes goes through its VFS, of which a copy with
three functions of our own is registered here by ctypes. Every operation is in a journal outside
the folder before it is done, so `after_power_loss` can say what a dying machine would have left.
"""

import ctypes
import io
import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.disk import _OS, Disk, Operation, Recorder

DIRECTORY_SYNCED = 0x80000 | 0x800  # WAL and main journal: SQLite syncs their name at first sync
_INT, _POINTER, _WIDE = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
_OPEN = ctypes.CFUNCTYPE(_INT, _POINTER, _POINTER, _POINTER, _INT, _POINTER)
_DELETE = ctypes.CFUNCTYPE(_INT, _POINTER, ctypes.c_char_p, _INT)
_WRITE = ctypes.CFUNCTYPE(_INT, _POINTER, _POINTER, _INT, _WIDE)
_TRUNCATE = ctypes.CFUNCTYPE(_INT, _POINTER, _WIDE)
_SYNC = ctypes.CFUNCTYPE(_INT, _POINTER, _INT)
_VFS_BYTES, _VFS_OPEN, _VFS_DELETE, _VFS_NAME = 16 + 19 * 8, 16 + 3 * 8, 16 + 4 * 8, 16 + 8
_METHODS_BYTES, _METHOD_WRITE, _METHOD_TRUNCATE, _METHOD_SYNC = 8 + 18 * 8, 24, 32, 40


def sqlite_library() -> str | None:
    """The shared library that Python's sqlite3 uses; None if it has its own inside."""
    import sqlite3  # noqa: F401

    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    found = [line.split()[-1] for line in maps.read_text().splitlines() if "libsqlite3" in line]
    return found[0] if found else None


class Lossy(Recorder):
    """Records what Python and SQLite do below ``root``; with a journal, for another process too.

    Args:
        root: a folder that exists.
        journal: a file outside of it, or None.
    """

    def __init__(self, root: Path, journal: Path | None = None) -> None:
        super().__init__(root)
        self._noting = threading.RLock()
        self._journal = None if journal is None else io.FileIO(journal, "w")
        self._files: dict[int, tuple[Path, int]] = {}  # of SQLite: address to path and flags
        self._new: set[int] = set()
        self._kept: list[Any] = []  # what SQLite points to

    def note(self, kind: str, target: int | None, *details: Any) -> None:
        assert target is not None
        with self._noting:
            self._count += 1
            operation = Operation(kind, target, details)
            self.operations.append(operation)
            if self._journal is not None:
                data = pickle.dumps((kind, target, details))
                self._journal.write(len(data).to_bytes(8, "little") + data)

    def _creating(self, path: Path) -> Any:
        """Noted when it is done, with the inode; threads may do other things in between."""
        if path.exists() or not path.parent.is_dir():
            return lambda: None

        def made() -> None:
            with self._noting:
                self.note("create", self._id(path.parent), path.name, self._new_id(path))

        return made

    def _mkdir(self, path: Any, *args: Any, **kwargs: Any) -> None:
        made = Path(path)
        new = self.inside(path) and not made.exists()
        _OS["mkdir"](path, *args, **kwargs)
        if new:
            with self._noting:
                self.note("mkdir", self._id(made.parent), made.name, self._new_id(made))

    @contextmanager
    def __call__(self) -> Iterator["Lossy"]:
        library = ctypes.CDLL(sqlite_library())
        library.sqlite3_vfs_find.restype = _POINTER
        default = library.sqlite3_vfs_find(None)
        mine = self._vfs(default)
        library.sqlite3_vfs_register(ctypes.c_void_p(ctypes.addressof(mine)), 1)
        try:
            with super().__call__():
                yield self
        finally:
            library.sqlite3_vfs_register(ctypes.c_void_p(default), 1)
            library.sqlite3_vfs_unregister(ctypes.c_void_p(ctypes.addressof(mine)))

    # --- between SQLite and the disk --------------------------------------------------------------

    def _vfs(self, default: int) -> Any:
        """A copy of SQLite's own VFS that tells us what it does."""
        vfs = ctypes.create_string_buffer(ctypes.string_at(default, _VFS_BYTES), _VFS_BYTES)
        name = ctypes.create_string_buffer(b"lossy")
        really_open = _OPEN(_at(vfs, _VFS_OPEN))
        really_delete = _DELETE(_at(vfs, _VFS_DELETE))

        def open_(own: int, path: int, file: int, flags: int, out: int) -> int:
            where = Path(os.fsdecode(ctypes.string_at(path))) if path else None
            made = self._creating(where) if where and self.inside(where) else lambda: None
            new = where is not None and not where.exists()
            code = really_open(default, path, file, flags, out)
            if code == 0 and where is not None and self.inside(where):
                made()
                if new and flags & DIRECTORY_SYNCED:
                    self._new.add(file)
                self._files[file] = (where, self._ids[os.stat(where).st_ino])
                self._watch(file)
            return int(code)

        def delete(own: int, path: bytes, sync: int) -> int:
            where = Path(os.fsdecode(path))
            if self.inside(where) and where.exists():
                self.note("unlink", self._id(where.parent), where.name)
                if sync:
                    self.note("fsync-folder", self._id(where.parent))
            return int(really_delete(default, path, sync))

        functions = (_OPEN(open_), _DELETE(delete))
        self._kept += [vfs, name, really_open, really_delete, *functions]
        _put(vfs, _VFS_NAME, ctypes.addressof(name))
        _put(vfs, _VFS_OPEN, _address(functions[0]))
        _put(vfs, _VFS_DELETE, _address(functions[1]))
        return vfs

    def _watch(self, file: int) -> None:
        """Give an open file of SQLite functions that note writes, truncations and syncs."""
        pointer = ctypes.c_void_p.from_address(file)
        own = ctypes.string_at(pointer.value, _METHODS_BYTES)
        methods = ctypes.create_string_buffer(own, _METHODS_BYTES)
        really_write = _WRITE(_at(methods, _METHOD_WRITE))
        really_truncate = _TRUNCATE(_at(methods, _METHOD_TRUNCATE))

        def write(address: int, data: int, size: int, at: int) -> int:
            self.note("write", self._files[address][1], at, ctypes.string_at(data, size))
            return int(really_write(address, data, size, at))

        def truncate(address: int, size: int) -> int:
            self.note("truncate", self._files[address][1], size)
            return int(really_truncate(address, size))

        def sync(address: int, flags: int) -> int:
            path, number = self._files[address]
            self.note("fsync", number)
            if address in self._new:
                self._new.discard(address)
                self.note("fsync-folder", self._id(path.parent))
            return 0  # the journal knows what is synced; the disk of the tests need not

        functions = (_WRITE(write), _TRUNCATE(truncate), _SYNC(sync))
        places = (_METHOD_WRITE, _METHOD_TRUNCATE, _METHOD_SYNC)
        for place, function in zip(places, functions, strict=True):
            _put(methods, place, _address(function))
        self._kept += [methods, really_write, really_truncate, *functions]
        pointer.value = ctypes.addressof(methods)


def read_journal(disk: Disk, journal: Path) -> Any:
    """What `after_power_loss` needs, from the journal of a process that is gone."""
    data, operations = journal.read_bytes(), []
    while len(data) >= 8:
        size = int.from_bytes(data[:8], "little")
        if len(data) < 8 + size:
            break
        operations.append(Operation(*pickle.loads(data[8 : 8 + size])))
        data = data[8 + size :]
    return SimpleNamespace(disk=disk, operations=operations)


def _at(buffer: Any, offset: int) -> int:
    return int.from_bytes(buffer.raw[offset : offset + 8], "little")


def _put(buffer: Any, offset: int, value: int) -> None:
    ctypes.memmove(ctypes.addressof(buffer) + offset, value.to_bytes(8, "little"), 8)


def _address(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)
