"""A step that cannot be made is refused by name and leaves the learner as it was before it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from proxreplay import LPR, Batch, ClassBalancedMemory, Learner, derpp, er, er_ace
from proxreplay.errors import DivergenceError, InputError
from proxreplay.models import mlp, small_cnn
from proxreplay.proximal import AGEM, OWM
from proxreplay.replay.losses import Loss
from tests.reference import assert_same_state

RULES: dict[str, Any] = {"none": lambda model: None, "lpr": LPR, "agem": AGEM, "owm": OWM}
Y = torch.tensor([0, 1, 2, 0])


def images(scale: float = 1.0) -> Tensor:
    return scale * torch.randn(4, 1, 5, 5, generator=torch.Generator().manual_seed(1))


def begun(rule: Any, **options: Any) -> Learner:
    model = nn.Sequential(nn.Dropout(0.1), small_cnn(1, widths=(3, 4)))
    learner = Learner(model, ClassBalancedMemory(8), rule(model), refresh_every=1, **options)
    learner.learn(images(), Y)
    return learner


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_huge_inputs_change_nothing(rule: Any) -> None:
    learner = begun(rule)
    before = learner.state_dict()
    with pytest.raises(DivergenceError, match=r"running_var' is not finite; the step was not made"):
        learner.learn(images(1e37), Y)
    assert_same_state(learner.state_dict(), before)
    assert torch.isfinite(torch.tensor(learner.learn(images(), Y).loss))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_gradient_that_is_not_finite_is_named(rule: Any) -> None:
    """The loss is finite; only its gradient is not (the root of 0)."""

    def loss(model: nn.Module, incoming: Batch, replay: Batch | None) -> Tensor:
        return er(model, incoming, replay) + (model[1].conv1.weight * switch).sum().sqrt()

    switch = torch.tensor(1.0)
    learner = begun(lambda model: None, loss=er)
    learner._watched_loss = loss
    learner.rule = rule(learner.model)
    switch.zero_()
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    with pytest.raises(DivergenceError, match=r"'1.conv1.weight' is not finite"):
        learner.learn(images(), Y)
    assert all(torch.equal(v, before[n]) for n, v in learner.model.state_dict().items())


def test_a_rate_that_is_too_large_ends_in_the_named_error() -> None:
    learner = Learner(mlp(3), lr=1e10)
    with pytest.raises(DivergenceError):
        learner.learn_stream((torch.randn(4, 3), Y) for _ in range(20))
    assert all(bool(p.isfinite().all()) for p in learner.model.parameters())


def norm_first() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(3), mlp(3, hidden=(4,)))


@pytest.mark.parametrize("loss", [er, er_ace, derpp], ids=["er", "er_ace", "derpp"])
def test_a_first_batch_of_one_with_batchnorm_changes_nothing(loss: Loss) -> None:
    learner = Learner(norm_first(), loss=loss)
    before = learner.state_dict()
    with pytest.raises(InputError, match="BatchNorm cannot be trained on one example"):
        learner.learn(torch.randn(1, 3), [0])
    assert_same_state(learner.state_dict(), before)
    learner.learn(torch.randn(4, 3), Y)


@pytest.mark.parametrize("loss", [er_ace, derpp], ids=["er_ace", "derpp"])
def test_a_later_batch_of_one_is_refused_where_it_is_run_alone(loss: Loss) -> None:
    learner = Learner(norm_first(), loss=loss)
    learner.learn(torch.randn(4, 3), Y)
    before = learner.state_dict()
    with pytest.raises(InputError, match="BatchNorm"):
        learner.learn(torch.randn(1, 3), [5])
    assert_same_state(learner.state_dict(), before)


def test_a_batch_of_one_is_learned_where_it_can_be() -> None:
    joined = Learner(norm_first())
    joined.learn(torch.randn(4, 3), Y)
    joined.learn(torch.randn(1, 3), [0])
    positions = Learner(small_cnn(1, widths=(3, 4)), loss=er_ace)  # 25 values per channel
    positions.learn(images()[:1], [0])
    positions.learn(images()[0], 1)  # one example without a dimension of examples
    assert positions.batches_learned == 2


def test_a_loss_of_ones_own_that_runs_one_example_alone() -> None:
    def alone(model: nn.Module, incoming: Batch, replay: Batch | None) -> Tensor:
        return er(model, incoming, None)

    learner = Learner(norm_first(), loss=alone)
    learner.learn(torch.randn(4, 3), Y)
    before = learner.state_dict()
    with pytest.raises(InputError, match="BatchNorm"):
        learner.learn(torch.randn(1, 3), [0])
    assert_same_state(learner.state_dict(), before)


def test_large_gradients_and_infinite_masks_are_no_divergence() -> None:
    def loss(model: nn.Module, incoming: Batch, replay: Batch | None) -> Tensor:
        return 1e25 * er(model, incoming, replay)  # the norm overflows, no gradient does

    model = mlp(3, hidden=(4,))
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    Learner(model, loss=loss, lr=1e-30).learn(torch.randn(4, 3), Y)
