"""Steps in which some gradients are zero: what passes brought, and their scale, are still known."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from proxreplay import LPR, Batch, KroneckerLPR, er
from proxreplay.options import StepOptions
from proxreplay.proximal.rules import unscale
from proxreplay.proximal.rules.length import MOST
from tests.proximal.states import averages

PASSES = ["dead", "alive"]
ONE = [(kind,) for kind in PASSES]
TWO = list(itertools.product(PASSES, PASSES))


def small():
    """Two hidden units; their bias is the smallest parameter."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3)).double()
    rng = torch.Generator().manual_seed(0)
    for p in model.parameters():
        nn.init.uniform_(p, 0.1, 0.9, generator=rng)
    return model


def batches(kind, seed):
    """Incoming and replayed examples; the hidden units are dead for negative ones."""
    rng = torch.Generator().manual_seed(seed)
    x = 9 + torch.rand(9, 2, generator=rng).double()
    y = torch.randint(0, 3, (9,), generator=rng)
    x = -x if kind == "dead" else x
    return Batch(x[:4], y[:4]), Batch(x[4:], y[4:])


def rule_of(model):
    rule = LPR(model, tolerance=0.0)
    rule.refresh(torch.randn(20, 2, generator=torch.Generator().manual_seed(9)).double())
    assert set(rule.layers) == {"0", "2"}
    return rule


def watch(rule, model, kind, seed, scale=1.0):
    incoming, replay = batches(kind, seed)
    with rule.watched(incoming, replay):
        (scale * er(model, incoming, replay)).backward()


def expected(rule, kinds):
    """``G - s (G_in - c G_in Lambda)`` by layer, all of it from backward passes of their own."""
    model = small()
    G, G_in = {}, {}
    for seed, kind in enumerate(kinds):
        incoming, replay = batches(kind, seed)
        own = F.cross_entropy(model(incoming.inputs), incoming.labels) * 4 / 9
        for sums, loss in ((G, er(model, incoming, replay)), (G_in, own)):
            for name in ("0", "2"):
                layer = model.get_submodule(name)
                dW, db = torch.autograd.grad(loss, [layer.weight, layer.bias], retain_graph=True)
                sums[name] = sums.get(name, 0) + torch.cat([dW, db[:, None]], 1)
    for name, mine in G_in.items():
        turned = mine @ rule.shrinkage(name).Lambda[0]
        c = min(MOST, float(mine.norm() / turned.norm())) if mine.any() else 1.0
        G[name] -= rule.share * (mine - c * turned)
    return G


def assert_as_expected(rule, model, kinds):
    assert rule.share > 0
    for name, G in expected(rule, kinds).items():
        layer = model.get_submodule(name)
        found = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
        torch.testing.assert_close(found, G, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kinds", [*ONE, *TWO], ids="-".join)
@pytest.mark.parametrize("scale", [1.0, 1024.0, 3.0], ids=["plain", "scaled", "clipped"])
def test_passes_that_leave_a_parameter_alone_count(kinds, scale):
    model = small()
    rule = rule_of(model)
    for seed, kind in enumerate(kinds):
        watch(rule, model, kind, seed, scale)
    assert model[0].bias.grad.any() == ("alive" in kinds)
    for p in model.parameters():
        p.grad /= scale
    rule.step_()
    assert_as_expected(rule, model, kinds)


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("to_none", [True, False], ids=["None", "zeros"])
@pytest.mark.parametrize("left_out", TWO, ids="-".join)
def test_a_step_that_was_left_out_is_forgotten(left_out, to_none, kind):
    """As a GradScaler does it whose scale was too high."""
    model = small()
    rule = rule_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rule.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for seed, one in enumerate(left_out):
        watch(rule, model, one, 5 + seed, scaler.scale(torch.ones(())))
    model[2].bias.grad[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=to_none)
    watch(rule, model, kind, 0, scaler.scale(torch.ones(())))
    watch(rule, model, "dead", 1, scaler.scale(torch.ones(())))
    scaler.step(optimizer)
    assert_as_expected(rule, model, [kind, "dead"])


def test_a_pass_that_brings_nothing_at_all_does_no_harm():
    model = small()
    rule = rule_of(model)
    watch(rule, model, "alive", 7, scale=0.0)
    watch(rule, model, "alive", 0)
    rule.step_()
    assert_as_expected(rule, model, ["alive"])


def test_what_no_small_gradient_tells_is_as_in_the_last_step(monkeypatch):
    """Under a loss scale. Only the hidden units' bias is kept in mind."""
    monkeypatch.setattr(unscale, "KEPT", 2)
    model = small()
    rule = rule_of(model)
    for kind in ("alive", "dead"):
        model.zero_grad()
        watch(rule, model, kind, 0, 1024.0)
        for p in model.parameters():
            p.grad /= 1024
        rule.step_()
        assert_as_expected(rule, model, [kind])


class Heads(nn.Module):
    """Two heads, one of which is used at a time; the other has no gradient."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 3)]).double()
        self.use = 0

    def forward(self, x):
        return self.heads[self.use](x) if self.use else self.heads[0](x) + self.heads[1](x)


def test_passes_of_another_head_count():
    """The first pass leaves the smallest parameter without any gradient."""
    found = []
    for uses in ([1, 0], [0, 1]):  # what comes first makes no difference
        torch.manual_seed(0)
        model = Heads()
        rule = LPR(model, tolerance=0.0)
        rule.refresh(torch.randn(20, 2).double())
        assert set(rule.layers) == {"heads.0", "heads.1"}
        for model.use in uses:
            watch(rule, model, "alive", model.use, 1024.0)
        for p in model.parameters():
            p.grad /= 1024
        rule._share = type(rule._share)()
        rule.step_()
        found.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_parameter_that_is_frozen_between_refreshes_does_no_harm():
    model = small()
    rule = rule_of(model)
    model[0].bias.requires_grad_(False)
    watch(rule, model, "alive", 0)
    before = model[2].weight.grad.clone()
    rule.step_()
    assert model[0].bias.grad is None
    assert not torch.equal(model[2].weight.grad, before)


@pytest.mark.parametrize("kind", PASSES)
def test_statistics_of_gradients_are_unscaled(kind):
    found = []
    for scale in (1.0, 1024.0):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        rule = KroneckerLPR(model, steps=StepOptions(1, 1, 0.0, incoming=1.0)).attach(optimizer)
        (scale * er(model, batches(kind, 0)[0], None)).backward()
        for p in model.parameters():
            p.grad /= scale
        optimizer.step()
        found.append(averages(rule)["2"].mean.H)
    assert found[0].any()
    torch.testing.assert_close(*found)
