"""A lock on a file: one holder at a time, on every system, and gone when its process ends."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform == "win32":
    import msvcrt

    def acquire(descriptor: int, wait: bool) -> None:
        """Lock an open file until it is closed; moves its position."""
        # Other handles cannot read locked bytes, so lock one that is never written.
        os.lseek(descriptor, 1 << 30, os.SEEK_SET)
        while True:
            try:
                msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
                return
            except OSError as error:
                if not wait:
                    raise BlockingIOError(error.errno, error.strerror) from error
else:
    import fcntl

    def acquire(descriptor: int, wait: bool) -> None:
        """Lock an open file until it is closed; BlockingIOError if it is locked already."""
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock file ``path``, which then holds the id of this process.

    The file is made if it is missing (its folder must exist) and is left behind; its holder may
    delete it. A second ``locked`` on the same path is refused even within one process.

    Raises:
        BlockingIOError: somebody else holds the lock, and nobody asked to ``wait`` for it.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            acquire(descriptor, wait)
            if not _is_at(descriptor, path):  # its last holder deleted it meanwhile
                continue
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, str(os.getpid()).encode())
            yield
            return
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
