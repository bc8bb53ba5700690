"""Data that is in memory already: arrays, ``.npz`` files and any torch data set."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.utils.data
from torch import Tensor

from proxreplay.data.archives import open_files
from proxreplay.data.datasets import Dataset, Examples, rank_in_group
from proxreplay.data.trees import PARTS, sorted_naturally
from proxreplay.errors import DataError

TEST_EVERY = 5
MAX_NUMBER = 10_000  # of a class without a name, or the number of examples if that is larger
MAX_UNPACKED, MAX_RATIO = 256 * 2**20, 20
FIELDS = {
    **dict.fromkeys(("inputs", "x", "data", "images"), "inputs"),
    **dict.fromkeys(("labels", "y", "target", "targets"), "labels"),
    "domains": "domains",
}
HEADERS = {  # by version of the .npy format
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
KEYS = "train_inputs, train_labels, maybe train_domains; test_ and validation_ likewise"
Array = np.ndarray[Any, Any]
ArrayLike = Tensor | Array | Sequence[Any]
Given = Examples | tuple[ArrayLike, ...]


def from_arrays(
    name: str,
    train: Given,
    test: Given | None = None,
    *,
    validation: Given | None = None,
    classes: Sequence[str] | None = None,
    domains: Sequence[str] | None = None,
) -> Dataset:
    """A data set from arrays in memory.

    Args:
        name: of the data set.
        train: inputs ``[n, ...]``, labels ``[n]`` and maybe domains ``[n]``. Images are
            ``[n, channels, height, width]`` or ``[n, height, width]``. Labels and domains are
            numbers from 0, or names.
        test: likewise; without it, every fifth training example of a class becomes test.
        validation: likewise; without it, the stream sets some aside.
        classes: a name for every label; by default the labels themselves.
        domains: a name for every domain; by default the domains themselves.

    >>> data = from_arrays("toy", ([[0.0], [1.0]], ["dog", "cat"]), ([[2.0]], ["dog"]))
    >>> data.classes, data.train.labels.tolist()
    (('cat', 'dog'), [1, 0])
    """
    given = {"train": train, "test": test, "validation": validation}
    parts = {
        part: _arrays(f"{name} {part}", arrays)
        for part, arrays in given.items()
        if arrays is not None
    }
    labels, class_names = _numbered(f"{name}: labels", {p: a[1] for p, a in parts.items()}, classes)
    with_domains = {p: a[2] for p, a in parts.items() if len(a) == 3}
    ids, domain_names = _numbered(f"{name}: domains", with_domains, domains)
    examples = {
        part: Examples(_inputs(f"{name} {part}", arrays[0]), labels[part], ids.get(part))
        for part, arrays in parts.items()
    }
    if test is None:
        examples["train"], examples["test"] = _split(examples["train"])
    return Dataset(
        name,
        examples["train"],
        examples["test"],
        class_names,
        validation=examples.get("validation"),
        domains=domain_names,
    )


def _arrays(what: str, given: Given) -> tuple[ArrayLike, ...]:
    if isinstance(given, Examples):
        both = (given.inputs, given.labels)
        return both if given.domains is None else (*both, given.domains)
    if len(given) not in (2, 3):
        raise DataError(f"{what}: {len(given)} arrays; give inputs, labels and maybe domains.")
    return given


def _inputs(what: str, values: ArrayLike) -> Tensor:
    inputs = values if isinstance(values, Tensor) else torch.from_numpy(_numbers(what, values))
    if inputs.dtype == torch.float64:
        inputs = inputs.float()
    if inputs.is_floating_point() and not torch.isfinite(inputs).all():
        raise DataError(f"{what}: inputs hold NaN or infinity; clean them first.")
    if inputs.ndim < 2:
        raise DataError(f"{what}: inputs of shape {tuple(inputs.shape)}; give [n, ...].")
    if inputs.ndim == 3 and inputs.dtype == torch.uint8:
        return inputs.unsqueeze(1)
    channels = (1, 3, 4)
    if inputs.ndim == 4 and inputs.shape[1] not in channels and inputs.shape[3] in channels:
        raise DataError(
            f"{what}: images of shape {tuple(inputs.shape)} have their channels last; give "
            "[n, channels, height, width], for instance with x.transpose(0, 3, 1, 2)."
        )
    return inputs


def _array(what: str, values: ArrayLike) -> Array:
    try:
        if isinstance(values, Tensor):
            return values.numpy().copy()
        return np.array(values)  # a copy: torch warns about arrays that are read-only
    except ValueError as error:
        raise DataError(f"{what}: no array ({error}); give rows of one length.") from error


def _numbers(what: str, values: ArrayLike) -> Array:
    array = _array(what, values)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{what}: an array of {array.dtype}; give numbers.")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:  # torch hardly knows these
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise DataError(f"{what}: holds {array.max()}; give numbers below 2^63.")
        return array.astype(np.int64)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _numbered(
    what: str, given: Mapping[str, ArrayLike], names: Sequence[str] | None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Labels or domains of every part as int64 ``[n]``, and a name for every number."""
    arrays = {part: _array(what, values) for part, values in given.items()}
    arrays = {part: a[:, 0] if a.ndim == 2 and a.shape[1] == 1 else a for part, a in arrays.items()}
    if any(a.dtype.kind in "US" or _holds_names(a) for a in arrays.values()):
        return _from_names(what, arrays, names)
    for part, array in arrays.items():
        if array.dtype.kind not in "biu":
            raise DataError(f"{what}: {part} holds {array.dtype}; give integers from 0, or names.")
    ids = {part: torch.from_numpy(_numbers(what, array)).long() for part, array in arrays.items()}
    if names is not None:
        return ids, tuple(str(name) for name in names)
    largest = max((int(i.max()) for i in ids.values() if len(i)), default=-1)
    if largest >= max(MAX_NUMBER, sum(len(i) for i in ids.values())):
        raise DataError(
            f"{what}: the largest is {largest}; number them from 0 without gaps, or give names."
        )
    return ids, tuple(str(i) for i in range(largest + 1))


def _holds_names(array: Array) -> bool:
    return array.dtype.kind == "O" and all(isinstance(value, str) for value in array.flat)


def _from_names(
    what: str, arrays: Mapping[str, Array], names: Sequence[str] | None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    try:
        texts = {part: array.astype(np.str_) for part, array in arrays.items()}
    except UnicodeDecodeError as error:
        raise DataError(f"{what}: not all are ASCII text ({error}); save them as str.") from error
    met = {str(name) for array in texts.values() for name in np.unique(array)}
    known = sorted_naturally(met) if names is None else [str(name) for name in names]
    if unknown := met - set(known):
        raise DataError(f"{what}: {min(unknown)!r} is not among the names given; add it.")
    number = {name: i for i, name in enumerate(known)}
    ids = {}
    for part, array in texts.items():
        some, where = np.unique(array, return_inverse=True)
        ids[part] = torch.tensor([number[str(name)] for name in some])[where.reshape(array.shape)]
    return ids, tuple(known)


def _split(everything: Examples) -> tuple[Examples, Examples]:
    """Every fifth example of a class (in a domain), in stored order, becomes test."""
    keys = everything.labels
    if everything.domains is not None:
        keys = keys + (int(keys.max()) + 1) * everything.domains
    test = rank_in_group(keys) % TEST_EVERY == TEST_EVERY - 1
    return everything[~test], everything[test]


def from_npz(path: str | Path) -> Dataset:
    """A data set from an ``.npz`` file; objects that would need unpickling are refused.

    Keys: ``train_inputs``, ``train_labels``; maybe ``train_domains``, the same for ``test_`` and
    ``validation_``, and ``classes`` and ``domains`` with names. Inputs may also be called ``x``,
    ``data`` or ``images``, labels ``y``, ``target`` or ``targets``, in upper or lower case, with
    the split before or after the name (``X_train``) or without one, for training.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise DataError(f"{path}: not an .npz file; save one with numpy.savez.")
    parts: dict[str, dict[str, Array]] = {part: {} for part in PARTS.values()}
    names: dict[str, Any] = {"classes": None, "domains": None}
    arrays = _read_npz(path)
    for key, array in arrays.items():
        if key in names and array.dtype.kind in "US":
            names[key] = [str(name) for name in array.flat]
            continue
        split, field = _understand(key)
        if field is None or field in parts[split]:
            raise DataError(
                f"{path}: holds {', '.join(sorted(arrays))}; '{key}' is not understood or means "
                f"the same as another. Expected: {KEYS}; classes and domains with names."
            )
        parts[split][field] = array
    for part, fields in parts.items():
        if (fields or part == "train") and not {"inputs", "labels"} <= fields.keys():
            raise DataError(
                f"{path}: holds {', '.join(sorted(arrays)) or 'nothing'}, but no {part}_inputs "
                f"with {part}_labels. Expected: {KEYS}."
            )
    given: dict[str, Any] = {
        part: tuple(fields[f] for f in ("inputs", "labels", "domains") if f in fields) or None
        for part, fields in parts.items()
    }
    return from_arrays(path.stem, **given, **names)


def _understand(key: str) -> tuple[str, str | None]:
    """The split and the field that a key names; no field if it is not understood."""
    words = key.lower().split("_")
    split = next((PARTS[word] for word in words if word in PARTS), None)
    fields = [FIELDS[word] for word in words if word in FIELDS]
    understood = len(fields) == 1 and len(words) == (1 if split is None else 2)
    return split or "train", fields[0] if understood else None


def _read_npz(path: Path) -> dict[str, Array]:
    with open_files(path) as files:
        total, packed = sum(files.sizes.values()), path.stat().st_size
        if total > max(MAX_UNPACKED, MAX_RATIO * packed):
            raise DataError(
                f"{path}: {packed} bytes unpack to {total}, too much for a data set; if it is "
                "yours, save it uncompressed, with numpy.savez."
            )
        arrays = {}
        for name, size in files.sizes.items():
            with files.open(name) as file:
                array = read_npy(file, size, f"{path}: {name}", "biufUS")
            arrays[name.removesuffix(".npy")] = array
        return arrays


def read_npy(file: IO[bytes], size: int, what: str, kinds: str = "biuf") -> Array:
    """The array in an ``.npy`` file of ``size`` bytes, checked before memory is taken for it.

    ``kinds`` are the kinds of dtype that are read; nothing is unpickled.

    >>> from io import BytesIO
    >>> file = BytesIO()
    >>> np.save(file, np.arange(3))
    >>> read_npy(BytesIO(file.getvalue()), file.tell(), "file")
    array([0, 1, 2])
    """
    try:
        shape, by_column, dtype = HEADERS[np.lib.format.read_magic(file)](file)
    except Exception as error:  # the parser of headers raises all kinds of errors
        raise DataError(f"{what} cannot be read ({error}); save it with numpy.") from error
    if dtype.kind not in kinds:
        wanted = "numbers or text" if "U" in kinds else "numbers"
        raise DataError(f"{what}: an array of {dtype}; give {wanted}, nothing pickled.")
    rest = size - file.tell()
    fits = math.prod(shape) * dtype.itemsize == rest and min(shape, default=0) >= 0
    if not fits or dtype.itemsize == 0:
        raise DataError(
            f"{what}: its header says {dtype} {shape}, not what it holds; save it again."
        )
    data = file.read(rest)
    if len(data) != rest:
        raise DataError(f"{what}: {len(data)} bytes of {rest}; save it again.")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if by_column else "C")


def from_torch_dataset(
    name: str,
    train: "torch.utils.data.Dataset[Any]",
    test: "torch.utils.data.Dataset[Any] | None" = None,
    *,
    classes: Sequence[str] | None = None,
) -> Dataset:
    """A data set from any torch data set of ``(input, label)`` or ``(input, label, domain)``.

    It is read once, into memory. Inputs are tensors, arrays or PIL images of one size; leave out
    random augmentation there, since it would be frozen.

    Args:
        name: of the data set.
        train: has a length and can be indexed.
        test: likewise; without it, every fifth training example of a class becomes test.
        classes: a name for every label; by default ``train.classes`` or the labels themselves.
    """
    return from_arrays(
        name,
        _gather(f"{name} train", train),
        None if test is None else _gather(f"{name} test", test),
        classes=classes if classes is not None else getattr(train, "classes", None),
    )


def _gather(what: str, dataset: "torch.utils.data.Dataset[Any]") -> tuple[ArrayLike, ...]:
    if not hasattr(dataset, "__len__"):
        raise DataError(f"{what}: a data set without length; give one that can be indexed.")
    inputs, ids = [], []
    for i in range(len(dataset)):
        item = dataset[i]
        if not isinstance(item, tuple | list) or len(item) not in (2, 3):
            raise DataError(f"{what}: item {i} is no (input, label) or (input, label, domain).")
        inputs.append(_input_tensor(item[0]))
        ids.append([int(number) for number in item[1:]])
        if inputs[-1].shape != inputs[0].shape or len(ids[-1]) != len(ids[0]):
            raise DataError(
                f"{what}: item {i} has shape {tuple(inputs[-1].shape)}, item 0 "
                f"{tuple(inputs[0].shape)}; resize them to one size."
            )
    if not inputs:
        raise DataError(f"{what}: no items; give at least one.")
    return (torch.stack(inputs), *(torch.tensor(column) for column in zip(*ids, strict=True)))


def _input_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    array = np.array(value)
    if hasattr(value, "getbands"):  # a PIL image: height, width, maybe channels
        array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    return torch.from_numpy(np.ascontiguousarray(array))
