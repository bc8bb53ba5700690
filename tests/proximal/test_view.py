"""One update, five methods: each from the shared form and from its own definition, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from proxreplay import LPR, Batch
from proxreplay.errors import InputError
from proxreplay.proximal import AOP, GPM, OWM, SGP, AdaptiveAlpha, ProximalUpdate
from tests.reference import fill_gradients_, random


def rows_of(x):
    """The rows of a Linear with a bias."""
    return torch.cat([x, torch.ones(len(x), 1).double()], dim=1)


def gradient(layer):
    return torch.cat([layer.weight.grad, layer.bias.grad[:, None]], dim=1)


def preconditioned(rule, layer):
    """A random gradient before and after a rule."""
    fill_gradients_(layer)
    before = gradient(layer)
    rule.precondition_()
    return before, gradient(layer)


BATCHES = [random(6, 4, seed=i) for i in range(3)]


def lpr_shared(layer):
    rule = LPR(layer, omega_0=3.0, beta=1.0)
    rule.refresh(torch.cat(BATCHES))
    return rule, ProximalUpdate.lpr(rows_of(torch.cat(BATCHES)), 3.0 / 18)


def lpr_own():
    Z = rows_of(torch.cat(BATCHES))
    return torch.linalg.inv(torch.eye(5).double() + 3.0 / 18 * Z.T @ Z)


def owm_shared(layer):
    rule = OWM(layer, alpha=0.2)
    for x in BATCHES:
        rule.observe(Batch(x, torch.zeros(len(x), dtype=torch.int64)))
    means = torch.stack([rows_of(x).mean(0) for x in BATCHES])
    return rule, ProximalUpdate.owm(means, torch.full((3,), 0.2, dtype=torch.float64))


def owm_own():
    P = torch.eye(5).double()
    for x in BATCHES:
        r = rows_of(x).mean(0)
        k = P @ r
        P = P - torch.outer(k, k) / (0.2 + r @ k)
    return P


def aop_alpha(x):
    r = x.mean(0)
    return (torch.outer(r, r).mean() ** 2 + r.var()) ** 0.5


def aop_shared(layer):
    rule = AOP(layer, AdaptiveAlpha(lambda observed: 0.5))
    for x in BATCHES:
        rule.observe(Batch(x, torch.zeros(len(x), dtype=torch.int64)))
    means = torch.stack([rows_of(x).mean(0) for x in BATCHES])
    return rule, ProximalUpdate.owm(means, torch.stack([aop_alpha(x) for x in BATCHES]))


def aop_own():
    P = torch.eye(5).double()
    for x in BATCHES:
        r = rows_of(x).mean(0)
        k = P @ r
        P = P - torch.outer(k, k) / (aop_alpha(x) + r @ k)
    return P


def basis(energy=0.9):
    """GPM's: left singular vectors of the representation matrix, and their singular values."""
    U, s, _ = torch.linalg.svd(rows_of(torch.cat(BATCHES)).T, full_matrices=False)
    k = int((s.square().cumsum(0) < energy * s.square().sum()).sum()) + 1
    return U[:, :k], s[:k]


def gpm_shared(layer):
    rule = GPM(layer, 0.9)
    rule.refresh(torch.cat(BATCHES))
    return rule, ProximalUpdate.gpm(basis()[0].T)


def gpm_own():
    M, _ = basis()
    return torch.eye(5).double() - M @ M.T


def sgp_importance():
    _, s = basis()
    return 11 * s / (10 * s + s.max())


def sgp_shared(layer):
    rule = SGP(layer, 0.9, scale=10)
    rule.refresh(torch.cat(BATCHES))
    return rule, ProximalUpdate.sgp(basis()[0].T, sgp_importance())


def sgp_own():
    M, _ = basis()
    return torch.eye(5).double() - M @ torch.diag(sgp_importance()) @ M.T


METHODS = {
    "LPR": (lpr_shared, lpr_own),
    "OWM": (owm_shared, owm_own),
    "AOP": (aop_shared, aop_own),
    "GPM": (gpm_shared, gpm_own),
    "SGP": (sgp_shared, sgp_own),
}


@pytest.mark.parametrize("method", METHODS)
def test_shared_form_own_definition_and_rule_are_the_same_update(method):
    shared, own = METHODS[method]
    layer = nn.Linear(4, 3).double()
    rule, view = shared(layer)
    Lambda = own()
    torch.testing.assert_close(view.shrinkage(), Lambda, rtol=0, atol=1e-10)
    before, after = preconditioned(rule, layer)
    torch.testing.assert_close(after, before @ Lambda, rtol=0, atol=1e-10)
    torch.testing.assert_close(after, view.precondition(before), rtol=0, atol=1e-10)
    assert not torch.allclose(after, before)


@settings(deadline=None, max_examples=30)
@given(
    k=st.integers(0, 6),
    d=st.integers(1, 5),
    lr=st.floats(0.01, 10),
    seed=st.integers(0, 10**6),
)
def test_the_step_minimises_the_objective(k, d, lr, seed):
    view = ProximalUpdate(random(k, d, seed=seed), random(k, seed=seed + 1).abs() * 3)
    W_j, G = random(3, d, seed=seed + 2), random(3, d, seed=seed + 3)
    W = (W_j - lr * view.precondition(G)).requires_grad_()
    (slope,) = torch.autograd.grad(objective(view, W, W_j, G, lr), W)
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-9)
    elsewhere = W.detach() + 0.1 * random(3, d, seed=seed + 4)
    assert objective(view, elsewhere, W_j, G, lr) > objective(view, W, W_j, G, lr)


def objective(view, W, W_j, G, lr):
    """``<G, W> + ||W - W_j||^2 / (2 lr) + sum_m omega_m ||(W - W_j) m||^2 / (2 lr)``."""
    change = W - W_j
    held = (view.omega * (change @ view.M.mT).square().sum(dim=0)).sum()
    return (G * W).sum() + (change.square().sum() + held) / (2 * lr)


@settings(deadline=None, max_examples=30)
@given(hard=st.integers(1, 4), soft=st.integers(0, 3), seed=st.integers(0, 10**6))
def test_infinite_strength_is_the_limit_of_large_ones(hard, soft, seed):
    M = random(hard + soft, 5, seed=seed)
    finite = random(soft, seed=seed + 1).abs()
    exact = ProximalUpdate(M, torch.cat([torch.full((hard,), float("inf")).double(), finite]))
    near = ProximalUpdate(M, torch.cat([torch.full((hard,), 1e9).double(), finite]))
    torch.testing.assert_close(exact.shrinkage(), near.shrinkage(), rtol=0, atol=1e-4)
    untouched = exact.precondition(random(2, 5, seed=seed + 2)) @ M[:hard].T
    torch.testing.assert_close(untouched, torch.zeros_like(untouched), rtol=0, atol=1e-8)


def test_hard_rows_may_depend_on_each_other():
    M = torch.tensor([[1.0, 0, 0], [2, 0, 0], [1, 1, 0]]).double()
    Lambda = ProximalUpdate.gpm(M).shrinkage()
    torch.testing.assert_close(Lambda, torch.diag(torch.tensor([0.0, 0, 1]).double()))


def test_strength_and_importance_are_two_words_for_one_thing():
    f = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]).double()
    omega = ProximalUpdate.sgp(torch.eye(5).double(), f).omega
    assert omega.tolist() == pytest.approx([0, 1 / 3, 1, 3, float("inf")])
    closed = 1 - ProximalUpdate(torch.eye(5).double(), omega).shrinkage().diagonal()
    torch.testing.assert_close(closed, f)


@pytest.mark.parametrize(
    ("M", "omega"),
    [
        (torch.ones(3), torch.ones(3)),
        (torch.ones(3, 2), torch.ones(2)),
        (torch.ones(1, 2), torch.tensor([-1.0])),
        (torch.ones(1, 2), torch.tensor([float("nan")])),
    ],
    ids=["rows are a matrix", "one strength a row", "negative", "nan"],
)
def test_what_makes_no_sense_is_refused(M, omega):
    with pytest.raises(InputError, match="ProximalUpdate"):
        ProximalUpdate(M, omega)
