"""State on disk: safetensors and JSON with checksums, written atomically, read without pickle.

A state is a folder. ``manifest.json`` names its parts and the size and SHA-256 of every file;
everything else is data it points to, one JSON file a part for the structure and one safetensors
file for its tensors:

    manifest.json
    memory-5b1c0e9f27d4a860.json
    memory-0f64c8a91b7be233.safetensors

Data files carry the beginning of their checksum in their name, so that a new state is written
beside the old one and takes over when the manifest is replaced, in one atomic step. Whoever is
killed, or runs out of disk, at any moment leaves the old state or the new one, never a mixture.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proxreplay.errors import CheckpointError, InputError

FORMAT = "proxreplay-state"
VERSION = 1
MANIFEST = "manifest.json"

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_DATA_FILE = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,63})-[0-9a-f]{16}\.(json|safetensors)")
_TEMPORARY = ".writing"
_SUFFIXES = {"structure": "json", "tensors": "safetensors"}
_DTYPES = {
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
}


def save_state(path: Path | str, parts: Mapping[str, Any]) -> None:
    """Write a state to a folder, in place of the one that is there.

    Args:
        path: a folder: new, empty, or an earlier state.
        parts: nested dicts (keys str or int), lists, tuples, tensors, int, float, bool, str and
            None under a name for each part, such as ``model`` or ``memory``.

    Raises:
        InputError: something cannot be saved; nothing was written.
        CheckpointError: writing failed; the earlier state is intact.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_state(folder, {"memory": {"size": 3, "weights": torch.ones(3)}})
    ...     load_state(folder)
    {'memory': {'size': 3, 'weights': tensor([1., 1., 1.])}}
    """
    folder = Path(path)
    for name in parts:
        if not isinstance(name, str) or not _PART.fullmatch(name):
            raise InputError(
                f"save_state: a part named {name!r}; use letters, digits, '-' and '_', at most 64."
            )
    packed = {name: _pack(name, value) for name, value in parts.items()}
    with _writing(folder):
        _prepare(folder)
        listed = {
            name: _write_part(folder, name, structure, tensors)
            for name, (structure, tensors) in packed.items()
        }
        _sync(folder)
        write_atomically(folder / MANIFEST, _seal(listed))
        _clean(folder, listed)


def load_state(path: Path | str) -> dict[str, Any]:
    """Read a state that `save_state` wrote; tensors are on the CPU.

    Raises:
        CheckpointError: the state is missing, damaged, or of a version this one cannot read. The
            message names the file and the part.
    """
    folder = Path(path)
    return {name: _read_part(folder, name, files) for name, files in _read_manifest(folder).items()}


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file by new content, on disk when this returns; readers see the old or the new."""
    temporary = path.with_name(path.name + _TEMPORARY)
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync(path.parent)


# --- structures to JSON and back ------------------------------------------------------------------


def _pack(part: str, value: Any) -> tuple[Any, dict[str, Tensor]]:
    """The structure of a part as JSON values, and its tensors by name."""
    tensors: dict[str, Tensor] = {}
    return _encode(value, part, "", tensors, {}), tensors


def _encode(
    value: Any, part: str, where: str, tensors: dict[str, Tensor], names: dict[Any, str]
) -> Any:
    """A value as JSON; every JSON object has one key, which says what it stands for."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, Tensor):
        return _encode_tensor(value, part, where, tensors, names)
    if isinstance(value, list | tuple):
        items = [
            _encode(item, part, f"{where}/{i}", tensors, names) for i, item in enumerate(value)
        ]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise InputError(
                    f"save_state: part '{part}' has the key {key!r} at '{where or '/'}'; "
                    "keys must be str or int."
                )
        return {
            "dict": [
                [key, _encode(item, part, f"{where}/{key}", tensors, names)]
                for key, item in value.items()
            ]
        }
    raise InputError(
        f"save_state: part '{part}' holds a {type(value).__name__} at '{where or '/'}'; only "
        "dicts, lists, tuples, tensors, numbers, strings, bools and None can be saved."
    )


def _encode_tensor(
    value: Tensor, part: str, where: str, tensors: dict[str, Tensor], names: dict[Any, str]
) -> Any:
    """A tensor as its name; one that appears twice is kept once, and its layout is kept too."""
    if value.layout != torch.strided or value.device.type == "meta" or value.dtype not in _DTYPES:
        raise InputError(
            f"save_state: part '{part}' holds a tensor of {value.dtype}, {value.layout}, on "
            f"{value.device} at '{where or '/'}'; only dense tensors of the dtypes that "
            "safetensors knows can be saved."
        )
    value = value.detach().resolve_conj().resolve_neg()
    strides = value.stride()
    order = sorted(range(value.ndim), key=lambda dim: (-strides[dim], dim))
    permuted = not value.is_contiguous() and value.permute(order).is_contiguous()
    key = (value.data_ptr(), value.shape, strides, value.dtype, value.device)
    name = names.get(key) if value.numel() else None
    if name is None:
        name = where.encode("ascii", "backslashreplace").decode() or "/"
        while name in tensors:
            name += "'"
        names[key] = name
        tensors[name] = (value.permute(order) if permuted else value).contiguous()
    return {"tensor": [name, order] if permuted else [name]}


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `_encode` turned into JSON."""
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "float":
        return float(content)
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in content)
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in content}
    if kind == "tensor":
        name, *order = content
        return tensors[name].permute(_inverse(order[0])) if order else tensors[name]
    raise ValueError(f"unknown kind {kind!r}")


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _to_json(value: Any) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode()


# --- files ----------------------------------------------------------------------------------------


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn what the disk refuses into an error that says what is still there."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        with suppress(OSError, CheckpointError):
            _clean(folder, _read_manifest(folder) if is_saved(folder) else {})
        raise CheckpointError(
            f"{folder}: the state could not be written ({error}); an earlier state there is "
            "intact. Make room on the disk, or choose a folder that can be written to."
        ) from error


def _prepare(folder: Path) -> None:
    """Make the folder, or see that it is a state or empty."""
    if not folder.exists():
        folder.mkdir(parents=True)
        _sync(folder.parent)
        return
    foreign = sorted(file.name for file in folder.iterdir() if not _is_ours(file.name))
    if not is_saved(folder):
        reason = f"not a state, and not empty (it holds {', '.join(foreign[:3])})"
    elif _manifest_format(folder) not in (FORMAT, None):
        reason = f"its {MANIFEST} belongs to something else"
    else:
        return
    if foreign:
        raise CheckpointError(f"{folder}: {reason}; choose a new or empty folder.")


def _write_part(
    folder: Path, part: str, structure: Any, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Write the files of a part; returns what the manifest says about them."""
    from safetensors.torch import save_file

    files = {}
    for kind, suffix in _SUFFIXES.items():
        temporary = folder / f"{part}.{suffix}{_TEMPORARY}"
        if kind == "structure":
            temporary.write_bytes(_to_json(structure))
        elif tensors:
            save_file(_unshared(tensors), temporary)
        else:
            continue
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        name = f"{part}-{digest[:16]}.{suffix}"
        files[kind] = {"file": name, "bytes": temporary.stat().st_size, "sha256": digest}
        os.replace(temporary, folder / name)
    return files


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, copied where two are views of the same memory."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return result


def _clean(folder: Path, parts: Mapping[str, Any]) -> None:
    """Delete what earlier states and interrupted writing left behind."""
    keep = {file["file"] for files in parts.values() for file in files.values()}
    for path in folder.iterdir():
        if _is_ours(path.name) and path.name not in keep:
            path.unlink()


def _is_ours(name: str) -> bool:
    return bool(_DATA_FILE.fullmatch(name)) or name.endswith(_TEMPORARY)


def _sync(folder: Path) -> None:
    """Have the names in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _seal(parts: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest, its own checksum among them."""
    manifest = {"format": FORMAT, "version": VERSION, "parts": parts}
    return _to_json({**manifest, "sha256": hashlib.sha256(_to_json(manifest)).hexdigest()})


def is_saved(folder: Path) -> bool:
    """Whether a state was ever saved here completely; `load_state` finds out if it still is."""
    return (folder / MANIFEST).exists()


def _manifest_format(folder: Path) -> Any:
    """What the manifest says it is; None for one so damaged that it cannot say."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except ValueError:
        return None
    return manifest.get("format", "") if isinstance(manifest, dict) else ""


def _read_manifest(folder: Path) -> dict[str, Any]:
    """What the manifest says about the files of every part, known to be as it was written."""
    path = folder / MANIFEST
    if not is_saved(folder):
        raise CheckpointError(
            f"{path}: missing; give the folder of a state that was saved completely."
        )
    try:
        raw = path.read_bytes()
        manifest = json.loads(raw)
        kind, version, parts = manifest["format"], manifest["version"], manifest["parts"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _damaged(path, f"it cannot be read ({error})") from error
    if kind != FORMAT or version != VERSION:
        raise CheckpointError(
            f"{path}: format {kind!r} version {version!r}, but this proxreplay reads {FORMAT!r} "
            f"version {VERSION}; use the one that wrote it."
        )
    if raw != _seal(parts):
        raise _damaged(path, "its checksum is wrong")
    try:
        for part, files in parts.items():
            _check_names(part, files)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, f"it is not understood ({error!r})") from error
    return dict(parts)


def _check_names(part: str, files: Mapping[str, Mapping[str, Any]]) -> None:
    """See that a part names no files but its own."""
    if "structure" not in files:
        raise ValueError(f"part '{part}' has no structure")
    for kind, file in files.items():
        expected = f"{part}-{file['sha256'][:16]}.{_SUFFIXES[kind]}"
        if not _DATA_FILE.fullmatch(expected) or file["file"] != expected or "bytes" not in file:
            raise ValueError(f"part '{part}' names the file {file['file']!r}")


def _verify(file: Path, part: str, expected: Mapping[str, Any]) -> None:
    """See that a file is as it was written."""
    try:
        with open(file, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise _damaged(file, f"part '{part}' cannot be read ({error.strerror})") from error
    if size != expected["bytes"]:
        raise _damaged(file, f"part '{part}' has {size} bytes instead of {expected['bytes']}")
    if digest != expected["sha256"]:
        raise _damaged(file, f"part '{part}' has a wrong checksum")


def _read_part(folder: Path, part: str, files: Mapping[str, Any]) -> Any:
    from safetensors import SafetensorError, safe_open

    for file in files.values():
        _verify(folder / file["file"], part, file)
    tensors = {}
    try:
        if "tensors" in files:
            with safe_open(folder / files["tensors"]["file"], framework="pt") as opened:
                # the library maps the file into memory; a copy does not depend on it any more
                tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
        return _decode(json.loads((folder / files["structure"]["file"]).read_bytes()), tensors)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise _damaged(folder, f"part '{part}' is not understood ({error})") from error


def _damaged(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: damaged, {reason}. Load an older state, or save it again from where it is whole."
    )
