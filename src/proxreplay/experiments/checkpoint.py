"""Checkpoints of a run: one file each, the newest two are kept, checked when read."""

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from proxreplay.errors import CheckpointError
from proxreplay.files import remove_leftovers
from proxreplay.serialization import is_saved, load_state, remove_version_1, save_state

GENERATIONS = 2

log = logging.getLogger(__name__)


def save_checkpoint(folder: Path, position: int, parts: dict[str, Any]) -> None:
    """Write the checkpoint for a stream position, then remove all but it and the one before."""
    save_state(folder / f"{position:09d}.safetensors", parts)
    for old in _generations(folder)[GENERATIONS:]:
        _remove(old)


def load_checkpoint(
    folder: Path, fits: Callable[[dict[str, Any]], None] = lambda parts: None
) -> dict[str, Any] | None:
    """The newest checkpoint that is intact; None if there is none at all.

    One that cannot be used, or for which ``fits`` raises a CheckpointError, is reported, and
    removed once an older one has been found. If none can be used, that is an error.
    """
    problems: dict[Path, CheckpointError] = {}
    for path in _generations(folder):
        try:
            parts = load_state(path)
            fits(parts)
        except CheckpointError as error:
            log.warning("checkpoint %s cannot be used: %s", path.name, error)
            problems[path] = error
            continue
        for useless in problems:
            _remove(useless)
        return parts
    if any(is_saved(path) for path in problems):
        raise CheckpointError(
            f"{folder}: no checkpoint can be used ({'; '.join(map(str, problems.values()))}). "
            "Remove the folder to start this run again."
        )
    return None


def remove_checkpoints(folder: Path) -> None:
    """Remove all checkpoints and attempts to write one, and the folder if it is empty then."""
    if folder.is_dir():
        remove_leftovers(folder)
        for path in _generations(folder):
            _remove(path)
        with suppress(OSError):
            folder.rmdir()


def _generations(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first; those of version 1 are folders."""
    found = folder.iterdir() if folder.is_dir() else []
    ours = (path for path in found if re.fullmatch(r"\d{9}(\.safetensors)?", path.name))
    return sorted(ours, key=lambda path: path.name, reverse=True)


def _remove(path: Path) -> None:
    """Remove a checkpoint; a folder with something foreign in it stays."""
    if path.is_dir():
        remove_version_1(path)
        with suppress(OSError):
            path.rmdir()
    else:
        path.unlink()
