"""channels_last is used where torch can be trusted with it, and nowhere else."""

import pytest
import torch
from torch import nn

from proxreplay import Learner
from proxreplay.models import slim_resnet18
from proxreplay.replay.placement import channels_last_is_safe

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("layer", "safe"),
    [
        (nn.Conv2d(4, 8, 1, stride=2), False),
        (nn.Conv2d(16, 8, 1, stride=2, groups=4), False),
        (nn.Conv2d(8, 16, 1, stride=2), True),
        (nn.Conv2d(4, 8, 1), True),
        (nn.Conv2d(4, 8, 3, stride=2), True),
    ],
    ids=["few channels", "few channels per group", "enough channels", "no stride", "3x3"],
)
def test_strided_1x1_convolutions_of_few_channels_are_kept_away(
    layer: nn.Conv2d, safe: bool
) -> None:
    assert channels_last_is_safe(nn.Sequential(layer), CPU) is safe
    assert channels_last_is_safe(nn.Sequential(layer), torch.device("meta"))


def test_a_narrow_resnet_learns_and_the_papers_one_is_channels_last() -> None:
    narrow = Learner(slim_resnet18(4, width=2))
    for _ in range(3):
        loss = narrow.learn(torch.randn(4, 3, 32, 32), torch.arange(4))
    assert loss.loss == loss.loss
    wide = Learner(slim_resnet18(4))
    last = [p for p in wide.model.parameters() if p.ndim == 4 and p.shape[2] > 1]
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in last)
