"""Wide layers with few rows: the factor from the rows is the one from the Gram matrix."""

import math

import pytest
import torch
from torch import Tensor, nn

from proxreplay import LPR, KroneckerLPR
from proxreplay.options import StepOptions
from proxreplay.proximal.shrinkage.forms import DenseShrinkage, shrinkage_from_state
from proxreplay.proximal.shrinkage.inverse import dense_inverse_
from proxreplay.proximal.shrinkage.rowspace import RowShrinkage, row_inverse
from proxreplay.proximal.shrinkage.twosided import SidesShrinkage
from proxreplay.proximal.statistics.decay import Aged, aged
from proxreplay.proximal.statistics.few import FewRows, most_rows
from proxreplay.proximal.statistics.statistic import Statistic

D = 600


def rows(n: int, seed: int = 0, d: int = D) -> Tensor:
    return torch.randn(1, n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def few(n: int, seed: int = 0) -> FewRows:
    one = FewRows.of(rows(n, seed), D)
    one.samples = n
    return one


def network(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 8, bias=bias), nn.ReLU(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("omega", [0.0, 0.01, 3.0, 1e5], ids=str)
def test_the_inverse_from_rows_is_the_dense_one(omega: float) -> None:
    Z, M = rows(7, d=30), rows(4, seed=1, d=30)
    P = torch.eye(30, dtype=torch.float64) + omega * Z.mT @ Z
    Lambda = torch.linalg.inv(P)
    made = row_inverse(Z, omega)
    torch.testing.assert_close(made.apply(M), M @ Lambda, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made.taken(M), M - M @ Lambda, rtol=1e-6, atol=1e-6)
    changed = M.clone()
    made.apply_(changed)
    torch.testing.assert_close(changed, made.apply(M))


def test_rows_that_repeat_each_other_can_be_inverted_at_any_strength() -> None:
    Z = rows(3, d=20).float().repeat(1, 4, 1)
    made = row_inverse(Z, 1e12).apply(Z)
    assert made.isfinite().all()
    assert made.abs().max() < 0.02  # next to nothing is left of what is held in place


def test_restricted_to_some_columns() -> None:
    Z, M, kept = rows(7, d=30), rows(4, seed=1, d=30), torch.arange(2, 28)
    dense = DenseShrinkage(dense_inverse_(Z.mT @ Z, 0.7)).restricted(kept)
    own = row_inverse(Z, 0.7).restricted(kept)
    torch.testing.assert_close(own.apply(M[:, :, kept]), dense.apply(M[:, :, kept]))


def test_it_is_made_again_from_its_state() -> None:
    made = row_inverse(rows(5), 0.5)
    again = shrinkage_from_state(made.state())
    assert isinstance(again, RowShrinkage)
    assert torch.equal(again.Wt, made.Wt)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("omega_0", [None, 4.0], ids=["own strength", "omega_0"])
@pytest.mark.parametrize("rolling", [0.0, 0.5], ids=["newest", "rolling"])
def test_a_refresh_from_few_rows_is_the_exact_one(
    bias: bool, omega_0: float | None, rolling: float
) -> None:
    model = network(bias)
    fast = LPR(model, omega_0, rolling=rolling, batch_size=20)
    slow = LPR(model, omega_0, rolling=rolling, tolerance=0.0)
    for seed in (1, 2):
        fast.refresh(rows(50, seed)[0])
        slow.refresh(rows(50, seed)[0])
    assert isinstance(fast.shrinkage("0"), RowShrinkage)
    assert isinstance(slow.shrinkage("0"), DenseShrinkage)
    M = rows(3, 9, D + bias)
    torch.testing.assert_close(fast.shrinkage("0").apply(M), slow.shrinkage("0").apply(M))


def test_many_rows_are_added_up() -> None:
    model = network()
    lpr = LPR(model, 4.0, batch_size=30)
    lpr.refresh(rows(most_rows(D + 1) + 1)[0])
    exact = LPR(model, 4.0, tolerance=0.0)
    exact.refresh(rows(most_rows(D + 1) + 1)[0])
    M = rows(3, 9, D + 1)
    assert not isinstance(lpr.shrinkage("0"), RowShrinkage)
    error = lpr.shrinkage("0").apply(M) - exact.shrinkage("0").apply(M)
    assert error.norm() <= 0.05 * M.norm()


def test_an_average_of_rows_is_that_of_their_gram_matrices() -> None:
    one, two = few(20, 1), few(30, 2)
    both = aged(aged(None, one, 0.6), two, 0.6)
    dense = aged(aged(None, one.dense(), 0.6), two.dense(), 0.6)
    assert isinstance(both.mean, FewRows)
    assert isinstance(dense.mean, Statistic)
    torch.testing.assert_close(both.mean.dense().G, dense.mean.G)
    assert both.weight == dense.weight
    again = Aged.from_state(both.state())
    assert isinstance(again.mean, FewRows)
    assert torch.equal(again.mean.B, both.mean.B)


def test_an_average_lets_the_oldest_rows_go_and_keeps_the_trace() -> None:
    most = most_rows(D)
    one, two = few(most, 1), few(20, 2)
    both = aged(aged(None, one, 0.5), two, 0.5).mean
    dense = aged(aged(None, one.dense(), 0.5), two.dense(), 0.5).mean
    assert isinstance(both, FewRows)
    assert isinstance(dense, Statistic)
    assert both.B.shape[1] == most
    torch.testing.assert_close(both.B.square().sum(), dense.G.diagonal(dim1=1, dim2=2).sum())


def test_rows_join_an_average_of_gram_matrices() -> None:
    joined = aged(aged(None, few(9, 1).dense(), 0.5), few(9, 2), 0.5).mean
    dense = aged(aged(None, few(9, 1).dense(), 0.5), few(9, 2).dense(), 0.5).mean
    assert isinstance(joined, Statistic)
    assert isinstance(dense, Statistic)
    torch.testing.assert_close(joined.G, dense.G)


def test_rows_that_are_not_finite_are_refused() -> None:
    lpr = LPR(network())
    bad = rows(20)[0]
    bad[3, 5] = float("nan")
    with pytest.raises(Exception, match="not finite"):
        lpr.refresh(bad)


def test_the_two_sided_rule_has_both_sides_of_a_layer_with_few_rows() -> None:
    """By steps on 20 rows of 600 columns, against one that adds Gram matrices up."""
    made = {}
    for tolerance in (0.05, 0.0):
        model = network()
        rule = KroneckerLPR(model, tolerance=tolerance, steps=StepOptions(1, 2, 0.5, 1.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rule.attach(optimizer)
        for seed in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows(20, seed)[0]), torch.arange(20) % 3).backward()
            optimizer.step()
        made[tolerance] = rule
    fast, slow = made[0.05].shrinkage("0"), made[0.0].shrinkage("0")
    assert not made[0.05].one_sided
    assert isinstance(fast, SidesShrinkage)
    assert isinstance(fast.right, RowShrinkage)
    M = rows(8, 9, D + 1)
    torch.testing.assert_close(fast.apply(M), slow.apply(M))
    again = network()
    rule = KroneckerLPR(again, steps=StepOptions(1, 2, 0.5, 1.0))
    rule.load_state_dict(made[0.05].state_dict())
    assert torch.equal(rule.shrinkage("0").apply(M), fast.apply(M))


def test_a_refresh_is_due_when_the_steps_have_paid_for_it() -> None:
    """By hand: 3 (600 8 + 8 3) per example and step; see `counted_work` for a refresh."""
    model = network()
    lpr = LPR(model)
    assert lpr.due(20)  # nothing is known yet
    lpr.refresh(rows(50)[0])
    step = 3 * (D * 8 + 8 * 3)
    refresh = 50 * (D * 8 + 8 * 3) + 50**2 * (D + 1) + 50 * 9**2 / 2 + 9**3
    enough = math.ceil(refresh / (lpr.work * 20 * step))
    assert enough > 1
    lpr._pace.steps = enough - 1
    assert not lpr.due(20)
    lpr._pace.steps = enough
    assert lpr.due(20)
    lpr._pace.steps = 0
    again = LPR(model)
    again.load_state_dict(lpr.state_dict())
    assert not again.due(20)
    assert LPR(model, work=0.0).due(20)
    for always in (LPR(model, 4.0), LPR(model, tolerance=0.0)):
        always.refresh(rows(50)[0])
        assert always.due(20)
