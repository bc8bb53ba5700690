"""Data sets, transforms and streams."""

from proxreplay.data.arrays import from_arrays, from_npz, from_torch_dataset
from proxreplay.data.bundled import digits
from proxreplay.data.cifar import cifar10, cifar100
from proxreplay.data.clear import clear10
from proxreplay.data.datasets import Dataset, Examples
from proxreplay.data.idx import fashion_mnist, mnist
from proxreplay.data.scenarios import (
    IID,
    Blurry,
    ClassIncremental,
    DomainIncremental,
    Scenario,
    blurry,
    class_incremental,
    domain_incremental,
    iid,
)
from proxreplay.data.streams import Stream, Subset, Task
from proxreplay.data.tiny_imagenet import tinyimagenet
from proxreplay.data.transforms import Transform
from proxreplay.data.trees import image_tree, pacs

__all__ = [
    "IID",
    "Blurry",
    "ClassIncremental",
    "Dataset",
    "DomainIncremental",
    "Examples",
    "Scenario",
    "Stream",
    "Subset",
    "Task",
    "Transform",
    "blurry",
    "cifar10",
    "cifar100",
    "class_incremental",
    "clear10",
    "digits",
    "domain_incremental",
    "fashion_mnist",
    "from_arrays",
    "from_npz",
    "from_torch_dataset",
    "iid",
    "image_tree",
    "mnist",
    "pacs",
    "tinyimagenet",
]
