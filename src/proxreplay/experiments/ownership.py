"""Whose a run folder is: one configuration, one process at a time, and nothing without need."""

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from proxreplay.errors import InputError
from proxreplay.experiments.config import RunConfig, differences, dump_settings
from proxreplay.experiments.results import read_config
from proxreplay.files import make_folder, remove_leftovers, write_text
from proxreplay.locking import locked

log = logging.getLogger(__name__)

_OURS = (
    *("config.yaml", "environment.json", "records.jsonl", "timings.jsonl", "tracked.json"),
    *("result.json", "failure.txt", "diverged.safetensors", "log.txt", "lock"),
)
_OLD_TEMPORARY = re.compile(r"(config\.yaml|(environment|result)\.json|failure\.txt)\.\d+\.tmp")


@contextlib.contextmanager
def owned(folder: Path, config: RunConfig) -> Iterator[None]:
    """Hold a run folder for a configuration; the folder is new or belongs to it already.

    A folder in which nothing was computed yet may be taken over by another configuration.

    Raises:
        InputError: the folder belongs to something else, or a process is at work in it; nothing
            was changed.
    """
    refuse_foreign(folder)
    make_folder(folder)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(folder / "lock"))
        except BlockingIOError:
            raise InputError(
                f"{folder}: another process is at work on this run; wait for it or stop it."
            ) from None
        _remove_leftovers(folder)
        known = folder / "config.yaml"
        differing = differences(read_config(known), config) if known.exists() else []
        if differing and _computed(folder):
            raise InputError(
                f"{folder} belongs to another configuration ({'; '.join(differing)}). Choose "
                "another --out, or remove the folder."
            )
        if differing or not known.exists():
            for stale in ("environment.json", "failure.txt", "tracked.json"):
                (folder / stale).unlink(missing_ok=True)
            write_text(known, dump_settings(config.to_dict()))
        yield


def refuse_foreign(folder: Path) -> None:
    """Refuse a path that is something else than a run folder, a new folder or an empty one."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is not a folder; choose another --out.")
    for path in map(folder.joinpath, _OURS):
        if os.path.lexists(path) and not (path.is_file() or path.is_dir()):  # a pipe would wait
            raise InputError(f"{path} is no regular file; remove it, or choose another --out.")
    if not folder.exists() or (folder / "config.yaml").exists():
        return
    others = [name for name in os.listdir(folder) if name != "lock" and not name.startswith(".")]
    if not all(map(_OLD_TEMPORARY.fullmatch, others)):  # hidden files, and ours, may be there
        raise InputError(f"{folder} is not empty and holds no run; choose another --out.")


def mark_failed(folder: Path, details: str) -> None:
    """Leave ``failure.txt`` in a folder that is `owned`; a full disk is only logged."""
    try:
        write_text(folder / "failure.txt", details.rstrip() + "\n")
    except OSError as error:
        log.warning("could not write %s: %s", folder / "failure.txt", error)


def _computed(folder: Path) -> bool:
    """Whether there is something to keep."""
    records = folder / "records.jsonl"
    return (
        (folder / "result.json").exists()
        or (records.exists() and records.stat().st_size > 0)
        or any((folder / "checkpoint").glob("*"))
    )


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left of files they were writing, also those of version 0.1."""
    for place in (folder, folder / "checkpoint"):
        if place.is_dir():
            remove_leftovers(place)
    for path in folder.iterdir():
        if _OLD_TEMPORARY.fullmatch(path.name):
            path.unlink()
