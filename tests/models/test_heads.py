import pytest
import torch
from torch import nn
from torch.nn import functional as F

from proxreplay.models.heads import (
    INACTIVE_LOGIT,
    GrowingHead,
    make_head,
    replace_in_optimizer_,
)


def test_growing_keeps_rows_and_draws_new_ones_from_the_generator() -> None:
    head = GrowingHead(4)
    old = head.weight.clone(), head.bias.clone()
    assert head.grow(3, torch.Generator().manual_seed(0))
    assert torch.equal(head.weight[:1], old[0])
    assert torch.equal(head.bias[:1], old[1])
    again = GrowingHead(4)
    again.grow(3, torch.Generator().manual_seed(0))
    assert torch.equal(head.weight[1:], again.weight[1:])
    assert (head.weight.abs() <= 0.5).all()


def test_never_shrinks() -> None:
    head = GrowingHead(4)
    head.grow(3)
    weight = head.weight
    assert not head.grow(2)
    assert head.weight is weight


def test_only_learned_labels_are_active() -> None:
    head = GrowingHead(4)
    head.grow(6)
    head.activate(torch.tensor([4, 1]))
    logits = head(torch.randn(3, 4))
    assert (logits[:, [0, 2, 3, 5]] == INACTIVE_LOGIT).all()
    assert (logits[:, [1, 4]].abs() < 100).all()
    logits[:, [0, 2, 3, 5]].sum().backward()
    assert torch.equal(head.weight.grad, torch.zeros_like(head.weight))


@pytest.mark.parametrize("size", [1, 2, 5], ids="to size {}".format)
def test_loads_a_head_of_any_size(size: int) -> None:
    source, target = GrowingHead(4), GrowingHead(4)
    target.grow(2)
    source.grow(size)
    source.activate(torch.tensor([size - 1]))
    target.load_state_dict(source.state_dict())
    x = torch.randn(3, 4)
    assert target.out_features == size
    assert torch.equal(target(x), source(x))


def test_grow_like_copies_the_further_rows() -> None:
    head, other = GrowingHead(4), GrowingHead(4)
    other.grow(3)
    other.activate(torch.tensor([2]))
    first = head.weight[0].clone()
    head.grow_like(other)
    assert torch.equal(head.weight[0], first)
    assert torch.equal(head.weight[1:], other.weight[1:])
    assert head.active.tolist() == [False, False, True]


def test_a_frozen_head_stays_frozen() -> None:
    head = GrowingHead(4).requires_grad_(False)
    head.grow(3)
    assert not head.weight.requires_grad


OPTIMIZERS = {
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_state_grows_with_zeros(make) -> None:
    """A head that grew takes the step of one that always had the new rows, without gradients."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 0, 1])
    head = GrowingHead(4)
    head.grow(2)
    head.activate(torch.tensor([0, 1]))
    optimizer = make(head.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(head(x), y).backward()
        optimizer.step()
    old = list(head.parameters())
    before = [{k: v.clone() for k, v in optimizer.state[p].items() if k != "step"} for p in old]
    head.grow(5)
    replace_in_optimizer_(optimizer, old, list(head.parameters()))
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
        id(p) for p in head.parameters()
    ]
    assert not any(p in optimizer.state for p in old)
    for saved, parameter in zip(before, head.parameters(), strict=True):
        for name, value in saved.items():
            grown = optimizer.state[parameter][name]
            assert torch.equal(grown[:2], value)
            assert torch.equal(grown[2:], torch.zeros_like(grown[2:]))
    head.activate(torch.tensor([4]))
    optimizer.zero_grad()
    F.cross_entropy(head(x), y).backward()
    optimizer.step()


def test_make_head() -> None:
    assert isinstance(make_head(4, None), GrowingHead)
    assert type(make_head(4, 7)) is nn.Linear
