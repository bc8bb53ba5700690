"""State on disk: one safetensors file with a checksum, replaced as a whole, read without pickle.

The structure of a state (dicts, lists, numbers) is JSON in the metadata of the file. Its tensors
are the tensors of the file, so any safetensors reader can look into it:

    8 bytes   length of the header
    header    {"__metadata__":{"format":"proxreplay-state","version":"2","sha256":"...",
               "structure":"..."}, "model/0/weight":{"dtype":"F32", ...}, ...}
    data      the tensors

``sha256`` is that of the whole file with 64 zeros in its place. It finds damage, not forgery, so
everything is checked against the size of the file before memory is taken.

safetensors' own functions are not used: they need all tensors in memory twice or write through a
temporary file of their own, which a killed process leaves behind.
"""

import hashlib
import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from proxreplay.errors import CheckpointError, InputError
from proxreplay.files import replacing

STATE = "state.safetensors"
VERSION = "2"

_FORMAT = "proxreplay-state"
_MAGIC = b'{"__metadata__":{"format":"proxreplay-state","version":"'
_UNSIGNED = "0" * 64
_MOST = 2**24  # bytes of JSON; read into Python objects they take up to 25 times as much
_DTYPES = {
    **{"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "C64": torch.complex64},
    **{"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
    **{"I16": torch.int16, "I32": torch.int32, "I64": torch.int64},
    **{"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def save_state(path: Path | str, parts: Mapping[str, Any]) -> None:
    """Write a state, in place of the one that is there.

    Args:
        path: a file if it ends in ``.safetensors``; otherwise a folder, in which the state is the
            file ``state.safetensors``. What is missing is made.
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
    path = Path(path)
    file = path if path.suffix == ".safetensors" and not path.is_dir() else path / STATE
    header, tensors = _pack(parts)
    try:
        _refuse_foreign(file)
        with replacing(file) as out:
            _write(out, header, tensors)
    except OSError as error:
        raise CheckpointError(
            f"{path}: the state could not be written ({error}); an earlier state there is "
            "intact. Make room on the disk, or choose a place that can be written to."
        ) from error
    with suppress(OSError):
        if file.name == STATE and _is_version_1(file.parent):
            remove_version_1(file.parent)


def load_state(path: Path | str) -> dict[str, Any]:
    """Read a state that `save_state` wrote, also one of version 1; tensors are on the CPU.

    Raises:
        CheckpointError: the state is missing, damaged, or of a version this one cannot read. The
            message names the file.
    """
    path = Path(path)
    file = path if path.is_file() else path / STATE
    if file.name == STATE and not file.exists() and (path / _MANIFEST).exists():
        return _load_version_1(path)
    with _reading(file) as opened:
        return _read(opened)


def to_bytes(parts: Mapping[str, Any]) -> bytes:
    """A state as the bytes that `save_state` would write; the same state gives the same bytes.

    >>> from_bytes(to_bytes({"inputs": {"x": torch.ones(2)}, "labels": ["cat", "dog"]}))
    {'inputs': {'x': tensor([1., 1.])}, 'labels': ['cat', 'dog']}
    """
    out = io.BytesIO()
    _write(out, *_pack(parts))
    return out.getvalue()


def from_bytes(data: bytes, what: str = "bytes") -> dict[str, Any]:
    """The state in the bytes of `to_bytes`; ``what`` names them in errors.

    Raises:
        CheckpointError: they are damaged, or of a version this one cannot read.
    """
    with _naming(what):
        return _read(io.BytesIO(data))


def is_saved(path: Path) -> bool:
    """Whether a state was ever saved here completely; `load_state` finds out if it still is."""
    return path.is_file() or (path / STATE).exists() or (path / _MANIFEST).exists()


# --- structures to JSON and back ------------------------------------------------------------------


def _pack(parts: Mapping[str, Any]) -> tuple[bytes, list[Tensor]]:
    """The header of a file, not signed yet, and its tensors in the order of their data."""
    tensors: dict[str, Tensor] = {}
    try:
        structure = json.dumps(_encode(dict(parts), "", tensors, {}), allow_nan=False)
    except (RecursionError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"save_state: this state cannot be written as JSON ({error}).") from error
    metadata = {"format": _FORMAT, "version": VERSION, "sha256": _UNSIGNED, "structure": structure}
    listed: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    # wide numbers first, so that every tensor is aligned in the file
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    for name, tensor in ordered:
        begin, offset = offset, offset + tensor.numel() * tensor.itemsize
        entry = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
        listed[name] = {**entry, "data_offsets": [begin, offset]}
    header = json.dumps(listed, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > _MOST:
        raise InputError(
            f"save_state: {len(header)} bytes of structure, at most {_MOST} can be saved; put long "
            "lists of numbers into tensors."
        )
    return len(header).to_bytes(8, "little") + header, [tensor for _, tensor in ordered]


def _encode(value: Any, where: str, tensors: dict[str, Tensor], names: dict[Any, str]) -> Any:
    """A value as JSON; every JSON object has one key, which says what it stands for."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, Tensor):
        return _encode_tensor(value, where, tensors, names)
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{where}/{i}", tensors, names) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise InputError(
                    f"save_state: the key {key!r} at '{where or '/'}'; keys must be str or int."
                )
        return {
            "dict": [
                [key, _encode(item, f"{where}/{key}", tensors, names)]
                for key, item in value.items()
            ]
        }
    raise InputError(
        f"save_state: a {type(value).__name__} at '{where}'; only dicts, lists, tuples, tensors, "
        "numbers, strings, bools and None can be saved."
    )


def _encode_tensor(
    value: Tensor, where: str, tensors: dict[str, Tensor], names: dict[Any, str]
) -> Any:
    """A tensor as its name; one that appears twice is kept once, and its layout is kept too."""
    if value.layout != torch.strided or value.device.type == "meta" or value.dtype not in _NAMES:
        raise InputError(
            f"save_state: a tensor of {value.dtype}, {value.layout}, on {value.device} at "
            f"'{where}'; only dense tensors of the dtypes that safetensors knows can be saved."
        )
    value = value.detach().resolve_conj().resolve_neg()
    strides = value.stride()
    order = sorted(range(value.ndim), key=lambda dim: (-strides[dim], dim))
    permuted = not value.is_contiguous() and value.permute(order).is_contiguous()
    key = (value.data_ptr(), value.shape, strides, value.dtype, value.device)
    name = names.get(key) if value.numel() else None
    if name is None:
        name = where.removeprefix("/").encode("ascii", "backslashreplace").decode()
        while name in tensors or name == "__metadata__":
            name += "'"
        names[key] = name
        tensors[name] = value.permute(order) if permuted else value
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
        if not order:
            return tensors[name]
        return tensors[name].permute([order[0].index(dim) for dim in range(len(order[0]))])
    raise ValueError(f"unknown kind {kind!r}")


def _parse(text: str | bytes) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"it holds {constant}")

    return json.loads(text, parse_constant=refuse)


# --- files ----------------------------------------------------------------------------------------


@contextmanager
def _reading(file: Path, sha256: str | None = None) -> Iterator[IO[bytes]]:
    """Open a file; whatever is wrong with it becomes an error that names it."""
    if not file.is_file():
        raise CheckpointError(f"{file}: missing; give a state that was saved completely.")
    with _naming(file), open(file, "rb") as opened:
        if sha256 is not None and hashlib.file_digest(opened, "sha256").hexdigest() != sha256:
            raise ValueError("its checksum is wrong")
        opened.seek(0)
        yield opened


@contextmanager
def _naming(what: Path | str) -> Iterator[None]:
    """Whatever is wrong with what is read inside becomes an error that names it."""
    try:
        yield
    except (OSError, LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error) if isinstance(error, ValueError) else repr(error)
        raise CheckpointError(
            f"{what}: damaged or foreign: {reason}. Load an older state, or save it again from "
            "where it is whole."
        ) from error


def _write(out: IO[bytes], header: bytes, tensors: Sequence[Tensor]) -> None:
    """Write a packed state from the beginning of a file, and sign it."""
    digest = hashlib.sha256(header)
    out.write(header)
    for tensor in tensors:
        data = tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
        digest.update(data)
        out.write(data)
    out.seek(header.index(_UNSIGNED.encode()))
    out.write(digest.hexdigest().encode())


def _read(opened: IO[bytes]) -> dict[str, Any]:
    """The state in a file that is open at its beginning."""
    digest = hashlib.sha256()
    metadata, tensors = _read_tensors(opened, digest)
    if digest.hexdigest() != metadata["sha256"]:
        raise ValueError("its checksum is wrong")
    state = _decode(_parse(metadata["structure"]), tensors)
    if not isinstance(state, dict):
        raise ValueError("it is not a dict")
    return state


def _read_tensors(opened: IO[bytes], digest: Any) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and tensors of a safetensors file; the digest is told what was read."""
    size = opened.seek(0, os.SEEK_END)
    opened.seek(0)
    prefix = opened.read(8)
    length = int.from_bytes(prefix, "little")
    if not 0 < length <= min(_MOST, size - 8):
        raise ValueError(f"{length} bytes of header in a file of {size}")
    header = opened.read(length)
    listed = _parse(header)
    metadata = listed.pop("__metadata__", {})
    if metadata.get("format") == _FORMAT:
        version, signed = metadata["version"], metadata["sha256"].encode()
        if version != VERSION:
            raise ValueError(f"version {version!r}, but this proxreplay reads {VERSION!r} and '1'")
        header = header.replace(signed, _UNSIGNED.encode(), 1)
    digest.update(prefix + header)
    end = 0
    entries = sorted(listed.items(), key=lambda item: item[1]["data_offsets"])
    for name, entry in entries:
        (begin, stop), shape = entry["data_offsets"], entry["shape"]
        known = all(type(n) is int and n >= 0 for n in (begin, stop, *shape))
        needed = math.prod(shape) * _DTYPES[entry["dtype"]].itemsize if known else -1
        if begin != end or stop - begin != needed:
            raise ValueError(f"tensor {name!r} is not where or what it is said to be")
        end = stop
    if size != 8 + length + end:
        raise ValueError(f"{size} bytes instead of {8 + length + end}")
    tensors = {}
    for name, entry in entries:
        begin, stop = entry["data_offsets"]
        data = torch.empty(stop - begin, dtype=torch.uint8)
        if opened.readinto(data.numpy()) != stop - begin:  # type: ignore[attr-defined]
            raise ValueError("it ends too early")
        digest.update(data.numpy())
        dtype = _DTYPES[entry["dtype"]]
        if dtype == torch.bool and bool((data > 1).any()):
            raise ValueError(f"tensor {name!r} holds something else than True and False")
        tensors[name] = data.view(dtype).view(entry["shape"])
    return metadata, tensors


def _refuse_foreign(file: Path) -> None:
    """Raise if a file is in the way that is no state of ours."""
    if not file.exists():
        return
    if file.is_file():
        with open(file, "rb") as opened:
            begin = opened.read(8 + len(_MAGIC))
        if not begin or begin[8:] == _MAGIC:
            return
    raise CheckpointError(
        f"{file} is in the way and is not a state of proxreplay; remove it, or choose another path."
    )


# --- version 1: a folder of JSON and safetensors files, listed in a manifest ----------------------

_MANIFEST = "manifest.json"
_PART = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
_V1_DATA = re.compile(rf"{_PART}-[0-9a-f]{{16}}\.(json|safetensors)")
_V1_FILE = re.compile(
    rf"{_V1_DATA.pattern}|{_PART}\.(json|safetensors)\.writing|manifest\.json|\.tmp[A-Za-z0-9]{{6}}"
)


def remove_version_1(folder: Path) -> None:
    """Remove the files of a state of version 1 and of attempts to write one, and no others."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == _MANIFEST):
        if _V1_FILE.fullmatch(path.name):
            path.unlink()


def _load_version_1(folder: Path) -> dict[str, Any]:
    with _reading(folder / _MANIFEST) as opened:
        manifest = _parse(opened.read(_MOST))
        signed = manifest.pop("sha256")
        if manifest["format"] != _FORMAT or manifest["version"] != 1:
            raise ValueError(f"format {manifest['format']!r} version {manifest['version']!r}")
        if signed != hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest():
            raise ValueError("its checksum is wrong")
        for part, files in manifest["parts"].items():
            for kind, suffix in (("structure", "json"), ("tensors", "safetensors")):
                if kind == "structure" or kind in files:
                    name = f"{part}-{files[kind]['sha256'][:16]}.{suffix}"
                    if files[kind]["file"] != name or not _V1_DATA.fullmatch(name):
                        raise ValueError(f"part {part!r} names the file {files[kind]['file']!r}")
    state = {}
    for part, files in manifest["parts"].items():
        tensors: dict[str, Tensor] = {}
        if "tensors" in files:
            with _reading(folder / files["tensors"]["file"], files["tensors"]["sha256"]) as opened:
                _, tensors = _read_tensors(opened, hashlib.sha256())
        with _reading(folder / files["structure"]["file"], files["structure"]["sha256"]) as opened:
            state[part] = _decode(_parse(opened.read(_MOST)), tensors)
    return state


def _is_version_1(folder: Path) -> bool:
    file = folder / _MANIFEST
    return file.is_file() and _FORMAT.encode() in file.read_bytes()[:1000]
