"""Where things are: the data root, the first place below it that exists, and the cache folder."""

import hashlib
import os
import shlex
import sys
from pathlib import Path


def data_root(chosen: str | Path | None = None) -> Path:
    """The folder that holds the data: the chosen one, else ``PROXREPLAY_DATA``, else ``./data``."""
    return Path(chosen or os.environ.get("PROXREPLAY_DATA") or "data")


def user_cache() -> Path:
    """``PROXREPLAY_CACHE``, else this user's cache folder."""
    if chosen := os.environ.get("PROXREPLAY_CACHE"):
        return Path(chosen)
    home = Path.home()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "proxreplay"


def cache_folder(key: str, source: Path) -> Path:
    """Where a source is cached; two sources never share a folder."""
    digest = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:12]
    return user_cache() / f"{key[:100]}-{digest}"


def fetch_command(name: str, root: Path) -> str:
    """What to type to get a data set."""
    return f"proxreplay data fetch {name} --data-root {shlex.quote(str(root))}"
