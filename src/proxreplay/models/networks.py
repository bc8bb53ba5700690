"""Small networks; every one ends in ``head``, which grows when ``num_classes`` is None."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import cast

from torch import nn

from proxreplay.errors import InputError
from proxreplay.models.heads import make_head
from proxreplay.models.recipes import recorded
from proxreplay.options import count


@recorded
def mlp(
    in_features: int, num_classes: int | None = None, hidden: Sequence[int] = (256, 256)
) -> nn.Sequential:
    """A multi-layer perceptron with ReLU on flattened inputs."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    width = in_features
    for i, size in enumerate(_sizes(hidden=hidden), start=1):
        layers[f"linear{i}"] = nn.Linear(width, size)
        layers[f"relu{i}"] = nn.ReLU()
        width = size
    layers["head"] = make_head(width, num_classes)
    return nn.Sequential(layers)


@recorded
def small_cnn(
    in_channels: int = 1, num_classes: int | None = None, widths: Sequence[int] = (32, 64)
) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU blocks with stride 2 after the first, then a global average."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    width = in_channels
    for i, size in enumerate(_sizes(widths=widths), start=1):
        stride = 1 if i == 1 else 2
        layers[f"conv{i}"] = nn.Conv2d(width, size, 3, stride=stride, padding=1, bias=False)
        layers[f"norm{i}"] = nn.BatchNorm2d(size)
        layers[f"relu{i}"] = nn.ReLU()
        width = size
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["head"] = make_head(width, num_classes)
    return nn.Sequential(layers)


def _sizes(**named: Sequence[int]) -> Sequence[int]:
    """Refuse what is not one whole number per layer."""
    ((name, sizes),) = named.items()
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise InputError(
            f"{name}={sizes!r:.80}; give one number per layer, such as ({sizes!r:.8},)."
        )
    for i, size in enumerate(sizes):
        count(**{f"{name}[{i}]": size})
    return sizes


def load_network(
    spec: str,
    num_classes: int | None,
    in_channels: int,
    image_size: int,
    in_features: int | None = None,
) -> nn.Module:
    """A network by name or import path, built for the data at hand.

    Args:
        spec: the name of one of proxreplay's own, such as ``mlp``; ``package.module:name`` or
            ``folder/file.py:name``. The name is a function or class that returns a module; of the
            arguments below it is given those it has parameters for. ``num_classes=None`` asks for
            a `GrowingHead`; a network without that parameter must have outputs for all classes.
        num_classes: outputs of a fixed head, or None.
        in_channels: of the images.
        image_size: side of the images.
        in_features: numbers per example; None for those of square images.

    >>> load_network("proxreplay.models:small_cnn", None, in_channels=3, image_size=32)[0]
    Conv2d(3, 32, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
    """
    build = import_name(spec, "network")
    facts = {
        "num_classes": num_classes,
        "in_channels": in_channels,
        "image_size": image_size,
        "in_features": in_features or in_channels * image_size**2,
    }
    wanted = inspect.signature(build).parameters
    network = build(**{name: value for name, value in facts.items() if name in wanted})
    if not isinstance(network, nn.Module):
        raise InputError(
            f"network '{spec}' returned {type(network).__name__}; return a torch.nn.Module."
        )
    return network


_OWN = ("mlp", "small_cnn", "slim_resnet18", "resnet18")


def import_name(spec: str, what: str) -> Callable[..., object]:
    """Code by name: ``package.module:name``, ``folder/file.py:name``, or a network of ours.

    Args:
        spec: the name. It is executed, so it must never come from a file or a request.
        what: it is for, in errors.
    """
    where, _, name = spec.rpartition(":")
    if spec in _OWN:
        where = "proxreplay.models"
    if not where or not name:
        names = f"one of {', '.join(_OWN)}, or " if what == "network" else ""
        raise InputError(
            f"{what} '{spec}': give {names}package.module:name, or folder/file.py:name."
        )
    try:
        module = _module_from_file(Path(where)) if where.endswith(".py") else import_module(where)
    except ImportError as error:
        raise InputError(
            f"{what} '{spec}': {error}; install the package that holds it, or name the file as "
            "folder/file.py:name."
        ) from error
    build = getattr(module, name, None)
    if not callable(build):
        raise InputError(f"{what} '{spec}': {where} has no function or class '{name}'.")
    return cast("Callable[..., object]", build)


def _module_from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"file '{path}' does not exist; check the path.")
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(f"file '{path}' cannot be imported; give a Python file.")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
