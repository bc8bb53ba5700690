"""Getting data from its canonical source: resumed, checked, and only then given its name.

A download grows in ``<name>.part``. When it is complete and its checksum is the published one, it
is renamed; nothing else ever writes to that name. This is done here and not by a library, since
those that were looked at start a broken download again from the beginning.
"""

import http.client
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from proxreplay.data.archives import unpack, unpacked
from proxreplay.data.catalog import RemoteFile, find_dataset
from proxreplay.data.roots import data_root as resolve_root
from proxreplay.errors import DataError
from proxreplay.files import file_digest, make_folder, sync_file, sync_folder
from proxreplay.options import Amount, Count, Options, Positive

CHUNK = 1 << 18
MAX_BYTES = 16 * 2**30
log = logging.getLogger(__name__)

OnBytes = Callable[[str, int, int | None], None]  # file name, bytes there, bytes in all


@dataclass(frozen=True)
class Patience(Options):
    """How a download deals with a bad connection."""

    attempts: Count = 5  # how often to try before giving up
    wait: Amount = 1.0  # seconds before the second attempt; doubles with each
    timeout: Positive = 60.0  # seconds without a byte before an attempt fails


class _Interrupted(Exception):
    """The connection broke; what has arrived stays in the ``.part`` file."""


def fetch(
    name: str,
    data_root: str | Path | None = None,
    *,
    mirror: str | None = None,
    progress: OnBytes | None = None,
    patience: Patience | None = None,
) -> list[Path]:
    """Download a data set; what is there already and right is left alone.

    Returns the files, or the folders they were unpacked to. ``mirror`` is a base address to use
    instead of the canonical source; checksums stay the same.
    """
    what, root = find_dataset(name), resolve_root(data_root)
    if not what.files:
        reason = what.by_hand or "It is bundled"
        raise DataError(f"{name} cannot be fetched. {reason}.")
    results = []
    for file in what.files:
        if file.unpack_to and unpacked(root / file.unpack_to):
            results.append(root / file.unpack_to)
            continue
        path = _fetch_file(file, root, mirror, progress, patience or Patience())
        if file.unpack_to:
            unpack(path, root / file.unpack_to)
            path = root / file.unpack_to
        results.append(path)
    return results


def _fetch_file(
    file: RemoteFile, root: Path, mirror: str | None, progress: OnBytes | None, patience: Patience
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
        make_folder(path.parent)
        return _Download(url, path, progress, patience).run(file.md5)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error}); choose another folder with --data-root."
        ) from error


class _Download:
    """One file, continued from its ``.part`` if there is one."""

    def __init__(self, url: str, path: Path, progress: OnBytes | None, patience: Patience) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise DataError(f"{url}: only http and https addresses are fetched.")
        self._url, self._path = url, path
        self._part = path.with_name(path.name + ".part")
        self._progress, self._patience = progress, patience

    def run(self, md5: str) -> Path:
        """Get the file; it appears under its name only with the right checksum.

        A wrong checksum after a resumed download may come from mixing two versions, so the download
        then starts once more from the beginning.
        """
        for last_try in (False, True):
            resumed = self._complete()
            if file_digest(self._part, "md5") == md5:
                self._part.replace(self._path)
                sync_folder(self._path.parent)
                return self._path
            self._part.unlink()
            if not resumed:
                break
            if not last_try:
                log.warning("%s: the resumed download is not the published file; again", self._url)
        raise DataError(
            f"{self._url} is not the published file (MD5 {md5}); nothing was kept. Try again "
            "later, or another --mirror."
        )

    def _complete(self) -> bool:
        """Continue until everything is there; whether that took more than one request."""
        resumed = self._there() > 0
        for attempt in range(self._patience.attempts):
            if attempt:
                time.sleep(self._patience.wait * 2 ** (attempt - 1))
            try:
                self._continue()
            except _Interrupted as reason:
                log.warning("%s: %s after %d bytes", self._url, reason, self._there())
                resumed = self._there() > 0
                last = reason
            else:
                return resumed
        raise DataError(
            f"{self._url}: gave up after {self._patience.attempts} attempts ({last}); what has "
            f"arrived is in {self._part}, fetch again to continue."
        )

    def _there(self) -> int:
        return self._part.stat().st_size if self._part.exists() else 0

    def _continue(self) -> None:
        """Ask for what is missing and append it; start over if the server cannot continue."""
        there = self._there()
        request = Request(self._url, headers={"Range": f"bytes={there}-"} if there else {})
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
                raise DataError(f"{self._url}: {error}; try another --mirror.") from error
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
                    self._progress(self._path.name, there, total)
            sync_file(part)
        if total is not None and there != total:
            raise _Interrupted(f"{total - there} of {total} bytes missing")
