"""Gradients that are turned and not shortened."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from proxreplay import LPR, Batch, er
from proxreplay.errors import InputError
from proxreplay.models import mlp
from proxreplay.proximal import RelativeStrength
from proxreplay.proximal.rules.length import MOST
from proxreplay.proximal.statistics.sketch import Sketch
from proxreplay.proximal.statistics.statistic import Statistic

X, Y = torch.randn(9, 6, generator=torch.Generator().manual_seed(0)).double(), torch.arange(9) % 3
EXAMPLES = torch.randn(20, 6, generator=torch.Generator().manual_seed(1)).double()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 3)).double()


def gradients(model):
    """By layer, weight and bias as one matrix."""
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    layers = dict.fromkeys(name.split(".")[0] for name in named)
    return {
        layer: torch.cat(
            [g.reshape(len(g), -1) for name, g in named.items() if name.startswith(f"{layer}.")], 1
        )
        for layer in layers
    }


def stepped(rule, model, only=None):
    """The gradients before and after a step that is treated as a whole."""
    rule.refresh(EXAMPLES)
    model.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    before = copy.deepcopy(gradients(model))
    rule.step_(only)
    return before, gradients(model)


@pytest.mark.parametrize("gradient", [None, "all"])
def test_the_whole_gradient_is_turned_by_every_layer(gradient):
    model = net()
    rule = LPR(model, tolerance=0.0, gradient=gradient)
    before, after = stepped(rule, model)
    model.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    rule.precondition_()  # for diagnostics: as it is
    shrunk = gradients(model)
    assert set(before) == set(rule.layers) == {"0", "2", "3"}
    for name, G in after.items():
        assert float(G.norm()) == pytest.approx(float(before[name].norm()))
        assert float(shrunk[name].norm()) < 0.95 * float(before[name].norm())
        cosine = F.cosine_similarity(G.reshape(1, -1), shrunk[name].reshape(1, -1))
        assert float(cosine) == pytest.approx(1)


def test_the_papers_numbers_shrink_as_before():
    model = net()
    rule = LPR(model, omega_0=2.0, tolerance=0.0)
    before, after = stepped(rule, model)
    for name in ("0", "3"):
        expected = before[name] @ rule.shrinkage(name).Lambda[0]
        torch.testing.assert_close(after[name], expected)


def test_what_is_hardly_left_is_not_blown_up():
    model = net()
    before, after = stepped(LPR(model, level=1e9, tolerance=0.0), model)
    for name, G in after.items():
        assert 0 < float(G.norm()) < 1e-3 * MOST * float(before[name].norm())


def test_a_gradient_of_zeros_stays_one():
    model = net()
    rule = LPR(model)
    rule.refresh(EXAMPLES)
    (model(X).sum() * 0).backward()
    rule.step_()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def test_parts_of_one_parameter_are_turned_each_by_itself():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = attention

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    model = Net()
    rule = LPR(model, tolerance=0.0)
    rule.refresh(torch.randn(9, 5, 4))
    model(torch.randn(3, 5, 4)).square().sum().backward()
    both = [attention.in_proj_weight.grad, attention.in_proj_bias.grad[:, None]]
    before = torch.cat(both, 1).unflatten(0, (3, 4)).flatten(1).norm(dim=1)
    rule.step_()
    after = torch.cat(both, 1).unflatten(0, (3, 4)).flatten(1).norm(dim=1)
    assert len(rule.layers) == 4
    torch.testing.assert_close(after, before)


def test_only_what_moves_is_counted():
    model = net()
    weight = model[0].weight
    before, after = stepped(LPR(model, tolerance=0.0), model, {id(weight)})
    assert float(after["0"][:, :6].norm()) == pytest.approx(float(before["0"][:, :6].norm()))
    assert not torch.equal(after["0"][:, :6], before["0"][:, :6])
    assert torch.equal(after["0"][:, 6:], before["0"][:, 6:])


def test_passes_of_one_step_are_turned_together():
    """Accumulated passes bring what one pass over all of their examples brings.

    The hidden layer has more outputs than incoming rows, the head fewer.
    """
    found = []
    for parts in (1, 2):
        torch.manual_seed(0)
        model = mlp(6, 3, hidden=(6,)).double()
        rule = LPR(model, tolerance=0.0)
        rule.refresh(EXAMPLES)
        new, old = Batch(X[:4], Y[:4]), Batch(X[4:8], Y[4:8])
        for i in range(parts):
            own = slice(4 * i // parts, 4 * (i + 1) // parts)
            incoming, replay = (Batch(b.inputs[own], b.labels[own]) for b in (new, old))
            with rule.watched(incoming, replay):
                (er(model, incoming, replay) / parts).backward()
        rule._share = type(rule._share)()  # it has seen other means: act fully
        rule.step_()
        found.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one)


def test_few_rows_hold_fewer_directions():
    """The mean of ``omega sigma`` is over the directions that so many rows can have."""
    Z = torch.randn(2, 3, 8, dtype=torch.float64)
    omega = RelativeStrength(0.7).of(Statistic(Z.mT @ Z, 8, 3, 3, Z.dtype))
    sigma = torch.linalg.eigvalsh(omega * Z.mT @ Z)[:, -3:]
    assert float(sigma.mean()) == pytest.approx(0.7)
    assert RelativeStrength(0.7).of(Sketch(Z, 9, torch.zeros(2), 8, 3, 3)) == pytest.approx(omega)


def test_a_step_inside_of_the_watched_passes_is_refused():
    """What it saw would be taken for that of the next step."""
    torch.manual_seed(0)
    model = mlp(6, 3, hidden=(6,)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = LPR(model).attach(optimizer)
    rule.refresh(EXAMPLES)
    incoming, replay = Batch(X[:4], Y[:4]), Batch(X[4:8], Y[4:8])
    before = copy.deepcopy(model.state_dict())
    with rule.watched(incoming, replay):
        er(model, incoming, replay).backward()
        with pytest.raises(InputError, match=r"steps inside of watched\(\.\.\.\)"):
            optimizer.step()
    assert all(torch.equal(now, before[name]) for name, now in model.state_dict().items())


def test_a_state_from_before_lengths_were_kept_is_taken_with_a_word():
    model = net()
    rule = LPR(model)
    rule.refresh(EXAMPLES)
    state = rule.state_dict()
    LPR(model).load_state_dict(state)
    del state["length"]
    with pytest.warns(UserWarning, match="saved by a version that shrank gradients"):
        LPR(model).load_state_dict(state)
    paper = LPR(model, omega_0=1.0)
    paper.refresh(EXAMPLES)
    assert "length" not in paper.state_dict()
    assert "keep their length" in repr(rule)
    assert "keep their length" not in repr(paper)


def test_batchnorm_that_mixes_examples_is_said():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    rule = LPR(model)
    rule.refresh(EXAMPLES)
    incoming, replay = Batch(X[:4], Y[:4]), Batch(X[4:8], Y[4:8])
    assert "BatchNorm" not in repr(rule).splitlines()[-1]
    with rule.watched(incoming, replay):
        er(model, incoming, replay).backward()
    assert "the whole gradient is treated" in repr(rule)
