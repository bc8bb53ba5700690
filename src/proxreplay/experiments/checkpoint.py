"""Checkpoints of a run: whole or not at all, two generations, checked when read."""

import logging
import shutil
from pathlib import Path
from typing import Any

from proxreplay.errors import CheckpointError
from proxreplay.serialization import is_saved, load_state, save_state

GENERATIONS = 2

log = logging.getLogger(__name__)


def _generations(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first; one that was never finished does not count."""
    found = sorted(p for p in folder.glob("[0-9]*") if p.is_dir() and p.name.isdigit())
    return [p for p in found if is_saved(p)]


def save_checkpoint(folder: Path, position: int, parts: dict[str, Any]) -> None:
    """Write the checkpoint for a stream position, then let go of all but the newest two."""
    save_state(folder / f"{position:09d}", parts)
    kept = _generations(folder)[-GENERATIONS:]
    for other in folder.iterdir():
        if other not in kept:
            shutil.rmtree(other)


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint that is whole; None if there is none at all.

    A damaged one is reported and the older one is used; if all are damaged, that is an error.
    """
    problems: list[str] = []
    for path in reversed(_generations(folder)):
        try:
            parts = load_state(path)
        except CheckpointError as error:
            problems.append(str(error))
            log.warning("checkpoint %s is damaged and left aside: %s", path.name, error)
            continue
        return parts
    if problems:
        raise CheckpointError(
            f"{folder}: every checkpoint is damaged ({'; '.join(problems)}). "
            "Remove the folder to start this run again."
        )
    return None
