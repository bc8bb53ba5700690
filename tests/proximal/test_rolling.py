"""Statistics that age, against the moving average written out."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from proxreplay import LPR
from proxreplay.errors import InputError, RefreshError
from tests.reference import assert_same_state, fill_gradients_, flat_gradient, random


def lambda_of(lpr, name=""):
    return lpr.shrinkage(name).Lambda[0]


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    rolling=st.floats(0.05, 0.95),
    omega_0=st.floats(0.1, 10),
)
def test_the_gram_is_the_weighted_mean_over_refreshes_of_the_one_per_example(
    sizes, rolling, omega_0
):
    layer = nn.Linear(3, 2, bias=False).double()
    lpr = LPR(layer, omega_0, rolling=rolling)
    parts = [random(n, 3, seed=i) for i, n in enumerate(sizes)]
    for x in parts:
        lpr.refresh(x)
    weights = [rolling ** (len(parts) - 1 - i) for i in range(len(parts))]
    mean = sum(w * x.T @ x / len(x) for w, x in zip(weights, parts, strict=True)) / sum(weights)
    expected = torch.linalg.inv(torch.eye(3, dtype=torch.float64) + omega_0 * mean)
    torch.testing.assert_close(lambda_of(lpr), expected, rtol=0, atol=1e-10)


def test_positions_age_too():
    layer = nn.Linear(3, 2).double()
    lpr = LPR(layer, beta=1.0, rolling=0.5)
    lpr.refresh(random(4, 2, 3))  # two rows per example
    lpr.refresh(random(4, 5, 3))
    assert lpr.layers[""].positions == pytest.approx((0.5 * 2 + 5) / 1.5)


def test_the_same_inputs_again_change_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
    model.double()
    rolling, exact = LPR(model, rolling=0.7), LPR(model)
    x = random(5, 2, 4, 4)
    exact.refresh(x)
    for _ in range(3):
        rolling.refresh(x)
    for name in exact.layers:
        torch.testing.assert_close(lambda_of(rolling, name), lambda_of(exact, name))


@settings(deadline=None, max_examples=25)
@given(
    seen=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 20)), min_size=1, max_size=5),
    rolling=st.floats(0.05, 0.95),
)
def test_a_part_counts_by_its_share_of_the_memory_if_that_is_more(seen, rolling):
    layer = nn.Linear(3, 2, bias=False).double()
    lpr = LPR(layer, 1.0, rolling=rolling)
    parts = [random(n, 3, seed=i) for i, (n, _) in enumerate(seen)]
    weights: list[float] = []
    for x, (n, others) in zip(parts, seen, strict=True):
        lpr.refresh(x, n + others)
        counts = max(1 - rolling, n / (n + others))
        weights = [w * (1 - counts) for w in weights] + [counts]
    mean = sum(w * x.T @ x / len(x) for w, x in zip(weights, parts, strict=True)) / sum(weights)
    expected = torch.linalg.inv(torch.eye(3, dtype=torch.float64) + mean)
    torch.testing.assert_close(lambda_of(lpr), expected, rtol=0, atol=1e-10)


def test_parts_that_are_everything_are_exact():
    layer = nn.Linear(3, 2)
    lpr, fresh = LPR(layer, rolling=0.8), LPR(layer)
    for seed in range(3):
        x = random(7, 3, seed=seed).float()
        lpr.refresh(x, 7)
        fresh.refresh(x)
        torch.testing.assert_close(lambda_of(lpr), lambda_of(fresh))


@pytest.mark.parametrize("of", [0, -3])
def test_a_part_of_nothing_is_refused(of):
    lpr = LPR(nn.Linear(2, 2), rolling=0.5)
    with pytest.raises(InputError, match=f"of={of}"):
        lpr.refresh(torch.randn(3, 2), of)
    assert not lpr.layers


def test_zero_makes_everything_anew_and_keeps_nothing():
    layer = nn.Linear(3, 2)
    lpr, fresh = LPR(layer, rolling=0.0), LPR(layer)
    lpr.refresh(torch.randn(4, 3))
    x = torch.randn(5, 3)
    lpr.refresh(x)
    fresh.refresh(x)
    assert torch.equal(lambda_of(lpr), lambda_of(fresh))
    assert "history" not in lpr.state_dict()


def test_a_saved_rule_goes_on_exactly():
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    first, x = LPR(layer, rolling=0.8), torch.randn(3, 6, 4)
    first.refresh(x[0])
    second = LPR(layer, rolling=0.8)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for lpr in (first, second):
        lpr.refresh(x[1])
        lpr.refresh(x[2])
    assert_same_state(first.state_dict(), second.state_dict())


def test_a_refresh_that_fails_leaves_the_history_alone():
    layer = nn.Linear(2, 1)
    lpr = LPR(layer, rolling=0.8)
    lpr.refresh(torch.randn(4, 2))
    before = copy.deepcopy(lpr.state_dict())
    with pytest.raises(RefreshError):
        lpr.refresh(torch.full((4, 2), float("nan")))
    assert_same_state(lpr.state_dict(), before)


def test_a_failure_while_factors_are_made_leaves_the_history_alone(monkeypatch):
    layer = nn.Linear(2, 1)
    lpr = LPR(layer, rolling=0.8)
    lpr.refresh(torch.randn(4, 2))
    before = copy.deepcopy(lpr.state_dict())
    monkeypatch.setattr("proxreplay.proximal.shrinkage.choose.dense_inverse_", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lpr.refresh(torch.randn(4, 2))
    assert_same_state(lpr.state_dict(), before)


def test_a_layer_that_has_changed_its_columns_starts_again():
    model = nn.Sequential(nn.Linear(3, 2))
    lpr = LPR(model, rolling=0.8)
    lpr.refresh(torch.randn(4, 3))
    model[0] = nn.Linear(5, 2)
    x = torch.randn(4, 5)
    lpr.refresh(x)
    fresh = LPR(model)
    fresh.refresh(x)
    torch.testing.assert_close(lambda_of(lpr, "0"), lambda_of(fresh, "0"))


def test_a_tied_embedding_ages_too():
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 3)
            self.out = nn.Linear(3, 5, bias=False)
            self.out.weight = self.table.weight

        def forward(self, tokens):
            return self.out(self.table(tokens))

    model = Tied().double()
    rolling, exact = LPR(model, rolling=0.6), LPR(model)
    tokens = torch.tensor([[0, 1, 1], [4, 1, 2]])
    exact.refresh(tokens)
    for _ in range(2):
        rolling.refresh(tokens)
    fill_gradients_(model)
    exact.precondition_()
    expected = flat_gradient(model)
    fill_gradients_(model)
    rolling.precondition_()
    torch.testing.assert_close(flat_gradient(model), expected)


@pytest.mark.parametrize("rolling", [-0.1, 1.0, float("nan")])
def test_it_is_checked(rolling):
    with pytest.raises(InputError, match="rolling"):
        LPR(nn.Linear(2, 2), rolling=rolling)


def test_the_cost_counts_what_is_remembered():
    layer = nn.Linear(9, 2)
    x = torch.randn(5, 9)
    for rolling, times in ((0.0, 1), (0.5, 2)):
        lpr = LPR(layer, rolling=rolling)
        lpr.refresh(x)
        held = [one.bytes for one in lpr.layers.values()]
        held += [one["G"].nbytes for one in lpr.state_dict().get("history", {}).values()]
        assert lpr.cost(x).bytes == sum(held) == times * 4 * 10 * 10


@settings(deadline=None, max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    rolling=st.floats(0.05, 0.95),
    seed=st.integers(0, 99),
)
def test_layers_too_wide_for_a_gram_age_like_the_others(sizes, rolling, seed):
    """The sketch keeps what few rows span, so both are the same; dense is the truth."""
    layer = nn.Linear(40, 2).double()
    wide = LPR(layer, 3.0, rolling=rolling, max_dim=39, tolerance=1e-9)
    dense = LPR(layer, 3.0, rolling=rolling)
    for i, n in enumerate(sizes):
        x = random(n, 40, seed=seed + i)
        wide.refresh(x)
        dense.refresh(x)
    made = wide.shrinkage("").apply(torch.eye(41, dtype=torch.float64)[None])[0]
    torch.testing.assert_close(made, lambda_of(dense), rtol=0, atol=1e-7)
    again = LPR(layer, 3.0, rolling=rolling, max_dim=39, tolerance=1e-9)
    again.load_state_dict(copy.deepcopy(wide.state_dict()))
    for lpr in (wide, again):
        lpr.refresh(random(3, 40, seed=7))
    assert_same_state(wide.state_dict(), again.state_dict())
