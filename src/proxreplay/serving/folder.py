"""The folder of a durable learner: one writer, nothing of others, and the learner inside."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from proxreplay.errors import CheckpointError, InputError, StorageError
from proxreplay.files import make_folder
from proxreplay.locking import locked
from proxreplay.replay.learner import Learner
from proxreplay.serving.log import NAME
from proxreplay.serving.snapshots import Snapshots


def hold(folder: Path) -> ExitStack:
    """Let nobody else write to a folder until the stack is closed; makes it if it is missing."""
    held, snapshots = ExitStack(), Snapshots(folder)
    try:
        refuse_foreign(folder)
        make_folder(folder)
        held.enter_context(locked(folder / "lock"))
        snapshots.prepare()
    except BlockingIOError:
        raise InputError(
            f"{folder}: another process learns in this folder; stop it, or follow it read-only "
            "(Follower, or proxreplay serve --read-only)."
        ) from None
    except OSError as error:
        held.close()
        raise StorageError(
            f"{folder}: cannot be written to ({error}); choose another folder, or follow this one "
            "read-only (Follower, or proxreplay serve --read-only)."
        ) from error
    if snapshots.sequences() and not (folder / NAME).exists():
        held.close()
        raise CheckpointError(
            f"{folder / NAME}: missing, but there are snapshots; restore it, or start a new folder "
            "from a snapshot (Learner.load), which is without the events after it."
        )
    return held


def load_newest(folder: Path, *parts: Any, **further: Any) -> Learner:
    """The learner in the newest intact snapshot of a folder, see `Learner.load`."""
    snapshots = Snapshots(folder)
    problems = []
    for sequence in snapshots.sequences():
        try:
            return Learner.load(snapshots.path(sequence), *parts, **further)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(f"{folder}: no intact snapshot ({'; '.join(problems)}).")
    raise InputError(
        f"{folder}: no durable learner here; make one with DurableLearner(folder, learner), or "
        "proxreplay serve FOLDER --learner ..."
    )


def refuse_foreign(folder: Path) -> None:
    """Refuse a path that is something else than a durable learner, a new folder or an empty one."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is not a folder; choose another.")
    ours = {"lock", "snapshots", NAME, f"{NAME}-wal", f"{NAME}-shm", f"{NAME}-journal"}
    if folder.exists() and not (folder / NAME).exists():
        foreign = [p.name for p in folder.iterdir() if not p.name.startswith(".")]
        if set(foreign) - ours:
            raise InputError(f"{folder} is not empty and holds no durable learner; choose another.")
