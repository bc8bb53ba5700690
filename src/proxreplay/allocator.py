"""Memory that every training step asks for and gives back: taken from the system once."""

import ctypes
import os
import platform

KEPT = 1 << 30  # bytes: blocks up to this size, and so much unused memory, stay with the process
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as <malloc.h> numbers them
_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Tell the C library to keep freed memory for the next step instead of giving it back.

    By default glibc returns it, and the system fills thousands of pages with zeros again in the
    next step. The process then stays as large as it once was, so this is for processes that do
    nothing but train: the command line, not the library. Existing malloc settings are respected.

    Returns:
        Whether there was such a C library to tell.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _SETTINGS):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(which, KEPT) == 1 for which in (_TRIM_THRESHOLD, _MMAP_THRESHOLD))
