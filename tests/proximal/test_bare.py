"""Parameters without a layer: followed through the forward pass, compared with Jacobians."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from proxreplay import LPR
from proxreplay.proximal import OWM
from tests.reference import (
    assert_same_state,
    fill_gradients_,
    flat_gradient,
    jacobian,
    random,
    shake_,
    trained,
)

OMEGA_0, BETA = 1.7, 1.3


class Bare(nn.Module):
    """A module with parameters ``a`` and perhaps ``b``, whose output is linear in each."""

    def __init__(self, use, a, b=None):
        super().__init__()
        self.use = use
        self.a = nn.Parameter(torch.zeros(a))
        self.b = None if b is None else nn.Parameter(torch.zeros(b))

    def forward(self, x):
        return self.use(self, x)


def joined(m, x):
    """As a vision transformer does it: a class token in front, positions on top."""
    return torch.cat((m.a.expand(len(x), -1, -1), x), dim=1) + m.b


def one_by_one(m, x):
    """Tokens of two kinds, first put together, then with the data."""
    both = torch.cat([m.a[:, :1], m.b, m.a[:, 1:]], dim=1)
    return torch.cat([both.repeat(len(x), 1, 1), x], dim=1)


def masked(m, x):
    mask = (x[:, :, :1] > 0).type_as(m.a)
    return x * (1.0 - mask) + m.a.expand(len(x), x.shape[1], -1) * mask


def in_two_ways(m, x):
    scale, shift = m.a.chunk(2)
    return torch.cat([x + shift, scale * x], dim=1)


CASES = {
    "class token and positions": (joined, (1, 1, 3), (1, 5, 3)),
    "a vector added everywhere": (lambda m, x: x + m.a, (3,), None),
    "cut positions": (lambda m, x: x + m.a[:, : x.shape[1]], (1, 9, 3), None),
    "picked positions": (lambda m, x: x + m.a[torch.tensor([0, 2, 2, 5])], (6, 3), None),
    "positions turned round": (lambda m, x: x + m.a.T[None], (3, 4), None),
    "the positions of the class token": (
        lambda m, x: torch.cat([(m.a + m.b[:, :1]).expand(len(x), -1, -1), x + m.b[:, 1:]], 1),
        (1, 1, 3),
        (1, 5, 3),
    ),
    "several tokens": (one_by_one, (1, 2, 3), (1, 1, 3)),
    "stacked": (lambda m, x: torch.stack([x, m.a.expand_as(x)]), (4, 3), None),
    "subtracted": (lambda m, x: m.a - x, (4, 3), None),
    "layer scale": (lambda m, x: m.a * x, (3,), None),
    "scale and shift": (lambda m, x: x * (1 + m.a) + m.b.float().to(x), (1, 1, 3), (3,)),
    "a scale for each place": (lambda m, x: x * m.a.unsqueeze(0), (4, 1), None),
    "a scale of moved elements": (lambda m, x: x * m.a.flip(0), (3,), None),
    "a scale that is expanded": (lambda m, x: m.a.expand(len(x), 4, 3) * x, (4, 3), None),
    "one number": (lambda m, x: m.a * x, (), None),
    "a mask token by a product": (masked, (1, 1, 3), None),
    "a mask token by a choice": (
        lambda m, x: torch.where(x[:, :, :1] > 0, m.a, x),
        (1, 1, 3),
        None,
    ),
    "the other choice": (lambda m, x: torch.where(x > 0, x, m.a), (1, 1, 3), None),
    "in place": (lambda m, x: x.clone().add_(m.a), (4, 3), None),
    "twice": (lambda m, x: torch.cat([x + m.a, x * 2 + m.a], dim=1), (3,), None),
    "added and multiplied": (in_two_ways, (2, 3), None),
}


@pytest.mark.parametrize(("use", "a", "b"), CASES.values(), ids=CASES.keys())
def test_every_use_against_the_jacobian(use, a, b):
    model = shake_(Bare(use, a, b))
    x = random(3, 4, 3)
    lpr = LPR(model, OMEGA_0, BETA)
    lpr.refresh(x)
    assert not lpr.untreated
    assert lpr.layers.keys() == trained(model).keys()

    g = fill_gradients_(model)
    p = trained(model)
    expected = []
    for name, own in zip(p, g.split([value.numel() for value in p.values()]), strict=True):
        J = jacobian(lambda q: functional_call(model, p | q, (x,)), {name: p[name]})
        places = int((J != 0).sum(0).max()) / len(x)
        if use not in (masked, in_two_ways):  # which have rows of zeros
            assert lpr.layers[name].positions == pytest.approx(places)
        omega = lpr.layers[name].omega
        assert omega == pytest.approx(OMEGA_0 / (len(x) * lpr.layers[name].positions ** BETA))
        I = torch.eye(len(own), dtype=g.dtype)  # noqa: E741
        expected.append(torch.linalg.solve(I + omega * J.T @ J, own))
    lpr.precondition_()
    torch.testing.assert_close(flat_gradient(model), torch.cat(expected), rtol=0, atol=1e-10)


def test_batches_of_any_size_give_the_same():
    model, x = shake_(Bare(joined, (1, 1, 3), (1, 5, 3))), random(6, 4, 3)
    states = []
    for size in (1, 4, 6):
        lpr = LPR(model, batch_size=size)
        lpr.refresh(x)
        states.append(lpr.state_dict())
    assert_same_state(states[0], states[1])
    assert_same_state(states[0], states[2])


OTHERS = {
    "matmul": lambda m, x: x @ m.a,
    "linear": lambda m, x: nn.functional.linear(x, m.a),
    "softmax": lambda m, x: x @ m.a.softmax(0),
    "pow": lambda m, x: x + m.a[0] ** 2,
    "layer_norm": lambda m, x: x @ nn.functional.layer_norm(m.a, (3,)),
}


@pytest.mark.parametrize(("name", "use"), OTHERS.items(), ids=OTHERS.keys())
def test_other_uses_are_left_alone_and_the_function_is_named(name, use):
    model = nn.Sequential(Bare(use, (3, 3)), nn.Linear(3, 2))
    lpr = LPR(model)
    assert lpr.untreated["0.a"] == "not refreshed yet."
    lpr.refresh(torch.randn(2, 4, 3))
    assert lpr.layers.keys() == {"1"}
    assert lpr.untreated == {
        "0.a": f"Bare is not known, and this parameter goes into {name}(); "
        "teach it with register_layer(Bare)."
    }


def test_one_wrong_use_is_enough():
    model = Bare(lambda m, x: (x + m.a) @ m.a.T, (3, 3))
    lpr = LPR(model)
    lpr.refresh(torch.randn(2, 3, 3))
    assert not lpr.layers
    assert "goes into matmul()" in lpr.untreated["a"]


def test_a_parameter_that_was_not_used_is_named():
    lpr = LPR(Bare(lambda m, x: x + m.a, (3,), (1,)))
    lpr.refresh(torch.randn(2, 4, 3))
    assert lpr.untreated == {"b": "not called in the forward pass of the last refresh."}


def test_they_can_be_chosen_by_name_frozen_saved_and_have_a_cost():
    model = nn.Sequential(Bare(joined, (1, 1, 3), (1, 5, 3)))
    x = torch.randn(2, 4, 3)
    lpr = LPR(model, exclude=["0.b"])
    lpr.refresh(x)
    assert lpr.layers.keys() == {"0.a"}
    assert lpr.untreated == {"0.b": "excluded."}
    assert lpr.cost(x).layers["0.a"].bytes == lpr.layers["0.a"].bytes == 3 * 4
    other = LPR(model, exclude=["0.b"])
    other.load_state_dict(lpr.state_dict())
    assert_same_state(other.state_dict(), lpr.state_dict())
    model[0].b.requires_grad_(False)
    assert LPR(model).untreated.keys() == {"0.a"}


def test_an_owner_of_layers_keeps_its_own_parameters_apart():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, 1, 3))
            self.mix = nn.TransformerEncoderLayer(3, 1, 4, batch_first=True)
            self.head = nn.Linear(3, 2)

        def forward(self, x):
            x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
            return self.head(self.mix(x)[:, 0])

    model = Model()
    lpr = LPR(model, OMEGA_0, BETA)
    lpr.refresh(torch.randn(4, 5, 3))
    assert not lpr.untreated
    assert lpr.layers["token"].positions == 1
    model.token.grad = torch.ones(1, 1, 3)
    lpr.precondition_()
    torch.testing.assert_close(model.token.grad, torch.full((1, 1, 3), 1 / (1 + OMEGA_0)))


def test_rules_that_observe_treat_them_too():
    from proxreplay.batch import Batch

    model = Bare(joined, (1, 1, 3), (1, 5, 3))
    rule = OWM(model)
    rule.observe(Batch(torch.randn(4, 4, 3), torch.zeros(4, dtype=torch.long)))
    assert rule.layers.keys() == {"a", "b"}
