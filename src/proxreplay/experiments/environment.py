"""What is around a run: versions and hardware for the record, its log, its threads, its disk."""

import errno
import hashlib
import logging
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import proxreplay
from proxreplay.errors import DataError, StorageError
from proxreplay.experiments.results import made_with, read_json
from proxreplay.files import write_json

log = logging.getLogger(__name__)


def keep_environment(path: Path, data_checksum: Callable[[], str]) -> None:
    """Write ``environment.json`` where it is missing or damaged.

    Where another source code goes on with the run, that is noted in it, and said.
    """
    try:
        known = read_json(path, missing={})
    except DataError as error:
        log.warning("%s; it is written again, as of this attempt", error)
        known = {}
    if not known:
        write_json(path, describe_environment(data_checksum()))
        return
    code, commit = code_digest(), git_commit()
    _, *later = made_with(known)
    last = later[-1] if later else known
    same = last["code"] == code if "code" in last else last.get("git_commit") == commit
    if not same:
        log.warning(
            "%s: this run was made by another source code of proxreplay (%s) until now; it goes on "
            "with this one (%s), so its records are those of neither alone. environment.json says "
            "so; for one version, start it anew in another folder",
            path.parent,
            last.get("git_commit") or "commit unknown",
            commit or "commit unknown",
        )
        now = {"proxreplay": proxreplay.__version__, "git_commit": commit, "code": code}
        write_json(path, {**known, "continued": [*later, now]})


def describe_environment(data_checksum: str) -> dict[str, Any]:
    """Versions, git commit, hardware and the checksum of the data."""
    return {
        "proxreplay": proxreplay.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "git_commit": git_commit(),
        "code": code_digest(),
        "data_checksum": data_checksum,
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def code_digest() -> str:
    """That of all source files of proxreplay."""
    digest = hashlib.sha256()
    root = Path(proxreplay.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def git_commit() -> str | None:
    """The commit of the source tree proxreplay runs from; None if that is not a git checkout."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text("utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


_TROUBLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}


@contextmanager
def storage_trouble(folder: Path) -> Iterator[None]:
    """A full disk or a read-only folder is told in one line; the way out is to make room."""
    try:
        yield
    except OSError as error:
        if error.errno not in _TROUBLE:
            raise
        raise StorageError(
            f"{folder}: cannot write ({error.strerror}). What is there is intact; make room or "
            f"choose another --out, then go on with: proxreplay resume {folder}"
        ) from error


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Write what proxreplay's loggers say to a file as well; warnings are still shown."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # never stops a run
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("proxreplay")
    level, shown = logger.level, logging.lastResort
    if shown is None or logger.hasHandlers():  # somebody else shows them
        shown = logging.NullHandler()
    logger.addHandler(handler)
    logger.addHandler(shown)  # Python's own way ends where a logger has a handler
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.removeHandler(shown)
        logger.setLevel(level)
        handler.close()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use so many CPU threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
