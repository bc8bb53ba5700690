import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from proxreplay import EMA
from proxreplay.errors import InputError
from proxreplay.models.heads import GrowingHead
from proxreplay.models.networks import small_cnn
from proxreplay.options import PREDICTORS, AveragingOptions


def train_step(model: nn.Module, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    model.train()
    model(torch.randn(4, 1, 8, 8, generator=rng)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    model.zero_grad()


def step_weights(steps: int, momentum: float, start: str) -> list[float]:
    """The weight of the network before the first step and after each step, in the average."""
    weights = [1.0]
    for t in range(1, steps + 1):
        gain = 1 - momentum
        if start == "debiased":
            gain = max(gain, 5 / (5 + t - 1))
        weights = [*(w * (1 - gain) for w in weights), gain]
    return weights


@pytest.mark.parametrize("start", ["debiased", "copy"])
def test_every_floating_tensor_is_averaged_and_others_copied(start: str) -> None:
    """Against a twin in float64: the weighted sum of every network there was."""
    model = small_cnn(1, 3)
    ema = EMA(model, momentum=0.9, start=start)
    history = [copy.deepcopy(model.state_dict())]
    for seed in range(40):
        train_step(model, seed)
        ema.update_()
        history.append(copy.deepcopy(model.state_dict()))
    state = ema.model.state_dict()
    assert {"norm1.running_mean", "norm1.running_var", "norm1.num_batches_tracked"} <= set(state)
    assert state["norm1.num_batches_tracked"] == 40
    weights = step_weights(40, 0.9, start)
    for name, value in state.items():
        if value.is_floating_point():
            twin = sum(w * net[name].double() for w, net in zip(weights, history, strict=True))
            torch.testing.assert_close(value.double(), twin, rtol=1e-5, atol=1e-6)


@settings(deadline=None)
@given(steps=st.integers(1, 300), momentum=st.floats(0, 0.999))
def test_debiased_the_untrained_network_has_no_weight(steps: int, momentum: float) -> None:
    """A number that is 1 before the first step and t after step t shows each weight's sum."""
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(1e9)  # any trace of it would show
    ema = EMA(model, momentum)
    for t in range(1, steps + 1):
        with torch.no_grad():
            model.weight.fill_(float(t))
        ema.update_()
    weights = step_weights(steps, momentum, "debiased")
    assert sum(weights[1:]) == pytest.approx(1, abs=1e-12)
    expected = sum(w * t for t, w in enumerate(weights))
    assert ema.model.weight.item() == pytest.approx(expected, rel=1e-9)
    assert 1 <= ema.model.weight.item() <= steps


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
    ema = EMA(model, momentum=0.0, start="copy")
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


def test_the_online_network_has_more_weight_for_a_class_until_the_average_knows_it() -> None:
    """Against the definition: the share of the average from the steps since each class came."""
    ema = EMA(nn.Linear(1, 1), momentum=0.9)
    assert ema.weights(2).tolist() == [0, 0]
    ema.meet_([0, 1])
    for _ in range(50):
        ema.update_()
    before = ema.weights(2).tolist()
    assert before == pytest.approx([0.36 / 3 + 0.54 / 2] * 2)
    ema.meet_([1, 0])
    assert ema.weights(2).tolist() == before
    ema.meet_([1, 3])
    assert ema.weights(4).tolist() == pytest.approx([*before, before[0], 0.36 / 3])  # 2 never came
    for _ in range(7):
        ema.update_()
    known = sum(step_weights(57, 0.9, "debiased")[-7:])
    grown = 0.36 * 57 / 157
    old, new = grown + 0.54 * 57 / 107, grown + 0.54 * known * 7 / 57
    assert ema.weights(4).tolist() == pytest.approx([old, old, old, new])
    for _ in range(100_000 // 50):
        ema.update_()
    assert ema.weights(4).max() < 0.9


@pytest.mark.parametrize("start", ["debiased", "copy"])
def test_a_class_that_never_came_counts_as_there_from_the_start(start: str) -> None:
    told, untold = (EMA(nn.Linear(1, 1), momentum=0.9, start=start) for _ in range(2))
    told.meet_([0, 1, 2])
    for _ in range(9):
        told.update_()
        untold.update_()
    torch.testing.assert_close(untold.weights(3), told.weights(3))


@given(
    average=st.lists(st.floats(-50, 50), min_size=3, max_size=3),
    online=st.lists(st.floats(-50, 50), min_size=3, max_size=3),
    steps=st.integers(0, 12),
)
def test_both_and_blend_are_means_of_probabilities(
    average: list[float], online: list[float], steps: int
) -> None:
    ema = EMA(nn.Linear(1, 1))
    for step in range(steps):
        ema.meet_([step // 4])
        ema.update_()
    a, o = (torch.tensor([z], dtype=torch.float64) for z in (average, online))
    blend = ema.weights(3)
    for predict, weight in (("both", 0.5), ("blend", blend), ("average", 1), ("online", 0)):
        expected = weight * a.softmax(1) + (1 - weight) * o.softmax(1)
        found = ema.combined(a, o, predict).softmax(1)
        torch.testing.assert_close(found, expected / expected.sum(), rtol=1e-9, atol=1e-12)


def test_an_inactive_class_stays_out_of_the_race() -> None:
    ema = EMA(nn.Linear(1, 1))
    logits = torch.tensor([[1.0, -1000.0, 2.0]])
    for predict in PREDICTORS:
        probabilities = ema.combined(logits, logits, predict).softmax(1)
        assert probabilities[0, 1] == 0
        assert torch.isfinite(probabilities).all()


def test_state_goes_round() -> None:
    model = small_cnn(1)
    ema = EMA(model, momentum=0.9)
    model.head.grow(3)
    ema.meet_([2, 0])
    train_step(model, 0)
    ema.update_()
    twin = small_cnn(1)
    twin.load_state_dict(model.state_dict())
    other = EMA(twin, momentum=0.9)
    other.load_state_dict(ema.state_dict())
    for network, average in ((model, ema), (twin, other)):
        train_step(network, 1)
        average.meet_([0, 1])
        average.update_()
    assert torch.equal(other.weights(3), ema.weights(3))
    for a, b in zip(
        ema.model.state_dict().values(), other.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)


def test_the_state_of_a_version_that_knew_only_the_newest_class_is_taken() -> None:
    """Its blend had one weight for all classes, which stays until another class comes."""
    ema = EMA(nn.Linear(1, 1), momentum=0.9)
    ema.update_()
    saved = ema.state_dict() | {"steps": 60, "since": 10, "settled": 0.25, "classes": [0, 1]}
    del saved["arrived"]
    ema.load_state_dict(saved)
    weight = 0.36 * 60 / 160 + 0.54 * 0.25 * 10 / 60
    assert ema.weights(2).tolist() == pytest.approx([weight, weight])
    ema.meet_([2])
    ema.update_()
    assert ema.weights(3).argmin() == 2


def test_another_average_is_refused() -> None:
    state = EMA(nn.Linear(1, 1), momentum=0.9).state_dict()
    with pytest.raises(InputError, match=r"momentum=0.5.*made with.*momentum=0.9"):
        EMA(nn.Linear(1, 1), momentum=0.5).load_state_dict(state)
    with pytest.raises(InputError, match=r"start='copy'.*made with.*start='debiased'"):
        EMA(nn.Linear(1, 1), momentum=0.9, start="copy").load_state_dict(state)


def test_a_state_of_the_version_before_is_that_of_a_copy() -> None:
    model = nn.Linear(1, 1)
    state = {"momentum": 0.9, "model": {k: v + 1 for k, v in model.state_dict().items()}}
    ema = EMA(model, 0.9, start="copy", predict="average")
    ema.load_state_dict(state)
    assert torch.equal(ema.model.weight, model.weight + 1)
    with pytest.raises(InputError, match="start='copy'"):
        EMA(model, 0.9).load_state_dict(state)


@pytest.mark.parametrize(
    "options",
    [
        *({"momentum": m} for m in (-0.1, 1.0, float("nan"))),
        {"start": "zero"},
        {"predict": "best"},
    ],
    ids=str,
)
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(InputError, match=f"averaging.{next(iter(options))}"):
        EMA(nn.Linear(1, 1), **options)
    with pytest.raises(InputError, match=f"averaging.{next(iter(options))}"):
        AveragingOptions(**options)


def test_a_model_that_cannot_be_copied_is_refused_with_the_way_out() -> None:
    model = nn.Linear(1, 1)
    model.cached = model.weight * 2  # not a leaf: torch refuses to copy it
    with pytest.raises(InputError, match="averaging=None"):
        EMA(model)


def test_an_average_follows_replaced_tensors_and_refuses_a_changed_structure() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.append(model[0])  # shared: moved once
    ema = EMA(model, 0.5, start="copy")
    before = ema.model[0].weight.clone()
    model[0].weight = nn.Parameter(torch.ones(2, 2))
    model[1].register_buffer("running_mean", torch.full((2,), 4.0))
    ema.update_()
    torch.testing.assert_close(ema.model[0].weight, (before + 1) / 2)
    assert torch.equal(ema.model[1].running_mean, torch.full((2,), 2.0))
    model.append(nn.Linear(2, 2))
    with pytest.raises(InputError, match="gained or lost parameters or modules"):
        ema.update_()
