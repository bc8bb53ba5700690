"""Decoded data sets on disk: memory-mapped arrays that are checked before they are used.

A cache is a folder of ``.npy`` arrays, a ``meta.json`` that says what they were made from, and a
``CACHEDIR.TAG`` that marks it as ours. It is in the user's cache folder (`roots.user_cache`).
Nothing without that mark is ever changed or deleted.
"""

import hashlib
import json
import logging
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from proxreplay.data.datasets import Dataset, Examples
from proxreplay.data.fingerprints import Fingerprint, fingerprint, is_unchanged, regular
from proxreplay.data.roots import cache_folder
from proxreplay.errors import DataError
from proxreplay.files import remove_leftovers, sync_file, sync_folder, unsigned, write_json
from proxreplay.locking import locked

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 3
BLOCK_BYTES = 1 << 20
MAX_META = 32 * 2**20
MARK = "CACHEDIR.TAG"
SIGNATURE = (
    "Signature: 8a477f597d28d172789f06886806bc55\n# Decoded data of proxreplay; safe to delete.\n"
)
ARRAYS = tuple(
    f"{part}.{kind}"
    for part in ("train", "validation", "test")
    for kind in ("inputs", "labels", "domains")
)
Array = npt.NDArray[Any]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Block:
    """A few decoded examples."""

    inputs: Array  # [k, ...], uint8
    labels: Array  # [k]
    domains: Array | None = None  # [k], or None if the data has no domains


@dataclass(frozen=True)
class Split:
    """One split of a data set (train, test or validation) on its way to disk, block by block."""

    count: int  # examples in all blocks together
    shape: tuple[int, ...]  # of one example
    blocks: Iterable[Block]  # read once, in order


@dataclass(frozen=True)
class Decoded:
    """What a reader makes of its source."""

    classes: tuple[str, ...]  # a name for every label
    parts: Mapping[str, Split]  # train, test and maybe validation
    domains: tuple[str, ...] = ()  # a name for every domain


class _Unusable(Exception):
    """Why a cache cannot be used; it is rebuilt."""


def cached(
    name: str, source: Path, decode: Callable[[], AbstractContextManager[Decoded]], key: str
) -> Dataset:
    """The data set from its cache; decoded into the cache first if that is missing or stale.

    ``decode`` opens the source and keeps it open while the blocks are read. ``key`` names the
    cache; settings of the decoding are part of it.
    """
    folder = cache_folder(key, source)
    lock = folder.with_name(f"{folder.name}.lock")
    try:
        found = load(folder, source)
        if lock.exists():
            _remove_leftovers(folder, lock)
        return found
    except _Unusable as reason:
        if folder.exists():
            log.warning("%s: cache %s is rebuilt: %s", name, folder, reason)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(lock, wait=True):
            try:
                return load(folder, source)  # another process has just built it
            except _Unusable:
                log.info("%s: decoding %s once into %s", name, source, folder)
                _build(folder, name, source, decode)
            finally:
                lock.unlink()
    except OSError as error:
        raise DataError(
            f"{name}: the cache {folder} cannot be written ({error}); free some space, or choose "
            "another folder with PROXREPLAY_CACHE."
        ) from error
    try:
        return load(folder, source)
    except _Unusable as reason:
        raise DataError(
            f"{name}: the cache {folder} cannot be used although it was just written ({reason}); "
            "is something else changing the data? Start again when it is done."
        ) from reason


def _build(
    folder: Path, name: str, source: Path, decode: Callable[[], AbstractContextManager[Decoded]]
) -> None:
    """Write a cache beside its place and move it there when it is complete.

    Whoever holds the lock is the only builder, so what a killed one has left behind can go.
    """
    fresh = _unfinished(folder)
    _remove(folder, check_only=True)
    _remove(fresh)
    fresh.mkdir()
    (fresh / MARK).write_text(SIGNATURE)
    sync_folder(fresh)  # a folder that loses its mark is not ours any more
    try:
        made_from = fingerprint(source)
        arrays: dict[str, Any] = {}
        with decode() as decoded:
            for part, content in decoded.parts.items():
                arrays.update(_write_part(fresh, part, content, name))
            meta = {
                "format": FORMAT,
                "name": name,
                "classes": decoded.classes,
                "domains": decoded.domains,
                "source": vars(made_from),
                "arrays": arrays,
            }
        write_json(fresh / "meta.json", meta)
        _remove(folder)
        fresh.rename(folder)
    finally:
        _remove(fresh)


def _unfinished(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.building")


def _remove_leftovers(folder: Path, lock: Path) -> None:
    """Remove what a killed builder left beside its cache; not while another one is at work."""
    with suppress(OSError, DataError), locked(lock):
        _remove(_unfinished(folder))
        lock.unlink()


def _remove(folder: Path, *, check_only: bool = False) -> None:
    """Remove a cache of ours, file by file; anything else is named and left alone."""
    if not folder.exists() and not folder.is_symlink():
        return
    if (folder / MARK).is_file():
        remove_leftovers(folder, "meta.json")
    ours = {MARK, "meta.json", *(f"{array}.npy" for array in ARRAYS)}
    inside = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    if inside and (folder.is_symlink() or MARK not in inside or inside - ours):
        raise DataError(
            f"{folder} is in the way and is no cache of proxreplay; move it, or choose another "
            "folder with PROXREPLAY_CACHE."
        )
    if not check_only:
        for name in inside - {MARK}:
            (folder / name).unlink()
        sync_folder(folder)  # the mark goes last, after a power loss too
        (folder / MARK).unlink(missing_ok=True)
        folder.rmdir()


def _write_part(folder: Path, part: str, content: Split, name: str) -> dict[str, Any]:
    """Write inputs block by block, so that memory stays small, then labels and domains."""
    shape = (content.count, *content.shape)
    labels, domains = [], []
    digest = hashlib.sha256()
    with (folder / f"{part}.inputs.npy").open("wb") as file:
        file.write(_header("uint8", shape))
        for block in content.blocks:
            data = np.ascontiguousarray(block.inputs, dtype=np.uint8).data
            digest.update(data)
            file.write(data)
            labels.append(np.asarray(block.labels, dtype=np.int64))
            if block.domains is not None:
                domains.append(np.asarray(block.domains, dtype=np.int64))
        sync_file(file)
    small = {"labels": np.concatenate(labels) if labels else np.empty(0, np.int64)}
    if domains:
        small["domains"] = np.concatenate(domains)
    if len(small["labels"]) != content.count:
        raise DataError(
            f"{name}: {content.count} {part} examples were announced but {len(small['labels'])} "
            "could be read; get the source again."
        )
    inputs = {"dtype": "uint8", "shape": shape, "sha256": digest.hexdigest()}
    rows, mapped = _rows_per_block(shape), _map(folder, f"{part}.inputs", inputs)
    inputs["crc32"] = [zlib.crc32(mapped[i : i + rows].data) for i in range(0, len(mapped), rows)]
    entries: dict[str, Any] = {f"{part}.inputs": inputs}
    for kind, array in small.items():
        with (folder / f"{part}.{kind}.npy").open("wb") as file:
            file.write(_header("int64", array.shape) + array.tobytes())
            sync_file(file)
        entry = {"dtype": "int64", "shape": array.shape, "sha256": _sha256(array)}
        entries[f"{part}.{kind}"] = entry
    return entries


def _header(dtype: str, shape: Sequence[int]) -> bytes:
    """The beginning of an ``.npy`` file."""
    file = BytesIO()
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    np.lib.format.write_array_header_1_0(
        file, {"descr": descr, "fortran_order": False, "shape": tuple(shape)}
    )
    return file.getvalue()


def _rows_per_block(shape: Sequence[int]) -> int:
    return max(1, BLOCK_BYTES // max(1, int(np.prod(shape[1:]))))


def _sha256(array: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def load(folder: Path, source: Path) -> Dataset:
    """Map a cache into memory after quick checks; images are checked when they are first read."""
    try:
        meta = _read_meta(folder)
        if meta["format"] != FORMAT:
            raise _Unusable(f"format {meta['format']}, expected {FORMAT}")
        if not is_unchanged(Fingerprint(**meta["source"]), source):
            raise _Unusable("its source has changed")
        arrays = meta["arrays"]
        parts = {
            part: _examples(folder, part, arrays)
            for part in ("train", "validation", "test")
            if f"{part}.labels" in arrays
        }
        sums = [f"{name} {arrays[name]['sha256']}" for name in sorted(arrays)]
        return Dataset(
            name=str(meta["name"]),
            classes=tuple(str(name) for name in meta["classes"]),
            domains=tuple(str(name) for name in meta["domains"]),
            checksum=hashlib.sha256("\n".join(sums).encode()).hexdigest(),
            **parts,
        )
    except (LookupError, TypeError, ValueError, AttributeError, OSError, DataError) as error:
        raise _Unusable(f"{type(error).__name__}: {error}") from error


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    if regular(path).st_size > MAX_META:
        raise _Unusable("meta.json is too large")
    try:
        meta = json.loads(path.read_bytes())
    except RecursionError as error:
        raise _Unusable("meta.json nests too deep") from error
    if not isinstance(meta, dict) or "sha256" not in meta:
        raise _Unusable("meta.json is not an object with a checksum")
    return unsigned(meta)


def _examples(folder: Path, part: str, arrays: Mapping[str, Any]) -> Examples:
    import torch

    entry = arrays[f"{part}.inputs"]
    inputs = _map(folder, f"{part}.inputs", entry)
    small = {}
    for kind in ("labels", "domains"):
        name = f"{part}.{kind}"
        if name in arrays:
            small[kind] = np.array(_map(folder, name, arrays[name]))
            if _sha256(small[kind]) != arrays[name]["sha256"]:
                raise _Unusable(f"{name}.npy does not match its checksum")
    return Examples(
        torch.from_numpy(inputs),
        check=BlockCheck(folder, f"{part}.inputs", inputs, entry["crc32"]),
        **{kind: torch.from_numpy(array) for kind, array in small.items()},
    )


def _map(folder: Path, array: str, entry: Mapping[str, Any]) -> Array:
    """Map one array copy-on-write: a stray write stays in this process and off the disk.

    The file must begin with exactly the header that belongs to the entry, so no header that
    somebody else wrote is ever parsed.
    """
    path = folder / f"{array}.npy"
    dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
    if dtype not in ("uint8", "int64") or min(shape) < 0:
        raise _Unusable(f"{array} is {dtype} {shape}")
    header = _header(dtype, shape)
    size = regular(path).st_size
    with path.open("rb") as file:
        same = file.read(len(header)) == header
    if not same or size != len(header) + math.prod(shape) * np.dtype(dtype).itemsize:
        raise _Unusable(f"{array}.npy is not {dtype} {shape}")
    return np.memmap(path, dtype, mode="c", offset=len(header), shape=shape)


class BlockCheck:
    """Compares each block of inputs with its checksum when a row of it is first read."""

    def __init__(self, folder: Path, name: str, inputs: Array, sums: Sequence[int]) -> None:
        self._folder, self._name, self._inputs = folder, name, inputs
        self._rows = _rows_per_block(inputs.shape)
        self._sums = [int(s) for s in sums]
        self._pending = np.ones(-(-len(inputs) // self._rows), dtype=bool)
        if len(self._sums) != len(self._pending):
            raise _Unusable(f"{name} has {len(self._pending)} blocks and {len(sums)} checksums")

    def __call__(self, rows: "Tensor | None" = None) -> None:
        """Check the blocks that hold these rows ``[n]``; all of them by default.

        Raises:
            DataError: a block is damaged. The cache is marked, so that the next start rebuilds it.
        """
        if not self._pending.any():
            return
        blocks = self._pending.nonzero()[0]
        if rows is not None:
            chosen = np.asarray(rows)
            chosen = chosen.nonzero()[0] if chosen.dtype == bool else chosen % len(self._inputs)
            blocks = np.intersect1d(blocks, chosen // self._rows)
        for block in blocks:
            first = block * self._rows
            if zlib.crc32(self._inputs[first : first + self._rows].data) != self._sums[block]:
                _condemn(self._folder)
                raise DataError(
                    f"the cache {self._folder} is damaged: {self._name} from example {first} on "
                    "does not match its checksum. Start again; it is rebuilt from the source."
                )
            self._pending[block] = False


def _condemn(folder: Path) -> None:
    """Have a damaged cache rebuilt by the next start."""
    with suppress(OSError):  # a read-only cache cannot be marked; the error says what is wrong
        (folder / "meta.json").unlink()


def verify(folder: Path, source: Path) -> str | None:
    """Check a cache in full, every byte of every array; None if it is sound, else what is wrong."""
    try:
        load(folder, source)
        for name, entry in _read_meta(folder)["arrays"].items():
            if _sha256(_map(folder, name, entry)) != entry["sha256"]:
                _condemn(folder)
                raise _Unusable(f"{name}.npy does not match its checksum")
    except _Unusable as reason:
        return str(reason)
    return None
