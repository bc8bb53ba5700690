"""Getting data from its canonical source: resumed, checked, and only then called by its name.

A download grows in ``<name>.part``. When it is complete, pooch compares its checksum with the
published one and moves it to its name; nothing else ever writes to that name.
"""

import http.client
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from proxreplay.data.archives import unpack
from proxreplay.data.catalog import RemoteFile, entry
from proxreplay.data.roots import data_root as resolve_root
from proxreplay.data.sources import file_digest
from proxreplay.errors import DataError, InputError

CHUNK = 1 << 18
MAX_BYTES = 16 * 2**30
log = logging.getLogger(__name__)

Progress = Callable[[str, int, int | None], None]  # file name, bytes there, bytes in all


@dataclass(frozen=True)
class Patience:
    """How a download deals with a bad line.

    Args:
        attempts: how often to try before giving up.
        wait: seconds before the second attempt; doubles with each.
        timeout: seconds without a byte that count as a failure.
    """

    attempts: int = 5
    wait: float = 1.0
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.wait < 0 or self.timeout <= 0:
            raise InputError(f"{self}: give at least one attempt, wait >= 0 and timeout > 0.")


class _Interrupted(Exception):
    """The line broke; what has arrived stays in the ``.part`` file."""


def fetch(
    name: str,
    data_root: str | Path | None = None,
    *,
    mirror: str | None = None,
    progress: Progress | None = None,
    patience: Patience | None = None,
) -> list[Path]:
    """Download a data set; what is there already and right is left alone.

    Args:
        name: of the data set.
        data_root: the folder that holds the data.
        mirror: base address to use instead of the canonical source; checksums stay the same.
        progress: called as bytes arrive.
        patience: with a bad line.

    Returns:
        The files, or the folders they were unpacked to.
    """
    what, root = entry(name), resolve_root(data_root)
    if not what.files:
        reason = what.by_hand or "It is bundled"
        raise DataError(f"{name} cannot be fetched. {reason}.")
    results = []
    for file in what.files:
        if file.unpack_to and (root / file.unpack_to).exists():
            results.append(root / file.unpack_to)
            continue
        path = _fetch_file(file, root, mirror, progress, patience or Patience())
        if file.unpack_to:
            unpack(path, root / file.unpack_to)
            path = root / file.unpack_to
        results.append(path)
    return results


def _fetch_file(
    file: RemoteFile,
    root: Path,
    mirror: str | None,
    progress: Progress | None,
    patience: Patience,
) -> Path:
    path = root / file.folder / file.name
    if path.exists():
        if file_digest(path, "md5") == file.md5:
            return path
        raise DataError(
            f"{path} exists but is not the published file (MD5 {file.md5}); move it away, then "
            "fetch again."
        )
    url = file.url
    if mirror is not None:
        url = "/".join(part for part in (mirror.rstrip("/"), file.folder, file.name) if part)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return retrieve(url, path, f"md5:{file.md5}", progress, patience)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error}); choose another folder with --data-root."
        ) from error


def retrieve(
    url: str, path: Path, known_hash: str, progress: Progress | None, patience: Patience
) -> Path:
    """Download one file; it appears at ``path`` only with the right checksum.

    A wrong checksum after a resumed download may come from mixing two versions, so the download
    then starts once more from the beginning.
    """
    import pooch

    for last_try in (False, True):
        download = _Download(path, progress, patience)
        try:
            pooch.retrieve(url, known_hash, path.name, path.parent, downloader=download)
            break
        except ValueError as error:
            if last_try or not download.resumed:
                raise DataError(
                    f"{url} is not the published file ({known_hash}); nothing was kept. Try again "
                    "later, or another --mirror."
                ) from error
            log.warning("%s: the resumed download is not the published file; again", path.name)
    return path


class _Download:
    """A downloader for pooch that continues a ``.part`` file instead of starting again."""

    def __init__(self, path: Path, progress: Progress | None, patience: Patience) -> None:
        self._part = path.with_name(path.name + ".part")
        self._name = path.name
        self._progress = progress
        self._patience = patience
        self.resumed = False

    def __call__(self, url: str, output_file: str, pooch: Any) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise DataError(f"{url}: only http and https addresses are fetched.")
        self.resumed = self._there() > 0
        for attempt in range(self._patience.attempts):
            if attempt:
                time.sleep(self._patience.wait * 2 ** (attempt - 1))
            try:
                self._continue(url)
            except _Interrupted as reason:
                log.warning("%s: %s after %d bytes", url, reason, self._there())
                self.resumed = self._there() > 0
                last = reason
            else:
                self._part.replace(output_file)
                return
        raise DataError(
            f"{url}: gave up after {self._patience.attempts} attempts ({last}); what has arrived "
            f"is in {self._part}, fetch again to continue."
        )

    def _there(self) -> int:
        return self._part.stat().st_size if self._part.exists() else 0

    def _continue(self, url: str) -> None:
        """Ask for what is missing and append it; start over where the server cannot continue."""
        there = self._there()
        request = Request(url, headers={"Range": f"bytes={there}-"} if there else {})
        try:
            with urlopen(request, timeout=self._patience.timeout) as response:
                if response.status != 206:
                    there = 0
                elif not str(response.headers["Content-Range"]).startswith(f"bytes {there}-"):
                    self._part.unlink()
                    raise _Interrupted("the server continued at the wrong place")
                self._append(response, there)
        except HTTPError as error:
            with error:
                if error.code == 416:  # nothing follows what is there: complete, or not ours
                    return
                if error.code in (408, 429) or error.code >= 500:
                    raise _Interrupted(str(error)) from error
                raise DataError(f"{url}: {error}; try another --mirror.") from error
        except (URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            raise _Interrupted(str(error) or type(error).__name__) from error

    def _append(self, response: http.client.HTTPResponse, there: int) -> None:
        length = response.headers["Content-Length"]
        total = None if length is None else there + int(length)
        with self._part.open("ab" if there else "wb") as part:
            while chunk := response.read(CHUNK):
                part.write(chunk)
                there += len(chunk)
                if there > MAX_BYTES:
                    raise DataError(f"{response.url}: more than {MAX_BYTES} bytes; given up.")
                if self._progress is not None:
                    self._progress(self._name, there, total)
        if total is not None and there != total:
            raise _Interrupted(f"{total - there} of {total} bytes missing")
