"""Where data lies: the data root, and the first place below it that exists."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from proxreplay.errors import DataError


def data_root(chosen: str | Path | None = None) -> Path:
    """The folder that holds the data: what is chosen, else ``PROXREPLAY_DATA``, else ``./data``."""
    return Path(chosen or os.environ.get("PROXREPLAY_DATA") or "data")


def first_existing(
    name: str, root: Path, candidates: Sequence[str], by_hand: str | None = None
) -> Path:
    """The first of the candidates below the root that exists.

    Args:
        name: of the data set.
        root: the data root.
        candidates: places below it.
        by_hand: what to put there, for a data set that cannot be fetched.

    Raises:
        DataError: none does; the message says where it was looked and how to get the data.
    """
    for candidate in candidates:
        if (root / candidate).exists():
            return root / candidate
    raise not_found(name, root, candidates, by_hand)


def not_found(
    name: str, root: Path, candidates: Sequence[str], by_hand: str | None = None
) -> DataError:
    """The error for missing data: where it was looked for and how to get it."""
    looked = ", ".join(str(root / candidate) for candidate in candidates)
    way_out = by_hand or f"Get it with: {fetch_command(name, root)}"
    return DataError(
        f"{name}: not found; looked for {looked}. {way_out}, or name another folder with "
        "--data-root or PROXREPLAY_DATA."
    )


def fetch_command(name: str, root: Path) -> str:
    """What to type to get a data set."""
    return f"proxreplay data fetch {name} --data-root {shlex.quote(str(root))}"
