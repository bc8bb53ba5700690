"""Snapshots: whole learners on disk, each a file named after the newest event it holds."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxreplay.errors import CheckpointError
from proxreplay.files import make_folder, remove_leftovers, sync_folder
from proxreplay.serialization import load_state, save_state

if TYPE_CHECKING:
    from proxreplay.replay.learner import Learner

FOLDER = "snapshots"
_FILE = re.compile(r"(\d{12})\.safetensors")


@dataclass(frozen=True)
class Snapshot:
    """A state that one can go back to.

    Args:
        sequence: of the newest event in it.
        path: a file that `Learner.load` reads.
        nbytes: its size.
        time: when it was made, in seconds since 1970.
        good: whether the guard, if there was one, was content.
    """

    sequence: int
    path: Path
    nbytes: int
    time: float
    good: bool = True


class Snapshots:
    """The snapshots of a folder; each is written as a whole, and read with its checksum."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER

    def prepare(self) -> None:
        """Make the folder; remove what killed processes left in it."""
        make_folder(self.folder)
        remove_leftovers(self.folder)

    def sequences(self) -> list[int]:
        """Of all snapshots, newest first."""
        if not self.folder.is_dir():
            return []
        found = (_FILE.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def path(self, sequence: int) -> Path:
        """Where a snapshot is, or would be."""
        return self.folder / f"{sequence:012d}.safetensors"

    def nbytes(self, sequence: int) -> int:
        """Bytes of a snapshot; 0 if it is gone."""
        try:
            return self.path(sequence).stat().st_size
        except FileNotFoundError:
            return 0

    def save(self, learner: "Learner", sequence: int, threads: int) -> None:
        """Write a learner as it is; `Learner.load` reads the file, too.

        Raises:
            CheckpointError: it could not be written.
        """
        facts = {"sequence": sequence, "threads": threads}
        save_state(self.path(sequence), {**learner.state_dict(), "durable": facts})

    def load(self, sequence: int) -> dict[str, Any]:
        """The state in a snapshot.

        Raises:
            CheckpointError: it is missing or damaged, or is another one under its name.
        """
        path = self.path(sequence)
        state = load_state(path)
        if state.get("durable", {}).get("sequence") != sequence:
            raise CheckpointError(f"{path}: holds another snapshot than its name says; restore it.")
        return state

    def remove(self, sequences: list[int]) -> None:
        """Remove snapshots; they are gone from the disk when this returns."""
        for sequence in sequences:
            self.path(sequence).unlink(missing_ok=True)
        if sequences:
            sync_folder(self.folder)
