"""Data sets, transforms and streams; names are imported on first use, so that few need torch."""

from typing import TYPE_CHECKING

from proxreplay.lazy import lazy_names

if TYPE_CHECKING:
    from proxreplay.data.arrays import from_arrays as from_arrays
    from proxreplay.data.arrays import from_npz as from_npz
    from proxreplay.data.arrays import from_torch_dataset as from_torch_dataset
    from proxreplay.data.catalog import cifar10 as cifar10
    from proxreplay.data.catalog import cifar100 as cifar100
    from proxreplay.data.catalog import clear10 as clear10
    from proxreplay.data.catalog import digits as digits
    from proxreplay.data.catalog import fashion_mnist as fashion_mnist
    from proxreplay.data.catalog import mnist as mnist
    from proxreplay.data.catalog import pacs as pacs
    from proxreplay.data.catalog import tinyimagenet as tinyimagenet
    from proxreplay.data.datasets import Dataset as Dataset
    from proxreplay.data.datasets import Examples as Examples
    from proxreplay.data.scenarios import IID as IID
    from proxreplay.data.scenarios import Blurry as Blurry
    from proxreplay.data.scenarios import ClassIncremental as ClassIncremental
    from proxreplay.data.scenarios import DomainIncremental as DomainIncremental
    from proxreplay.data.scenarios import Scenario as Scenario
    from proxreplay.data.streams import Stream as Stream
    from proxreplay.data.streams import Subset as Subset
    from proxreplay.data.streams import Task as Task
    from proxreplay.data.transforms import Transform as Transform
    from proxreplay.data.trees import image_tree as image_tree

_NAMES = {
    "arrays": "from_arrays from_npz from_torch_dataset",
    "catalog": "cifar10 cifar100 clear10 digits fashion_mnist mnist pacs tinyimagenet",
    "datasets": "Dataset Examples",
    "scenarios": "IID Blurry ClassIncremental DomainIncremental Scenario",
    "streams": "Stream Subset Task",
    "transforms": "Transform",
    "trees": "image_tree",
}
__all__ = " ".join(_NAMES.values()).split()
__getattr__ = lazy_names(__name__, _NAMES)
