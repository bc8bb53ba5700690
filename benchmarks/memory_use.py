"""The memory that LPR keeps, against what ``plan`` says, and what a refresh takes at its peak."""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.network import forward, images, network
from benchmarks.timing import Claim, main
from proxreplay import LPR


def live() -> int:
    """Bytes of all tensors that somebody holds."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # isinstance wakes deprecated proxies inside torch
        tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


class Peak(TorchDispatchMode):
    """Follows every tensor that operations return; what they use inside is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr():
                self._take(tensor.untyped_storage())
        return out

    def _take(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def peak(function: Callable[[], object]) -> int:
    """Bytes of tensors made by a function that live at the same time, at the most."""
    with Peak() as watch:
        function()
    return watch.most


def run() -> list[Claim]:
    model, x = network(), images(100)
    LPR(model, 4.0, 2.0, tolerance=0).refresh(x)  # index tables are made once and for all
    lpr = LPR(model, 4.0, 2.0, tolerance=0)
    plan = lpr.cost(x[:1], samples=2000)
    before = live()
    lpr.refresh(x)
    kept = live() - before
    x = images(400)
    peaks = []
    for size in (20, 200):
        lpr.batch_size = size
        most = plan.bytes + peak(lambda: lpr.refresh(x))  # the factors in force stay until the end
        bare = peak(lambda size=size: forward(model, x, size))  # type: ignore[misc]
        peaks += [
            Claim(f"megabytes at the peak of a refresh, batches of {size}", most / 1e6, ""),
            Claim("of which a bare evaluation pass takes", bare / 1e6, ""),
        ]
    return [
        Claim(
            "bytes that a refresh leaves behind / plan, at the most", kept / plan.bytes, "x", 1.1
        ),
        Claim("the same, at the least", kept / plan.bytes, "x", 0.9, at_least=True),
        Claim("megabytes that the plan says", plan.bytes / 1e6, ""),
        Claim("megabytes on top that it says for a refresh", plan.refresh_bytes / 1e6, ""),
        *peaks,
    ]


if __name__ == "__main__":
    main("Memory use", run)
