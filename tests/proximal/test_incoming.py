"""The incoming part of gradients, a strength that sets itself, and how much of the rule acts."""

import copy
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from proxreplay import LPR, Batch, Learner, er, er_ace, lode
from proxreplay.errors import DivergenceError, InputError
from proxreplay.models import mlp, small_cnn
from proxreplay.proximal import RelativeStrength
from proxreplay.proximal.layers.calling import Called
from proxreplay.proximal.layers.incoming import Awaited, Brought, Rowset, linear_brought, summed
from proxreplay.proximal.layers.sites import find_sites
from proxreplay.proximal.rules.share import Share
from proxreplay.proximal.statistics.sketch import Sketch
from proxreplay.proximal.statistics.statistic import Statistic
from proxreplay.serialization import load_state, save_state
from tests.reference import assert_same_state

IMAGES = {
    "convolution": lambda: nn.Conv2d(2, 3, 3, padding=1),
    "strided, grouped": lambda: nn.Conv2d(2, 4, 3, stride=2, groups=2),
    "same, dilated": lambda: nn.Conv2d(2, 3, 3, padding="same", dilation=2),
    "reflecting, no bias": lambda: nn.Conv2d(
        2, 3, 3, padding=1, padding_mode="reflect", bias=False
    ),
    "group norm": lambda: nn.GroupNorm(1, 2),
    "layer norm": lambda: nn.LayerNorm((6, 6)),
    "layer norm, no bias": lambda: nn.LayerNorm((6, 6), bias=False),
    "rms norm": lambda: nn.RMSNorm(6),
    "linear on rows": lambda: nn.Linear(6, 2),
    "frozen batch norm": lambda: nn.BatchNorm2d(2).eval(),
}


def net(layer):
    torch.manual_seed(0)
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(7, bias=False), nn.Tanh())
    model.append(nn.Linear(7, 3))
    model(torch.randn(2, 2, 6, 6))
    return model.double()


def batch(n, seed):
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 2, 6, 6, generator=rng, dtype=torch.float64)
    return Batch(inputs, torch.randint(0, 3, (n,), generator=rng))


def gradients(model, loss):
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("loss", [er, er_ace, lode], ids=["er", "er_ace", "lode"])
@pytest.mark.parametrize("layer", IMAGES.values(), ids=IMAGES.keys())
@pytest.mark.parametrize("omega_0", [None, 3.0], ids=["turned", "shrunk"])
def test_only_what_incoming_examples_bring_is_changed(layer, loss, omega_0):
    model, incoming, replay = net(layer()), batch(4, 1), batch(5, 2)
    lpr = LPR(model, omega_0, tolerance=0.0, gradient="incoming")
    lpr.refresh(batch(20, 3).inputs)
    whole = gradients(model, loss(model, incoming, replay))
    still = copy.deepcopy(model)
    replayed = F.cross_entropy(still(replay.inputs), replay.labels) * (5 / 9 if loss is er else 0.5)
    G_re = gradients(still, replayed)
    model.zero_grad()
    with lpr.watched(incoming, replay):
        loss(model, incoming, replay).backward()
    lpr.step_()
    sites = find_sites(model).sites
    assert sites.keys() == lpr.layers.keys()
    for name, site in sites.items():
        names = [column.name for column in site.columns]
        parts = [column.part for column in site.columns]
        Lambda, groups = lpr.shrinkage(name), lpr.shrinkage(name).groups
        widths = site.widths(Lambda.width)

        def read(of, names=names, parts=parts, groups=groups, widths=widths):
            both = zip(names, parts, widths, strict=True)
            return torch.cat([part.read(of[n], groups, w) for n, part, w in both], dim=2)

        G_in, found = (
            read(whole) - read(G_re),
            read({n: p.grad for n, p in model.named_parameters()}),
        )
        s, c = lpr.share, 1.0
        if omega_0 is None:
            c = min(10.0, float(G_in.norm() / (G_in @ Lambda.Lambda).norm()))
            assert c > 1
        expected = read(G_re) + s * c * (G_in @ Lambda.Lambda) + (1 - s) * G_in
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert 0 < lpr.share <= 1
    assert {one.share for one in lpr.layers.values()} == {lpr.share}
    assert f" {lpr.share:5.2f}" in repr(lpr.layers)
    assert lpr.unsplit == []


@pytest.mark.parametrize("same", [True, False], ids=["same inputs", "augmented"])
@pytest.mark.parametrize("layer", IMAGES.values(), ids=IMAGES.keys())
@pytest.mark.parametrize("omega_0", [None, 3.0], ids=["turned", "shrunk"])
def test_once_per_batch_the_last_step_changes_what_all_of_them_bring(layer, omega_0, same):
    model = net(layer())
    lpr = LPR(model, omega_0, tolerance=0.0, gradient="incoming", per="batch")
    lpr.refresh(batch(20, 3).inputs)
    sites = find_sites(model).sites

    def read(of):
        """As matrices, by site."""
        return {
            name: torch.cat(
                [
                    column.part.read(of[column.name], lpr.shrinkage(name).groups, width)
                    for column, width in zip(
                        site.columns, site.widths(lpr.shrinkage(name).width), strict=True
                    )
                ],
                dim=2,
            )
            for name, site in sites.items()
        }

    total = dict.fromkeys(sites, 0.0)
    for step in range(3):
        incoming, replay = batch(4, 1 if same else 10 + step), batch(5, 20 + step)
        plain = read(gradients(model, er(model, incoming, replay)))
        replayed = F.cross_entropy(model(replay.inputs), replay.labels) * 5 / 9
        kept = read(gradients(model, replayed))
        total = {name: total[name] + plain[name] - kept[name] for name in sites}
        model.zero_grad()
        with lpr.watched(incoming, replay):
            er(model, incoming, replay).backward()
        lpr.step_() if step == 2 else lpr.wait_()
        found = read({n: p.grad for n, p in model.named_parameters()})
        for name in sites:
            if step < 2:
                assert torch.allclose(found[name], plain[name], rtol=1e-12, atol=0)
                continue
            G_in, Lambda = total[name], lpr.shrinkage(name).Lambda
            c = min(10.0, float(G_in.norm() / (G_in @ Lambda).norm())) if omega_0 is None else 1.0
            expected = plain[name] - lpr.share * (G_in - c * (G_in @ Lambda))
            torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-12)
            assert not torch.allclose(found[name], plain[name], rtol=1e-3)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    assert lpr._brought.of_sites == {}


@pytest.mark.parametrize("k", [2, 9], ids=["as rows", "as a matrix"])
def test_rows_that_were_worked_out_are_put_together(k):
    """Those of large layers; 2 and 3 rows are fewer than 8 outputs, 9 and 3 are more."""
    rows = [torch.randn(1, n, 5) for n in (k, 3)]
    lefts = [torch.randn(1, n, 8) for n in (k, 3)]
    (total,) = summed([Brought(M, left) for M, left in zip(rows, lefts, strict=True)])
    assert (total.left is None) == (k == 9)
    expected = sum(left.mT @ M for M, left in zip(rows, lefts, strict=True))
    torch.testing.assert_close(total.gradient(), expected)


@pytest.mark.parametrize(
    "rule",
    [
        lambda model: LPR(model, per="step"),
        lambda model: LPR(model, 3.0),
        lambda model: LPR(model, gradient="all"),
    ],
    ids=["per step", "omega_0", "whole gradient"],
)
def test_a_rule_for_every_step_does_not_wait(rule):
    found, first = [], net(nn.Conv2d(2, 3, 3))
    for name in ("wait_", "step_"):
        model = copy.deepcopy(first)
        lpr = rule(model)
        lpr.refresh(batch(20, 3).inputs)
        for _ in range(2):
            model.zero_grad()
            with lpr.watched(batch(4, 1), batch(5, 2)):
                er(model, batch(4, 1), batch(5, 2)).backward()
            getattr(lpr, name)()
        found.append([p.grad for p in model.parameters()])
    plain = gradients(model, er(model, batch(4, 1), batch(5, 2)))
    assert not torch.allclose(found[0][0], next(iter(plain.values())))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_where_batch_norm_mixes_examples_no_step_waits():
    found = []
    for per in ("batch", "step"):
        torch.manual_seed(0)
        model = small_cnn(1, widths=(3, 4), num_classes=3)
        learner = Learner(model, rule=LPR(model, per=per), refresh_every=1, averaging=None)
        rng = torch.Generator().manual_seed(0)
        for _ in range(3):
            learner.learn(torch.randn(6, 1, 5, 5, generator=rng), torch.arange(6) % 3)
        found.append(model.state_dict())
    assert_same_state(*found)


def test_a_failed_step_takes_along_those_that_wait():
    model = net(nn.Conv2d(2, 3, 3))
    lpr = LPR(model)
    lpr.refresh(batch(20, 3).inputs)

    def step(error=None):
        with lpr.watched(batch(4, 1), batch(5, 2)):
            er(model, batch(4, 1), batch(5, 2)).backward()
            if error is not None:
                raise error

    step()
    lpr.wait_()
    assert lpr._brought.of_sites
    with pytest.raises(ZeroDivisionError):
        step(ZeroDivisionError)
    assert lpr._brought.of_sites == {}


class Normalising(torch.optim.SGD):
    """As LARS and others do: steps do not add up."""


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (None, "wait wait step"),
        (torch.optim.Adam, "step step step"),
        (lambda parameters: Normalising(parameters, lr=0.1), "step step step"),
    ],
    ids=["SGD", "Adam", "derived from SGD"],
)
def test_a_learner_says_which_step_is_the_last(optimizer, expected):
    """Adam does not add up: a step with the sum of several gradients is not these steps."""
    model, said = mlp(2), []
    rule = LPR(model)
    rule.step_, rule.wait_ = lambda: said.append("step"), lambda: said.append("wait")
    Learner(model, rule=rule, optimizer=optimizer).learn(torch.randn(4, 2), torch.arange(4) % 2)
    assert " ".join(said) == expected


class Counting(LPR):
    made = 0

    def step_(self, only=None):
        self.made += 1
        super().step_(only)


def test_a_derived_rule_sees_every_step():
    model = mlp(2)
    learner = Learner(model, rule=Counting(model))
    learner.learn(torch.randn(4, 2), torch.arange(4) % 2)
    assert learner.rule.made == 3


def test_an_attached_rule_does_not_wait():
    model = net(nn.Conv2d(2, 3, 3))
    lpr = LPR(model).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InputError, match=r"wait_: the rule is attached .* detach\(\) first"):
        lpr.wait_()


class Queries(nn.Module):
    """A Linear layer on a parameter, which every step changes where it is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Parameter(torch.randn(6))
        self.to_q, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.to_q(self.q.expand(len(x), -1)) * x.flatten(1)[:, :6])


@pytest.mark.parametrize("small", [True, False], ids=["rows that wait", "rows made at once"])
def test_rows_that_wait_are_those_of_their_step(small, monkeypatch):
    monkeypatch.setattr("proxreplay.proximal.layers.incoming.SMALL", 2**16 if small else 0)
    model = Queries().double()
    lpr = LPR(model, tolerance=0.0, include=["to_q"])
    lpr.refresh(batch(20, 3).inputs)
    total, incoming, replay = 0.0, batch(4, 1), batch(5, 2)
    for step in range(3):
        loss = F.cross_entropy(model(incoming.inputs), incoming.labels) * 4 / 9
        total = (
            total
            + gradients(model, loss + 0 * sum(map(torch.sum, model.parameters())))["to_q.weight"]
        )
        model.zero_grad()
        with lpr.watched(incoming, replay):
            er(model, incoming, replay).backward()
        plain = model.to_q.weight.grad.clone()
        lpr.step_() if step == 2 else lpr.wait_()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.5 * p.grad
    Lambda = lpr.shrinkage("to_q").apply(torch.eye(6, dtype=torch.float64)[None])[0]
    c = min(10.0, float(total.norm() / (total @ Lambda).norm()))
    expected = plain - lpr.share * (total - c * (total @ Lambda))
    torch.testing.assert_close(model.to_q.weight.grad, expected)


def test_half_precision_rows_are_divided_by_a_scale_in_single():
    x, delta = torch.ones(2, 3), torch.full((2, 4), 2.0**-14, dtype=torch.float16)
    one = Awaited(linear_brought, nn.Linear(3, 4), x, delta, Rowset(0, 2), None)
    assert float(one.divided(2.0**16).delta.max()) == 2.0**-30  # 0 in half precision


@pytest.mark.parametrize("error", [OSError, DivergenceError], ids=["a transform", "divergence"])
def test_a_learner_goes_on_after_a_failure_in_the_middle_of_a_batch(error):
    """Nothing of the broken batch waits for the next one, whose classes may be new."""
    calls, fails = [], [False]

    def transform(x, rng):
        calls.append(None)
        if fails[0] and len(calls) == 3:  # incoming and replay of the first step passed
            if error is OSError:
                raise OSError
            return x * torch.nan
        return x

    torch.manual_seed(0)
    model = mlp(8, hidden=(16,))
    learner = Learner(model, rule=LPR(model), refresh_every=1, transform=transform)
    for i in range(3):
        learner.learn(torch.randn(4, 8), torch.arange(4) % 2 + i % 2)
    calls.clear()
    fails[0] = True
    with pytest.raises(error):
        learner.learn(torch.randn(4, 8), torch.arange(4) % 2)
    fails[0] = False
    assert learner.rule._brought.of_sites == {}
    assert learner.rule._watched == []
    learner.learn(torch.randn(4, 8), torch.arange(4) + 3)


def test_batch_norm_in_training_is_split_where_incoming_examples_pass_alone():
    model, incoming = net(nn.BatchNorm2d(2)), batch(4, 1)
    lpr = LPR(model, include=["0"])
    lpr.refresh(batch(20, 3).inputs)
    new = gradients(model, 0.5 * er(model, incoming, None))  # all three are present: as in er_ace
    assert set(incoming.labels.tolist()) == {0, 1, 2}
    with lpr.watched(incoming, batch(5, 2)):
        er_ace(model, incoming, batch(5, 2)).backward()
    (brought,) = lpr._watched[0].brought["0"]
    expected = torch.stack([new["0.weight"], new["0.bias"]], dim=1)
    torch.testing.assert_close(brought.gradient()[:, 0], expected)


def test_without_replay_or_outside_of_a_watched_step_the_whole_gradient_is_treated():
    model = net(nn.Conv2d(2, 3, 3))
    lpr, paper = LPR(model), LPR(model, gradient="all")
    for rule in (lpr, paper):
        rule.refresh(batch(20, 3).inputs)
    found = []
    for rule in (lpr, paper):
        model.zero_grad()
        with rule.watched(batch(4, 1), None):
            F.cross_entropy(model(batch(4, 1).inputs), batch(4, 1).labels).backward()
        rule.step_()
        found.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_a_frozen_or_unused_parameter_takes_no_part():
    model = net(nn.Conv2d(2, 3, 3))
    lpr = LPR(model, tolerance=0.0)
    lpr.refresh(batch(20, 3).inputs)
    with lpr.watched(batch(4, 1), batch(5, 2)):
        er(model, batch(4, 1), batch(5, 2)).backward()
    bias, before = model[0].bias, model[0].weight.grad.clone()
    lpr.step_(only={id(p) for p in model.parameters() if p is not bias})
    assert not torch.equal(model[0].weight.grad, before)
    assert lpr._factor("0", (True, False), [model[0].weight.grad, None]).width == 18


def test_a_failed_step_leaves_nothing_behind():
    model = net(nn.Conv2d(2, 3, 3))
    lpr = LPR(model)
    lpr.refresh(batch(20, 3).inputs)

    def step():
        with lpr.watched(batch(4, 1), batch(5, 2)):
            er(model, batch(4, 1), batch(5, 2)).backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step()
    assert lpr._watched == []
    assert not any(module._forward_hooks for module in model.modules())


@given(st.floats(1e-3, 1e3), st.floats(0.01, 10), st.integers(1, 4), st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_a_relative_strength_has_no_unit(scale, level, groups, width):
    Z = torch.randn(
        groups, 9, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    G = Z.mT @ Z
    one, other = (Statistic(g, width, 9, 3, G.dtype) for g in (G, G * scale**2))
    omega = RelativeStrength(level).of(one)
    mean = float(torch.linalg.eigvalsh(omega * G).mean())
    assert mean == pytest.approx(level)
    assert RelativeStrength(level).of(other) * scale**2 == pytest.approx(omega)
    sketch = Sketch(Z, 9, torch.zeros(groups), width, 9, 3)
    assert RelativeStrength(level).of(sketch) == pytest.approx(omega)


def test_rows_of_zeros_are_not_treated_and_do_no_harm():
    assert RelativeStrength(1.0).of(Statistic(torch.zeros(1, 3, 3), 3, 4, 4, torch.float32)) == 0


@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3)), min_size=1, max_size=9))
@settings(max_examples=50, deadline=None)
def test_the_share_is_from_0_to_1_the_same_for_both_and_has_no_unit(pulls):
    share, swapped, scaled = Share(), Share(), Share()
    for a, b in pulls:
        share.note(a, b)
        swapped.note(b, a)
        scaled.note(8 * a, 8 * b)
    assert 0 <= share.value <= 1
    assert share.value == pytest.approx(swapped.value) == pytest.approx(scaled.value)
    assert Share(**share.state()) == share


def test_the_share_falls_to_nothing_where_incoming_and_replayed_examples_pull_alike():
    share = Share()
    assert share.value == 1
    share.note(1.0, 1.0)
    assert share.value == 0
    share.note(float("nan"), 1.0)
    assert share.value == 0
    for _ in range(200):
        share.note(4.0, 1.0)
    assert share.value == 1


@pytest.mark.parametrize("loss", [er, lode], ids=["er", "lode"])
def test_a_learner_goes_on_bit_by_bit(loss, tmp_path):
    def made():
        torch.manual_seed(0)
        model = small_cnn(1, widths=(3, 4))
        return Learner(model, rule=LPR(model), loss=loss, refresh_every=2, seed=1)

    rng = torch.Generator().manual_seed(0)
    images = torch.randn(8, 4, 1, 5, 5, generator=rng)
    batches = [(images[i], torch.arange(4) % 2 + i // 4 * 2) for i in range(8)]
    whole, first = made(), made()
    for one in batches:
        whole.learn(*one)
    for one in batches[:5]:
        first.learn(*one)
    save_state(tmp_path / "learner.safetensors", first.state_dict())
    again = made()
    again.load_state_dict(load_state(tmp_path / "learner.safetensors"))
    for one in batches[5:]:
        again.learn(*one)
    assert_same_state(again.state_dict(), whole.state_dict())
    assert again.rule.share == whole.rule.share
    first.save(tmp_path / "whole.safetensors")
    loaded = Learner.load(tmp_path / "whole.safetensors", again.model)
    assert loaded.rule.strength == RelativeStrength()
    assert (loaded.rule.gradient, loaded.rule.per) == (None, "batch")


def test_the_whole_gradient_with_a_strength_of_its_own_is_saved_as_such(tmp_path):
    model = mlp(2)
    learner = Learner(model, rule=LPR(model, gradient="all", level=2.0))
    learner.learn(torch.randn(4, 2), torch.arange(4) % 2)
    learner.save(tmp_path / "learner.safetensors")
    rule = Learner.load(tmp_path / "learner.safetensors").rule
    assert (rule.gradient, rule.strength) == ("all", RelativeStrength(2.0))


class Tokens(nn.Module):
    """Linear layers on five tokens per example; or on one, after attention."""

    def __init__(self, attention):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Identity() if attention else nn.Linear(4, 6)
        self.mix = nn.MultiheadAttention(4, 2, batch_first=True) if attention else None
        self.head = nn.Linear(4 if attention else 6, 3)

    def forward(self, x):
        z = self.embed(x)
        return self.head((z if self.mix is None else self.mix(z, z, z)[0]).mean(1))


def in_one_step(model, rule):
    rng = torch.Generator().manual_seed(1)
    x, y = torch.randn(9, 5, 4, generator=rng), torch.randint(0, 3, (9,), generator=rng)
    rule.refresh(torch.randn(20, 5, 4, generator=rng))
    incoming, replay = Batch(x[:4], y[:4]), Batch(x[4:], y[4:])
    model.zero_grad()
    with rule.watched(incoming, replay):
        er(model, incoming, replay).backward()
    rule.wait_()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    ("attention", "why"),
    [(False, "'embed' has several rows per example"), (True, "incoming examples bring to 'mix")],
    ids=["tokens", "attention"],
)
def test_in_networks_of_tokens_the_whole_gradient_is_treated(attention, why):
    """What incoming examples bring, treated alone, made a small transformer worse than plain ER."""
    model = Tokens(attention)
    lpr, whole = LPR(model), LPR(model, gradient="all")
    found = [in_one_step(model, rule) for rule in (lpr, whole)]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert why in repr(lpr)
    assert (lpr.share, lpr.unsplit) == (None, [])
    asked = LPR(model, gradient="incoming", per="step")
    assert not torch.equal(in_one_step(model, asked)[-1], found[0][-1])
    assert asked.share is not None
    again = LPR(model)
    again.load_state_dict(lpr.state_dict())
    assert why in repr(again)
    with pytest.warns(UserWarning, match=r"form of before"):
        again.load_state_dict(asked.state_dict())


def test_what_makes_no_sense_is_refused():
    with pytest.raises(InputError, match=r"lpr.gradient=replay; give one of"):
        LPR(mlp(2), gradient="replay")
    with pytest.raises(InputError, match="level=-1"):
        LPR(mlp(2), level=-1.0)


def test_where_batch_norm_sees_both_together_the_whole_gradient_is_treated():
    model = net(nn.BatchNorm2d(2))
    lpr, paper = LPR(model), LPR(model, gradient="all")
    for rule in (lpr, paper):
        rule.refresh(batch(20, 3).inputs)
    found = {}
    for rule, loss in ((lpr, er), (paper, er), (lpr, er_ace), (paper, er_ace)):
        model.zero_grad()
        with rule.watched(batch(4, 1), batch(5, 2)):
            loss(model, batch(4, 1), batch(5, 2)).backward()
        rule.step_()
        found[rule, loss] = [p.grad.clone() for p in model.parameters()]
    for a, b in zip(found[lpr, er], found[paper, er], strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(found[lpr, er_ace][0], found[paper, er_ace][0])


class Named(nn.Module):
    """Gives an object with logits, as models of transformers do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return SimpleNamespace(logits=self.model(x))


@pytest.mark.parametrize("wrap", [nn.Sequential, Named], ids=["tensor", "object with logits"])
def test_the_share_follows_the_losses_of_a_step(wrap):
    incoming, replay = batch(4, 1), batch(5, 2)
    model = net(nn.Conv2d(2, 3, 3))
    whole = wrap(model)
    lpr = LPR(whole)
    lpr.refresh(batch(20, 3).inputs)
    for loss in (er, er_ace):
        with lpr.watched(incoming, replay):
            loss(Called(whole), incoming, replay).backward()
        each = [F.cross_entropy(model(one.inputs), one.labels).item() for one in (incoming, replay)]
        assert lpr._share.incoming == pytest.approx(each[0])
        assert lpr._share.replayed == pytest.approx(each[1])
    with lpr.watched(incoming, replay):  # no logits of classes: nothing is noted
        model[:4](torch.cat([incoming.inputs, replay.inputs])).sum().backward()


def halves():
    """Scaled by a GradScaler, as mixed precision does it."""
    return torch.amp.GradScaler("cpu", init_scale=1024.0), None


def clipped():
    return None, 0.01


def scaled_and_clipped():
    return torch.amp.GradScaler("cpu", init_scale=1024.0), 0.01


def three_steps(scaler, most, model, lpr, optimizer):
    """A loop of one's own with three steps of two watched passes each; returns the gradients."""
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            incoming, replay = batch(4, 10 * step + part), batch(5, 10 * step + part + 5)
            with lpr.watched(incoming, replay):
                loss = er(model, incoming, replay)
                (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        share = 1.0 if most is None else most / float(norm)
        for p in model.parameters():
            p.grad *= share
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        for p in model.parameters():
            p.grad /= share  # as if nothing had been clipped
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_a_scale_is_followed_in_steps_that_wait():
    found, first = [], net(nn.Conv2d(2, 3, 3))
    for scales in ((1.0, 1.0), (64.0, 0.5)):
        model = copy.deepcopy(first)
        lpr = LPR(model, tolerance=0.0)
        lpr.refresh(batch(20, 3).inputs)
        for scale, made in zip(scales, (lpr.wait_, lpr.step_), strict=True):
            model.zero_grad()
            with lpr.watched(batch(4, 1), batch(5, 2)):
                (scale * er(model, batch(4, 1), batch(5, 2))).backward()
            for p in model.parameters():
                p.grad /= scale
            made()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("how", [halves, clipped, scaled_and_clipped])
def test_scaled_losses_and_clipped_gradients_are_followed(how):
    found = []
    for scaler, most in ((None, None), how()):
        torch.manual_seed(0)  # the layer is made before `net` sets it
        model = net(nn.Conv2d(2, 3, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        lpr = LPR(model, tolerance=0.0)
        lpr.refresh(batch(20, 3).inputs)
        lpr.attach(optimizer)
        found.append(three_steps(scaler, most, model, lpr, optimizer))
    assert lpr.share > 0
    for name, expected in found[0].items():
        torch.testing.assert_close(
            found[1][name], expected, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_a_step_that_a_scaler_leaves_out_is_forgotten():
    model = net(nn.Conv2d(2, 3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    lpr = LPR(model, tolerance=0.0)
    lpr.refresh(batch(20, 3).inputs)
    lpr.attach(optimizer)
    twin_model = copy.deepcopy(model)
    twin = LPR(twin_model, tolerance=0.0)
    twin.refresh(batch(20, 3).inputs)
    twin_optimizer = torch.optim.SGD(twin_model.parameters(), lr=0.0)
    twin.attach(twin_optimizer)
    with lpr.watched(batch(4, 1), batch(5, 2)):  # never stepped
        (er(model, batch(4, 1), batch(5, 2)) * 1e30).backward()
    for one, rule, opt in ((model, lpr, optimizer), (twin_model, twin, twin_optimizer)):
        opt.zero_grad()
        with rule.watched(batch(4, 3), batch(5, 4)):
            er(one, batch(4, 3), batch(5, 4)).backward()
        rule._share = Share()
        opt.step()
    for p, q in zip(model.parameters(), twin_model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_gradients_that_were_changed_beyond_a_scale_are_refused():
    model = net(nn.Conv2d(2, 3, 3))
    lpr = LPR(model, tolerance=0.0)
    lpr.refresh(batch(20, 3).inputs)
    with lpr.watched(batch(4, 1), batch(5, 2)):
        (1024 * er(model, batch(4, 1), batch(5, 2))).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    with pytest.raises(InputError, match="changed between backward and the step"):
        lpr.step_()


@pytest.mark.parametrize(
    ("passes", "total"),
    [((3, 5), 8), ((4, 4), 8), ((3,), 3), ((8, 5), 13)],
    ids=["fewer incoming", "fewer replayed", "incoming alone, fewer", "more incoming"],
)
def test_passes_of_other_lengths_than_declared_are_refused(passes, total):
    """Rows of replayed examples would be taken for incoming ones, or the other way round."""
    model, incoming, replay = net(nn.Conv2d(2, 3, 3)), batch(4, 1), batch(5, 2)
    lpr = LPR(model, tolerance=0.0)
    lpr.refresh(batch(20, 3).inputs)
    said = f"told of 4 incoming and 5 replayed examples, but {total} passed"
    with pytest.raises(InputError, match=said), lpr.watched(incoming, replay):
        er(model, batch(passes[0], 4), batch(passes[1], 5) if passes[1:] else None).backward()


@pytest.mark.parametrize("times", [0, 1, 2], ids=["left out", "once", "two passes"])
def test_replay_may_pass_as_often_as_a_loss_needs_it(times):
    model, incoming, replay = net(nn.Conv2d(2, 3, 3)), batch(4, 1), batch(5, 2)
    lpr = LPR(model, tolerance=0.0)
    lpr.refresh(batch(20, 3).inputs)
    with lpr.watched(incoming, replay):
        for one in (incoming, *[replay] * times):
            F.cross_entropy(model(one.inputs), one.labels).backward()
    lpr.step_()
