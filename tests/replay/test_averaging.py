import copy

import pytest
import torch
from torch import nn

from proxreplay import EMA
from proxreplay.errors import InputError
from proxreplay.models.heads import GrowingHead
from proxreplay.models.networks import small_cnn


def train_step(model: nn.Module, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    model.train()
    model(torch.randn(4, 1, 8, 8, generator=rng)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    model.zero_grad()


def test_every_floating_tensor_is_averaged_and_others_copied() -> None:
    """Against a twin that averages one tensor at a time, in the formula's own order."""
    model = small_cnn(1, 3)
    ema = EMA(model, momentum=0.9)
    twin = {name: value.clone() for name, value in model.state_dict().items()}
    for seed in range(20):
        train_step(model, seed)
        ema.update_()
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                twin[name] = 0.9 * twin[name] + 0.1 * value
            else:
                twin[name] = value.clone()
    state = ema.model.state_dict()
    assert {"norm1.running_mean", "norm1.running_var", "norm1.num_batches_tracked"} <= set(state)
    assert state["norm1.num_batches_tracked"] == 20
    for name, value in twin.items():
        torch.testing.assert_close(state[name], value)


def test_starts_as_a_copy_and_shares_nothing() -> None:
    model = small_cnn(1, 3)
    ema = EMA(model)
    for a, b in zip(model.state_dict().values(), ema.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr()
    assert not any(p.requires_grad for p in ema.model.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_momentum_zero_is_the_model_itself() -> None:
    model = small_cnn(1, 3)
    ema = EMA(model, momentum=0.0)
    train_step(model, 0)
    ema.update_()
    for a, b in zip(model.state_dict().values(), ema.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


def test_head_growth_copies_the_rows_of_the_model() -> None:
    model = small_cnn(1)
    head = model.head
    assert isinstance(head, GrowingHead)
    head.grow(2)
    head.activate(torch.tensor([0, 1]))
    ema = EMA(model, momentum=0.9)
    train_step(model, 0)
    ema.update_()
    old = copy.deepcopy(ema.model.head.weight)
    head.grow(4)
    head.activate(torch.tensor([3]))
    ema.follow_growth_()
    assert torch.equal(ema.model.head.weight[:2], old)
    assert torch.equal(ema.model.head.weight[2:], head.weight[2:])
    assert torch.equal(ema.model.head.active, head.active)
    train_step(model, 1)
    ema.update_()
    assert ema.model(torch.randn(2, 1, 8, 8)).shape == (2, 4)


def test_update_alone_follows_growth() -> None:
    model = small_cnn(1)
    ema = EMA(model)
    model.head.grow(3)
    ema.update_()
    torch.testing.assert_close(ema.model.head.weight, model.head.weight)


def test_state_goes_round() -> None:
    model = small_cnn(1)
    ema = EMA(model, momentum=0.9)
    model.head.grow(3)
    train_step(model, 0)
    ema.update_()
    other = EMA(small_cnn(1), momentum=0.9)
    other.load_state_dict(ema.state_dict())
    for a, b in zip(
        ema.model.state_dict().values(), other.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)
    with pytest.raises(InputError, match=r"momentum=0.5.*made with 0.9"):
        EMA(model, momentum=0.5).load_state_dict(ema.state_dict())


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_momentum_is_checked(momentum: float) -> None:
    with pytest.raises(InputError, match="momentum"):
        EMA(nn.Linear(1, 1), momentum)
