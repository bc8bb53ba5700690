"""``records.jsonl`` while a run writes it: appended to, and checked against a running digest."""

import hashlib
import json
from pathlib import Path
from typing import IO, Any, Self

from proxreplay.errors import CheckpointError
from proxreplay.files import sync_file, sync_folder


class Journal:
    """A file of JSON lines of which every byte is known.

    A checkpoint keeps what `secure` returns, and `check` compares the file with it. Entering drops
    what was written after the last `check`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._length = 0
        self._digest = hashlib.sha256()

    def check(self, known: Any) -> None:
        """Raise a CheckpointError unless the file begins with what `secure` once returned."""
        # checkpoints of version 0.1 hold the length alone
        of_length = isinstance(known, int)
        self._length, expected = (known, None) if of_length else (known["length"], known["sha256"])
        self._digest = self._read_digest(self._length)
        if expected not in (None, self._digest.hexdigest()):
            raise CheckpointError(
                f"{self.path}: damaged, its first {self._length} bytes are not those that the run "
                "wrote."
            )

    def __enter__(self) -> Self:
        new = not self.path.exists()
        self._file = self.path.open("ab")
        try:
            self._file.truncate(self._length)
            if new:
                sync_folder(self.path.parent)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._file is not None
        self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """Append one line."""
        assert self._file is not None
        line = json.dumps(record).encode() + b"\n"
        self._file.write(line)
        self._digest.update(line)
        self._length += len(line)

    def secure(self) -> dict[str, Any]:
        """See that everything is on disk; returns the length of the file and its digest."""
        assert self._file is not None
        sync_file(self._file)
        return {"length": self._length, "sha256": self._digest.hexdigest()}

    def _read_digest(self, length: int) -> Any:
        """The digest of the first bytes; the whole file is never in memory."""
        digest, left = hashlib.sha256(), length
        if self.path.exists():
            with self.path.open("rb") as file:
                while left and (block := file.read(min(left, 1 << 20))):
                    digest.update(block)
                    left -= len(block)
        if left:
            raise CheckpointError(
                f"{self.path}: {length - left} bytes, but the checkpoint knows of {length}; "
                "records are missing."
            )
        return digest
