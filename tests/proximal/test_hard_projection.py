"""The paper's Appendix B: hard projection closes the way of the replay gradient, LPR does not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from proxreplay import LPR
from proxreplay.proximal import GPM
from tests.reference import flat_gradient, random


def replay_gradient_left(rule_of, remembered):
    """The share of the replay gradient's norm that a rule made from ``remembered`` inputs leaves.

    The replay batch is the same for every rule: the first ten examples of the memory.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5)
    )
    model.double()
    rule = rule_of(model)
    rule.refresh(remembered)
    labels = torch.arange(10) % 5
    F.cross_entropy(model(random(200, 32)[:10]), labels).backward()
    before = flat_gradient(model).norm()
    rule.precondition_()
    return round(float(flat_gradient(model).norm() / before), 9)  # rounding errors are none


SIZES = [1, 5, 10, 20, 33]


def hard(model):
    return GPM(model, 1.0)


def test_with_the_hard_projection_it_vanishes_as_the_basis_grows():
    left = [replay_gradient_left(hard, random(200, 32)[:n]) for n in SIZES]
    assert left == sorted(left, reverse=True)
    assert left[0] > 0.3
    assert left[2] < 1e-6  # its own ten examples are in the basis
    # What other examples put into the basis is enough, too.
    others = [replay_gradient_left(hard, random(200, 32)[50 : 50 + n]) for n in SIZES]
    assert others == sorted(others, reverse=True)
    assert others[2] > 0.3
    assert others[-1] < 1e-6


@pytest.mark.parametrize("omega_0", [0.25, 1.0, 4.0])
def test_with_lpr_it_does_not(omega_0):
    left = [replay_gradient_left(lambda m: LPR(m, omega_0), random(200, 32)[:n]) for n in SIZES]
    whole = replay_gradient_left(lambda m: LPR(m, omega_0), random(200, 32))
    assert min(*left, whole) > 0.1
    assert whole == pytest.approx(left[-1], rel=0.25)


@pytest.mark.parametrize("energy", [0.5, 0.8, 0.95, 0.99])
def test_what_is_left_is_the_part_outside_the_basis(energy):
    """``G (I - M M') = V' R`` with ``R`` the residual of the rows; both computed on their own."""
    layer = nn.Linear(8, 3, bias=False).double()
    Z = random(40, 8) @ torch.diag(0.6 ** torch.arange(8)).double()
    gpm = GPM(layer, energy)
    gpm.refresh(Z)
    output = layer(Z[:6])
    V = random(6, 3)
    output.backward(V)
    gpm.precondition_()
    M = gpm.state_dict()["layers"][""]["factor"]["U"][0]
    residual = Z[:6] - Z[:6] @ M @ M.T
    torch.testing.assert_close(layer.weight.grad, V.T @ residual)
    assert residual.norm() ** 2 < (1 - energy) * Z.norm() ** 2
