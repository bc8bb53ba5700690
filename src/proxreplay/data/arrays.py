"""Data that is in memory already: arrays, ``.npz`` files and any torch data set."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch import Tensor

from proxreplay.data.archives import open_files
from proxreplay.data.datasets import Dataset, Examples
from proxreplay.errors import DataError

TEST_EVERY = 5
ALIASES = {
    "x_train": "train_inputs",
    "y_train": "train_labels",
    "x_test": "test_inputs",
    "y_test": "test_labels",
}
PARTS = ("train", "test", "validation")
FIELDS = ("inputs", "labels", "domains")
KEYS = (*(f"{part}_{field}" for part in PARTS for field in FIELDS), "classes", "domains")
ArrayLike = Tensor | np.ndarray[Any, Any] | Sequence[Any]


def from_arrays(
    name: str,
    train: Examples | tuple[ArrayLike, ...],
    test: Examples | tuple[ArrayLike, ...] | None = None,
    *,
    validation: Examples | tuple[ArrayLike, ...] | None = None,
    classes: Sequence[str] | None = None,
    domains: Sequence[str] | None = None,
) -> Dataset:
    """A data set from arrays in memory.

    Args:
        name: of the data set.
        train: inputs ``[n, ...]``, labels ``[n]`` and maybe domains ``[n]``. Images are
            ``[n, channels, height, width]`` or ``[n, height, width]``.
        test: likewise; without it, every fifth training example of a class becomes test.
        validation: likewise; without it, the stream sets some aside.
        classes: a name for every label; by default the labels themselves.
        domains: a name for every domain; by default their numbers.

    >>> data = from_arrays("toy", ([[0.0], [1.0], [2.0]], [0, 1, 0]), ([[0.0]], [0]))
    >>> data.classes, len(data.train)
    (('0', '1'), 3)
    """
    parts = {"train": _examples(f"{name} train", train)}
    if validation is not None:
        parts["validation"] = _examples(f"{name} validation", validation)
    if test is not None:
        parts["test"] = _examples(f"{name} test", test)
    else:
        parts["train"], parts["test"] = _split(parts["train"])
    return Dataset(
        name=name,
        train=parts["train"],
        test=parts["test"],
        validation=parts.get("validation"),
        classes=_names(classes, [e.labels for e in parts.values()]),
        domains=_names(domains, [e.domains for e in parts.values() if e.domains is not None]),
    )


def _names(names: Sequence[str] | None, ids: Sequence[Tensor]) -> tuple[str, ...]:
    if names is not None:
        return tuple(str(name) for name in names)
    largest = max((int(i.max()) for i in ids if len(i)), default=-1)
    return tuple(str(i) for i in range(largest + 1))


def _examples(what: str, given: Examples | tuple[ArrayLike, ...]) -> Examples:
    if isinstance(given, Examples):
        return given
    if len(given) not in (2, 3):
        raise DataError(f"{what}: {len(given)} arrays; give inputs, labels and maybe domains.")
    inputs, *ids = (
        a if isinstance(a, Tensor) else torch.from_numpy(_array(what, a)) for a in given
    )
    return Examples(_checked_inputs(what, inputs), *(_checked_ids(what, i) for i in ids))


def _array(what: str, values: ArrayLike) -> np.ndarray[Any, Any]:
    array = np.array(values)  # a copy: an array that may not be written makes torch warn
    if array.dtype.kind not in "biuf":
        raise DataError(f"{what}: an array of {array.dtype}; give numbers.")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _checked_inputs(what: str, inputs: Tensor) -> Tensor:
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


def _checked_ids(what: str, ids: Tensor) -> Tensor:
    if ids.is_floating_point() or ids.is_complex():
        raise DataError(f"{what}: labels or domains are {ids.dtype}; give integers from 0.")
    if ids.ndim == 2 and ids.shape[1] == 1:
        ids = ids.squeeze(1)
    return ids.long()


def _split(everything: Examples) -> tuple[Examples, Examples]:
    """Every fifth example of a class (in a domain), in stored order, becomes test."""
    keys = everything.labels
    if everything.domains is not None:
        keys = keys + (int(keys.max()) + 1) * everything.domains
    rank = torch.empty_like(keys)
    for key in keys.unique():
        of_key = keys == key
        rank[of_key] = torch.arange(int(of_key.sum()))
    test = rank % TEST_EVERY == TEST_EVERY - 1
    return everything[~test], everything[test]


def from_npz(path: str | Path) -> Dataset:
    """A data set from an ``.npz`` file; objects that would need unpickling are refused.

    Keys: ``train_inputs``, ``train_labels``; maybe ``train_domains``, the same for ``test_`` and
    ``validation_``, and ``classes`` and ``domains`` with names. ``x_train``, ``y_train``,
    ``x_test`` and ``y_test`` are understood too.
    """
    path = Path(path)
    arrays = _read_npz(path)
    unknown = sorted(set(arrays) - set(KEYS))
    if unknown or not {"train_inputs", "train_labels"} <= arrays.keys():
        raise DataError(
            f"{path}: holds {', '.join(sorted(arrays)) or 'nothing'}; expected train_inputs and "
            f"train_labels, maybe others of {', '.join(KEYS)}."
        )
    parts = {part: _npz_part(arrays, part) for part in PARTS}
    train = parts["train"]
    assert train is not None  # its keys are there
    return from_arrays(
        path.stem,
        train,
        parts["test"],
        validation=parts["validation"],
        classes=_npz_names(arrays, "classes"),
        domains=_npz_names(arrays, "domains"),
    )


def _read_npz(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    if not path.is_file():
        raise DataError(f"{path} does not exist; give an .npz file.")
    if path.suffix != ".npz":
        raise DataError(f"{path}: not an .npz file; save one with numpy.savez.")
    try:
        with open_files(path), np.load(path, allow_pickle=False) as content:
            return {ALIASES.get(key, key): content[key] for key in content.files}
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read as .npz ({error}); save it again.") from error


def _npz_part(
    arrays: Mapping[str, np.ndarray[Any, Any]], part: str
) -> tuple[np.ndarray[Any, Any], ...] | None:
    found = [arrays[f"{part}_{field}"] for field in FIELDS if f"{part}_{field}" in arrays]
    return tuple(found) or None


def _npz_names(arrays: Mapping[str, np.ndarray[Any, Any]], key: str) -> list[str] | None:
    return [str(name) for name in arrays[key]] if key in arrays else None


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
