"""The memory that LPR keeps, against what ``plan`` says."""

import gc
import warnings

import torch

from benchmarks.network import images, network
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


def run() -> list[Claim]:
    model, x = network(), images(100)
    LPR(model, 4.0, 2.0).refresh(x)  # index tables are made once and for all
    lpr = LPR(model, 4.0, 2.0)
    plan = lpr.plan(x[:1], samples=2000)
    before = live()
    lpr.refresh(x)
    kept = live() - before
    return [
        Claim(
            "bytes that a refresh leaves behind / plan, at the most", kept / plan.bytes, "x", 1.1
        ),
        Claim("the same, at the least", kept / plan.bytes, "x", 0.9, at_least=True),
        Claim("megabytes that the plan says", plan.bytes / 1e6, ""),
    ]


if __name__ == "__main__":
    main("Memory use", run)
