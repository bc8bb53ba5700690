"""Decoded data sets on disk: memory-mapped arrays that are checked before they are used.

A cache is a folder of ``.npy`` arrays and a ``meta.json`` that says what they were made from. It
lies beside its source, or in the user's cache folder where the source's folder is read-only.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from proxreplay.data.datasets import Dataset, Examples
from proxreplay.data.sources import Fingerprint, fingerprint, is_unchanged
from proxreplay.errors import DataError

FORMAT = 1
ABANDONED_AFTER = 24 * 3600  # seconds
Array = npt.NDArray[Any]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Block:
    """A few decoded examples.

    Args:
        inputs: ``[k, ...]``.
        labels: ``[k]``.
        domains: ``[k]``, or None where the data has no domains.
    """

    inputs: Array
    labels: Array
    domains: Array | None = None


@dataclass(frozen=True)
class Part:
    """A part of a data set (train, test or validation) on its way to disk, a block at a time.

    Args:
        count: examples in all blocks together.
        shape: of one example.
        blocks: read once, in order.
        dtype: of the inputs.
    """

    count: int
    shape: tuple[int, ...]
    blocks: Iterable[Block]
    dtype: str = "uint8"


@dataclass(frozen=True)
class Decoded:
    """What a reader makes of its source.

    Args:
        classes: a name for every label.
        parts: ``train``, ``test`` and maybe ``validation``.
        domains: a name for every domain.
    """

    classes: tuple[str, ...]
    parts: Mapping[str, Part]
    domains: tuple[str, ...] = ()


class _Unusable(Exception):
    """Why a cache cannot be used; it is rebuilt."""


def cached(
    name: str,
    sources: Sequence[Path],
    decode: Callable[[], AbstractContextManager[Decoded]],
    variant: str = "",
) -> Dataset:
    """The data set from its cache; decoded into the cache first where that is missing or stale.

    Args:
        name: of the data set.
        sources: the files or folders it is made from.
        decode: opens them and keeps them open while the blocks are read.
        variant: settings of the decoding; each has a cache of its own.
    """
    key = f"{name}-{variant}" if variant else name
    for folder in cache_folders(key, sources[0]):
        if not folder.exists():
            continue
        try:
            return load(folder, sources)
        except _Unusable as reason:
            log.warning("%s: cache %s is rebuilt: %s", name, folder, reason)
    folder = _writable_folder(key, sources[0])
    log.info("%s: decoding %s once into %s", name, sources[0], folder)
    with decode() as decoded:
        store(folder, name, sources, decoded)
    try:
        return load(folder, sources)
    except _Unusable as reason:
        raise DataError(
            f"{name}: the cache {folder} cannot be used although it was just written ({reason}); "
            "is something else changing the data? Start again when it is done."
        ) from reason


def cache_folders(name: str, source: Path) -> list[Path]:
    """Where a cache is looked for: ``PROXREPLAY_CACHE`` if set, else beside the source, else the
    user's cache folder.
    """  # noqa: D205
    digest = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:12]
    in_user_folder = user_cache() / f"{name}-{digest}.cache"
    if os.environ.get("PROXREPLAY_CACHE"):
        return [in_user_folder]
    return [source.parent / f"{name}.cache", in_user_folder]


def user_cache() -> Path:
    """``PROXREPLAY_CACHE``, or the platform's cache folder for this user."""
    chosen = os.environ.get("PROXREPLAY_CACHE")
    if chosen:
        return Path(chosen)
    import pooch

    return Path(pooch.os_cache("proxreplay"))


def _writable_folder(name: str, source: Path) -> Path:
    first, *others = cache_folders(name, source)
    if not others or _may_write(first.parent):
        return first
    log.warning(
        "%s: %s is read-only; the decoded data goes to %s (PROXREPLAY_CACHE chooses another "
        "folder).",
        name,
        first.parent,
        others[0],
    )
    return others[0]


def _may_write(folder: Path) -> bool:
    """Whether to write into a folder; root too respects one that is marked read-only."""
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


def store(folder: Path, name: str, sources: Sequence[Path], decoded: Decoded) -> None:
    """Write a cache; it appears under its name only when it is complete."""
    made_from = [fingerprint(source) for source in sources]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            fresh = Path(scratch, "fresh")
            fresh.mkdir()
            arrays: dict[str, Any] = {}
            for part, content in decoded.parts.items():
                arrays.update(_write_part(fresh, part, content, name))
            meta = {
                "format": FORMAT,
                "name": name,
                "classes": decoded.classes,
                "domains": decoded.domains,
                "sources": [vars(f) for f in made_from],
                "arrays": arrays,
            }
            (fresh / "meta.json").write_text(json.dumps(meta, indent=1))
            _publish(fresh, folder, Path(scratch, "stale"), sources)
    except OSError as error:
        raise DataError(
            f"{name}: the cache {folder} cannot be written ({error}); free some space, or choose "
            "another folder with PROXREPLAY_CACHE."
        ) from error


def _publish(fresh: Path, folder: Path, stale: Path, sources: Sequence[Path]) -> None:
    """Give the complete cache its name, unless another process has just done the same."""
    if folder.exists() and not _is_usable(folder, sources):
        with suppress(FileNotFoundError):  # another process has moved it away
            folder.rename(stale)
    try:
        fresh.rename(folder)
    except OSError:
        if not _is_usable(folder, sources):
            raise


def _is_usable(folder: Path, sources: Sequence[Path]) -> bool:
    try:
        load(folder, sources)
    except _Unusable:
        return False
    return True


def _sweep(folder: Path) -> None:
    """Remove what a build of this cache that was killed a day ago or more has left behind."""
    for scratch in folder.parent.glob(f".{folder.name}-*"):
        if time.time() - scratch.stat().st_mtime > ABANDONED_AFTER:
            shutil.rmtree(scratch)


def _write_part(folder: Path, part: str, content: Part, name: str) -> dict[str, Any]:
    """Write inputs block by block, so that memory stays small, then labels and domains."""
    shape = (content.count, *content.shape)
    labels, domains = [], []
    digest = hashlib.sha256()
    with (folder / f"{part}.inputs.npy").open("wb") as file:
        descr = np.lib.format.dtype_to_descr(np.dtype(content.dtype))
        np.lib.format.write_array_header_1_0(
            file, {"descr": descr, "fortran_order": False, "shape": shape}
        )
        for block in content.blocks:
            data = np.ascontiguousarray(block.inputs, dtype=content.dtype).tobytes()
            digest.update(data)
            file.write(data)
            labels.append(np.asarray(block.labels, dtype=np.int64))
            if block.domains is not None:
                domains.append(np.asarray(block.domains, dtype=np.int64))
    small = {"labels": np.concatenate(labels) if labels else np.empty(0, np.int64)}
    if domains:
        small["domains"] = np.concatenate(domains)
    if len(small["labels"]) != content.count:
        raise DataError(
            f"{name}: {content.count} {part} examples were announced but {len(small['labels'])} "
            "could be read; get the source again."
        )
    entries = {f"{part}.inputs": _entry(content.dtype, shape, digest.hexdigest())}
    for kind, array in small.items():
        np.save(folder / f"{part}.{kind}.npy", array, allow_pickle=False)
        entries[f"{part}.{kind}"] = _entry("int64", array.shape, _sha256(array))
    return entries


def _entry(dtype: str, shape: tuple[int, ...], sha256: str) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "sha256": sha256}


def _sha256(array: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def load(folder: Path, sources: Sequence[Path]) -> Dataset:
    """Map a cache into memory, after the checks that cost nothing; labels are checked in full."""
    meta = _read_meta(folder)
    try:
        if meta["format"] != FORMAT:
            raise _Unusable(f"format {meta['format']}, expected {FORMAT}")
        made_from = [Fingerprint(**entry) for entry in meta["sources"]]
        if not is_unchanged(made_from, sources):
            raise _Unusable("its source has changed")
        arrays = meta["arrays"]
        return Dataset(
            name=str(meta["name"]),
            train=_examples(folder, "train", arrays),
            test=_examples(folder, "test", arrays),
            validation=(
                _examples(folder, "validation", arrays) if "validation.labels" in arrays else None
            ),
            classes=tuple(str(name) for name in meta["classes"]),
            domains=tuple(str(name) for name in meta["domains"]),
            checksum=_combined(arrays),
        )
    except (KeyError, TypeError, ValueError, OSError, DataError) as error:
        raise _Unusable(f"{type(error).__name__}: {error}") from error


def _combined(arrays: Mapping[str, Any]) -> str:
    """One checksum from those of all arrays."""
    lines = [f"{name} {arrays[name]['sha256']}" for name in sorted(arrays)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _read_meta(folder: Path) -> dict[str, Any]:
    try:
        meta = json.loads((folder / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise _Unusable(f"meta.json cannot be read ({error})") from error
    if not isinstance(meta, dict):
        raise _Unusable("meta.json is not an object")
    return meta


def _examples(folder: Path, part: str, arrays: Mapping[str, Any]) -> Examples:
    import torch

    inputs = _map(folder, f"{part}.inputs", arrays)
    small = {}
    for kind in ("labels", "domains"):
        if f"{part}.{kind}" in arrays:
            small[kind] = np.array(_map(folder, f"{part}.{kind}", arrays))
            if _sha256(small[kind]) != arrays[f"{part}.{kind}"]["sha256"]:
                raise _Unusable(f"{part}.{kind}.npy does not match its checksum")
    return Examples(
        torch.from_numpy(inputs), **{kind: torch.from_numpy(a) for kind, a in small.items()}
    )


def _map(folder: Path, array: str, arrays: Mapping[str, Any]) -> Array:
    """Map one array copy-on-write: a stray write stays in this process and off the disk.

    Unlike ``np.load``, ``open_memmap`` knows nothing but plain arrays: no zip and no pickle.
    """
    mapped: Array = np.lib.format.open_memmap(folder / f"{array}.npy", mode="c")
    wanted = arrays[array]
    if str(mapped.dtype) != wanted["dtype"] or list(mapped.shape) != wanted["shape"]:
        raise _Unusable(
            f"{array}.npy is {mapped.dtype} {mapped.shape}, expected {wanted['dtype']} "
            f"{tuple(wanted['shape'])}"
        )
    return mapped


def verify(folder: Path, sources: Sequence[Path]) -> str | None:
    """Check a cache in full, every byte of every array; None if it is sound, else what is wrong."""
    try:
        load(folder, sources)
        arrays = _read_meta(folder)["arrays"]
        for name, entry in arrays.items():
            if _sha256(_map(folder, name, arrays)) != entry["sha256"]:
                raise _Unusable(f"{name}.npy does not match its checksum")
    except _Unusable as reason:
        return str(reason)
    return None
