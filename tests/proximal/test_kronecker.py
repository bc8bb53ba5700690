"""The two-sided rule against dense matrices in float64, and the Fisher matrix itself."""

import copy
from collections import OrderedDict
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

from proxreplay import Batch, KroneckerLPR, Learner
from proxreplay.distributed import ALONE
from proxreplay.errors import InputError
from proxreplay.models import GrowingHead, mlp, small_cnn
from proxreplay.options import StepOptions
from proxreplay.proximal.layers.calling import logits_of
from proxreplay.proximal.rules.kronecker import RESTS_FROM
from proxreplay.proximal.shrinkage.forms import DenseShrinkage, shrinkage_from_state
from proxreplay.proximal.shrinkage.inverse import dense_inverse_
from proxreplay.proximal.shrinkage.twosided import (
    SidesShrinkage,
    balance,
    exact_shrinkage,
    left_shrinkage,
)
from proxreplay.serialization import load_state, save_state
from tests.proximal.states import averages
from tests.reference import assert_same_state, flat_gradient, random

NEWEST = StepOptions(every=1, rebuild=1, decay=0.0, incoming=1.0)


def gram(n, seed, groups=1):
    Z = random(groups, n + 2, n, seed=seed)
    return Z.mT @ Z / n


def dense_metric(A, B, omega):
    """``I + omega B (x) A`` on gradients flattened row by row."""
    return torch.eye(len(A) * len(B), dtype=A.dtype) + omega * torch.kron(B, A)


@settings(max_examples=20, deadline=None)
@given(
    d=st.integers(1, 5),
    out=st.integers(1, 4),
    groups=st.integers(1, 2),
    omega=st.floats(0.01, 100),
    seed=st.integers(0, 50),
)
def test_the_exact_form_is_the_inverse_of_the_dense_metric(d, out, groups, omega, seed):
    A, B, G = gram(d, seed, groups), gram(out, seed + 1, groups), random(groups, out, d, seed=seed)
    made = exact_shrinkage(A, B, omega)
    for g in range(groups):
        P = dense_metric(A[g], B[g], omega)
        expected = torch.linalg.solve(P, G[g].flatten()).view(out, d)
        torch.testing.assert_close(made.apply(G)[g], expected)


def sides(A, B, omega):
    pi, root = balance(A.diagonal(dim1=1, dim2=2), B), omega**0.5
    right = DenseShrinkage(dense_inverse_(A.clone(), root / pi))
    return SidesShrinkage(left_shrinkage(B, root * pi, A.dtype), right)


def test_two_inverses_are_the_inverse_of_the_metric_with_both_cross_terms():
    A, B, G, omega = gram(4, 0), gram(3, 1), random(1, 3, 4, seed=2), 5.0
    pi = ((A[0].trace() / 4) / (B[0].trace() / 3)).sqrt()
    I_A, I_B, root = torch.eye(4).double(), torch.eye(3).double(), omega**0.5
    P = dense_metric(A[0], B[0], omega)
    P = P + torch.kron(I_B, A[0]) * root / pi + torch.kron(B[0], I_A) * root * pi
    expected = torch.linalg.solve(P, G[0].flatten()).view(3, 4)
    torch.testing.assert_close(sides(A, B, omega).apply(G)[0], expected)


@pytest.mark.parametrize("form", [lambda *a: exact_shrinkage(*a), sides], ids=["exact", "inverses"])
def test_forms_restrict_grow_and_are_made_again_from_their_state(form):
    A, B, G, omega = gram(4, 0), gram(3, 1), random(1, 3, 4, seed=2), 5.0
    made = form(A, B, omega)
    kept = torch.tensor([0, 2])
    P = torch.linalg.inv(
        torch.stack([made.apply(row.view(1, 3, 4)).flatten() for row in torch.eye(12).double()])
    )
    columns = (torch.arange(12).view(3, 4)[:, kept]).flatten()
    expected = torch.linalg.solve(P[columns][:, columns], G[0][:, kept].flatten()).view(3, 2)
    torch.testing.assert_close(made.restricted(kept).apply(G[:, :, kept])[0], expected)
    grown = torch.cat([G, random(1, 2, 4, seed=5)], dim=1)
    torch.testing.assert_close(made.apply(grown)[:, :3], made.apply(G))
    assert made.apply(grown).norm() <= grown.norm()
    again = shrinkage_from_state(made.state()).to(torch.device("cpu"))
    assert torch.equal(again.apply(G), made.apply(G))
    assert (again.groups, again.width, again.bytes) == (made.groups, made.width, made.bytes)


def layer_cases():
    yield "Linear", nn.Linear(3, 4), (5, 3)
    yield "Linear without bias", nn.Linear(3, 4, bias=False), (5, 3)
    yield "Linear on sequences", nn.Linear(3, 2), (4, 5, 3)
    yield "Conv2d", nn.Conv2d(2, 3, 2, stride=2, padding=1), (4, 2, 5, 4)
    yield "Conv2d in groups", nn.Conv2d(4, 6, 2, groups=2), (3, 4, 4, 3)
    yield "Conv1d", nn.Conv1d(2, 3, 3), (4, 2, 7)
    yield "ConvTranspose2d", nn.ConvTranspose2d(2, 3, 2, stride=2), (3, 2, 3, 2)
    yield "BatchNorm2d", nn.BatchNorm2d(3, track_running_stats=False), (4, 3, 2, 2)
    yield "GroupNorm", nn.GroupNorm(2, 4), (3, 4, 2)
    yield "InstanceNorm2d", nn.InstanceNorm2d(3, affine=True), (3, 3, 4, 2)
    yield "LayerNorm", nn.LayerNorm(4), (3, 5, 4)
    yield "RMSNorm", nn.RMSNorm(4), (3, 5, 4)


CASES = {name: (layer, shape) for name, layer, shape in layer_cases()}


@pytest.mark.parametrize("name", CASES)
def test_factors_of_a_layer_are_those_of_its_rows_and_output_gradients(name):
    """From the definition: ``A`` from the layer's Jacobian, ``B`` from the outputs' gradients."""
    layer, shape = copy.deepcopy(CASES[name])
    model = nn.Sequential(layer).double().train()
    n, x = shape[0], random(*shape, seed=1)
    rule = KroneckerLPR(model, steps=NEWEST, form="exact", tau=1.0)
    target = random(*model(x).shape, seed=2)
    out = []
    handle = model.register_forward_hook(lambda m, a, o: (o.retain_grad(), out.append(o))[1])
    with rule.watched():
        (model(x) * target).sin().sum().div(n).backward()
    handle.remove()
    rule.step_()
    (one,) = averages(rule).values()
    g = out[0].grad * n
    G, H = one.mean.G / one.weight, one.mean.H / one.weight
    groups = len(G)
    # The Jacobian of one output channel is its rows, whatever they look like.
    p = {k: v.detach() for k, v in layer.named_parameters()}
    J = jacrev(lambda q: functional_call(layer, q, (x,)))(p)
    J = torch.cat([J[k].flatten(g.ndim) for k in p], dim=g.ndim)
    JJ = J.reshape(-1, J.shape[-1])
    JJ = JJ.T @ JJ / n
    channel = -1 if isinstance(layer, nn.Linear | nn.LayerNorm | nn.RMSNorm) else 1
    rows = g.movedim(channel, -1).reshape(-1, g.shape[channel])
    positions = len(rows) / n
    expected = rows.T @ rows / n / positions
    width = g.shape[channel] // groups
    for k in range(groups):
        own = slice(k * width, (k + 1) * width)
        torch.testing.assert_close(H[k], expected[own, own])
    assert torch.allclose(JJ.trace(), G.diagonal(dim1=1, dim2=2).sum() * width)


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double().train()


def true_fisher(model, x):
    """``E_x E_y [grad log p(y|x) grad log p(y|x)']`` over all parameters, from the definition."""
    p = {name: value.detach() for name, value in model.named_parameters()}
    logs = lambda q: functional_call(model, q, (x,)).log_softmax(1)  # noqa: E731
    J = jacrev(logs)(p)
    J = torch.cat([J[name].flatten(2) for name in p], dim=2)  # [n, classes, parameters]
    weights = logs(p).exp()
    return torch.einsum("nc,nci,ncj->ij", weights, J, J) / len(x)


def test_the_head_of_a_network_with_one_example_has_its_exact_fisher_block():
    """With one example the expectation of a Kronecker product is the product of expectations."""
    model = small_net()
    x = random(1, 3, seed=1)
    rule = KroneckerLPR(model, steps=NEWEST, fisher="exact", form="exact", tau=0.5)
    with rule.watched():
        F.cross_entropy(model(x), torch.tensor([1])).backward()
    rule.step_()
    fisher = true_fisher(model, x)
    for site, columns in (("0", range(16)), ("2", range(16, 31))):
        one = averages(rule)[site]
        A, B = one.mean.G[0] / one.weight, one.mean.H[0] / one.weight
        out, d = len(B), len(A)
        block = torch.kron(B, A).view(out, d, out, d)
        # parameters are [weight row by row, bias]; the factor's columns are [row | bias]
        order = [i * d + j for i in range(out) for j in range(d - 1)]
        order += [i * d + d - 1 for i in range(out)]
        block = block.reshape(out * d, out * d)[order][:, order]
        own = torch.tensor(list(columns))
        torch.testing.assert_close(block, fisher[own][:, own])


def test_the_whole_update_solves_with_the_exact_fisher_of_a_small_network():
    """``P`` of the whole network, block by block, for one example; gradients in place."""
    model = small_net()
    x, y, omega = random(1, 3, seed=1), torch.tensor([2]), 4.0
    rule = KroneckerLPR(model, steps=NEWEST, fisher="exact", form="exact", tau=1 / omega)
    with rule.watched():
        F.cross_entropy(model(x), y).backward()
    g, fisher = flat_gradient(model), true_fisher(model, x)
    expected = []
    for own in (slice(0, 16), slice(16, 31)):
        P = torch.eye(own.stop - own.start).double() + omega * fisher[own, own]
        expected.append(omega * torch.linalg.solve(P, g[own]))
    rule.step_()
    torch.testing.assert_close(flat_gradient(model), torch.cat(expected))


def test_an_output_with_logits_has_a_fisher_matrix_too():
    class Named(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            return {"logits": self.net(x)}

    x, found = random(4, 3, seed=1), []
    for wrap in (nn.Sequential, Named):
        model = wrap(small_net())
        rule = KroneckerLPR(model, steps=NEWEST, fisher="exact")
        with rule.watched():
            logits_of(model, x).logsumexp(1).sum().backward()
        rule.step_()
        found.append([one["factor"] for one in rule.state_dict()["layers"].values()])
    assert_same_state(*found)


def test_sampled_labels_give_the_exact_fisher_on_average():
    model = small_net()
    x = random(4, 3, seed=1)
    exact = KroneckerLPR(model, steps=NEWEST, fisher="exact")
    with exact.watched():
        model(x).logsumexp(1).sum().backward()
    exact.step_()
    sampled = KroneckerLPR(
        model, steps=StepOptions(1, 2000, 0.999, incoming=1.0), fisher="sampled", seed=3
    )
    for _ in range(150):
        with sampled.watched():
            model(x).logsumexp(1).sum().backward()
        sampled.step_()
    one, sums = averages(exact)["2"], sampled._sums._B["2"]
    expected = one.mean.H[0] / one.weight
    torch.testing.assert_close(sums[0][0] / sums[1], expected, rtol=0.3, atol=0.05)


def test_the_labels_own_gradients_are_unscaled_and_those_of_accumulated_batches_join():
    """Mixed precision multiplies the loss; accumulation divides it. ``B`` must not notice."""

    def B(scale, parts):
        model = small_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rule = KroneckerLPR(model, steps=NEWEST).attach(optimizer)
        x, y = random(6, 3, seed=1), torch.tensor([0, 1, 2, 0, 1, 2])
        for own in parts:
            loss = F.cross_entropy(model(x[own]), y[own]) * (len(y[own]) / 6)
            (loss * scale).backward()
        for p in model.parameters():
            p.grad /= scale
        optimizer.step()
        one = averages(rule)["0"]
        return one.mean.H / one.weight

    whole = B(1.0, [slice(0, 6)])
    torch.testing.assert_close(B(2.0**16, [slice(0, 6)]), whole)
    torch.testing.assert_close(B(1.0, [slice(0, 2), slice(2, 6)]), whole)
    torch.testing.assert_close(B(2.0**10, [slice(0, 3), slice(3, 6)]), whole)


def test_real_mixed_precision_scaling_is_undone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).train()
    twin = copy.deepcopy(model)
    x, y = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    found = []
    for net, scaler in ((model, torch.amp.GradScaler("cpu")), (twin, None)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        rule = KroneckerLPR(net, steps=NEWEST).attach(optimizer)
        loss = F.cross_entropy(net(x), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        found.append(averages(rule)["0"].mean.H)
    torch.testing.assert_close(*found)


def test_clipped_gradients_are_not_taken_for_scaled_ones():
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = KroneckerLPR(model, steps=NEWEST).attach(optimizer)
    x, y = random(6, 3, seed=1), torch.tensor([0, 1, 2, 0, 1, 2])
    F.cross_entropy(model(x), y).backward()
    for p in model.parameters():
        p.grad *= 0.3
    assert rule._witness.scale(ALONE) == 1.0


def test_a_growing_head_keeps_what_is_known_of_old_outputs():
    torch.manual_seed(0)
    model = mlp(4).train()
    head = model.head
    assert isinstance(head, GrowingHead)
    learner = Learner(model, rule=KroneckerLPR(model, steps=StepOptions(1, 1, 0.5, 1.0)), lr=0.1)
    rng = torch.Generator().manual_seed(0)
    for _ in range(4):
        learner.learn(torch.randn(8, 4, generator=rng), torch.randint(0, 2, (8,), generator=rng))
    before = averages(learner.rule)["head"]
    known, weight = before.mean.H.clone(), before.weight
    learner.learn(torch.randn(8, 4, generator=rng), torch.randint(0, 5, (8,), generator=rng))
    after = averages(learner.rule)["head"]
    assert after.mean.H.shape == (1, 5, 5)
    r = 0.5**3
    old = after.mean.H[:, :2, :2]
    assert (old.diagonal(dim1=1, dim2=2) >= r * known.diagonal(dim1=1, dim2=2) - 1e-6).all()
    assert after.weight > weight


def test_strength_is_relative_so_the_scale_of_the_loss_plays_no_part():
    def preconditioned(scale):
        model = small_net()
        x, y = random(6, 3, seed=1), torch.tensor([0, 1, 2, 0, 1, 2])
        rule = KroneckerLPR(model, 10.0, steps=NEWEST)
        with rule.watched():
            (F.cross_entropy(model(x), y) * scale).backward()
        rule.step_()
        return flat_gradient(model) / scale

    torch.testing.assert_close(preconditioned(1.0), preconditioned(1000.0))


def test_what_cannot_be_two_sided_is_treated_from_one_side_and_says_so():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(7, 8), layer, nn.Flatten(), nn.Linear(24, 3)).train()
    rule = KroneckerLPR(model, steps=NEWEST)
    tokens = torch.randint(0, 7, (5, 3))
    with rule.watched():
        F.cross_entropy(model(tokens), torch.tensor([0, 1, 2, 0, 1])).backward()
    before = flat_gradient(model)
    rule.step_()
    after = flat_gradient(model)
    assert {"0", "1.self_attn.q_proj"} <= set(rule.one_sided)
    assert "3" not in rule.one_sided
    assert set(rule.one_sided) < set(rule.layers)
    assert after.norm() < before.norm()
    assert not rule.untreated


@pytest.mark.parametrize("options", [{}, {"fisher": "sampled"}, {"tau": 0.01, "form": "exact"}])
def test_resumes_bit_by_bit(options, tmp_path):
    def make():
        torch.manual_seed(0)
        model = small_cnn(1, 3, widths=(4, 5)).train()
        return model, KroneckerLPR(model, steps=StepOptions(2, 3, 0.9, 1.0), **options)

    def run(model, rule, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for i in steps:
            rng = torch.Generator().manual_seed(i)
            x, y = torch.randn(6, 1, 6, 6, generator=rng), torch.randint(0, 3, (6,), generator=rng)
            optimizer.zero_grad()
            with rule.watched():
                F.cross_entropy(model(x), y).backward()
            rule.step_()
            optimizer.step()

    model, rule = make()
    run(model, rule, range(5))
    save_state(tmp_path, {"rule": rule.state_dict(), "model": model.state_dict()})
    duplicate = copy.deepcopy(rule)
    assert_same_state(duplicate.state_dict(), rule.state_dict())
    run(model, rule, range(5, 14))
    other, other_rule = make()
    saved = load_state(tmp_path)
    other.load_state_dict(saved["model"])
    other_rule.load_state_dict(saved["rule"])
    run(other, other_rule, range(5, 14))
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def wide_steps_(rule, model, steps):
    """Steps that are each looked at; the directions of the wide layers after each."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.01), []
    for i in steps:
        rng = torch.Generator().manual_seed(i)
        x, y = torch.randn(4, 60, 4, 4, generator=rng), torch.randint(0, 3, (4,), generator=rng)
        optimizer.zero_grad()
        with rule.watched():
            F.cross_entropy(model(x).mean((2, 3)), y).backward()
        rule.step_()
        optimizer.step()
        seen.append([rule.shrinkage(name) for name in ("b", "a")])
    return seen


def wide_net(**options):
    torch.manual_seed(0)
    wide = [nn.Conv2d(60, 60, 3, padding=1, bias=False) for _ in range(2)]
    layers = {"b": wide[0], "relu": nn.ReLU(), "a": wide[1], "head": nn.Conv2d(60, 3, 1)}
    model = nn.Sequential(OrderedDict(layers)).train()
    return model, KroneckerLPR(model, steps=StepOptions(1, 1, 0.9, 1.0), **options)


def test_wide_layers_rest_by_turns_on_the_inputs_side_alone():
    model, rule = wide_net()
    seen = wide_steps_(rule, model, range(RESTS_FROM + 6))
    rested = [
        [now.right is before.right for before, now in zip(*two, strict=True)]
        for two in pairwise(seen)
    ]
    assert not any(map(any, rested[: RESTS_FROM - 1]))
    assert all(a != b for a, b in rested[RESTS_FROM - 1 :]), "one of both"
    assert all(x != y for x, y in zip(*[iter(rested[RESTS_FROM - 1 :])] * 2, strict=True)), "turns"
    assert not any(torch.equal(a[0].left, b[0].left) for a, b in pairwise(seen))
    exact = wide_net(tolerance=0)
    seen = wide_steps_(exact[1], exact[0], range(RESTS_FROM + 3))
    assert len({id(two[0].right) for two in seen}) == RESTS_FROM + 3, "exact ones never rest"


def test_wide_layers_that_rest_resume_bit_by_bit(tmp_path):
    model, rule = wide_net()
    wide_steps_(rule, model, range(RESTS_FROM + 2))
    save_state(tmp_path, {"rule": rule.state_dict(), "model": model.state_dict()})
    wide_steps_(rule, model, range(RESTS_FROM + 2, RESTS_FROM + 7))
    other, again = wide_net()
    saved = load_state(tmp_path)
    other.load_state_dict(saved["model"])
    again.load_state_dict(saved["rule"])
    wide_steps_(again, other, range(RESTS_FROM + 2, RESTS_FROM + 7))
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_gradients_that_are_not_finite_leave_the_average_as_it_is():
    model = small_net()
    rule = KroneckerLPR(model, steps=NEWEST)
    x, y = random(6, 3, seed=1), torch.tensor([0, 1, 2, 0, 1, 2])
    with rule.watched():
        F.cross_entropy(model(x), y).backward()
    rule.step_()
    with rule.watched():
        (F.cross_entropy(model(x), y) * float("inf")).backward()
    rule.step_()
    for one in averages(rule).values():
        assert one.mean.H is None or one.mean.H.isfinite().all()
    for factor in map(rule.shrinkage, rule.layers):
        assert factor.apply(torch.ones(factor.groups, 1, factor.width).double()).isfinite().all()


def test_steps_are_never_longer_than_plain_ones_whatever_the_scale_of_inputs():
    """Defaults only: no eigenvalue of P is below 1, so it is stable where SGD is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    rule = KroneckerLPR(model)
    rng = torch.Generator().manual_seed(1)
    for i in range(40):
        x = torch.randn(10, 20, generator=rng) * 10.0 ** (i % 4) + 5
        y = x[:, :4].argmax(1) if i < 20 else x[:, 4:8].argmax(1)
        optimizer.zero_grad()
        with rule.watched():
            F.cross_entropy(model(x), y).backward()
        before = flat_gradient(model)
        rule.step_()
        assert flat_gradient(model).norm() <= before.norm() * (1 + 1e-5)
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_bad_options_and_outputs_are_refused_by_name():
    with pytest.raises(InputError, match=r"klpr\.form=dense"):
        KroneckerLPR(small_net(), form="dense")
    with pytest.raises(InputError, match=r"klpr\.tau=0"):
        KroneckerLPR(small_net(), tau=0.0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Unflatten(1, (2, 2))).train()
    rule = KroneckerLPR(model, fisher="sampled", steps=NEWEST)
    with pytest.raises(InputError, match="logits"), rule.watched():
        model(torch.randn(2, 3))


def test_a_learner_learns_with_it_and_parts_are_balanced():
    torch.manual_seed(0)
    model = mlp(4)
    rule = KroneckerLPR(model)
    learner = Learner(model, rule=rule, lr=0.5)
    rng = torch.Generator().manual_seed(0)
    for i in range(12):
        y = torch.randint(i // 4 * 2, i // 4 * 2 + 2, (10,), generator=rng)
        x = torch.randn(10, 4, generator=rng) + F.one_hot(y % 4, 4) * 3
        learner.learn(x, y)
    assert set(rule.layers) == {"linear1", "linear2", "head"}
    incoming = Batch(torch.randn(4, 4), torch.tensor([0, 0, 1, 1]))
    parts = rule._parts(incoming, incoming)
    assert [part.weight for part in parts] == [1.0, 3.0]


def weighed_net():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(48, 600), nn.Tanh(), nn.Linear(600, 3)).double().train()


def watched_steps_(rule, model, steps=3, widest=None):
    """Steps with parts of other weights; ``widest=0`` sums each part by itself."""
    made = rule._new_watch
    if widest is not None:
        rule._new_watch = lambda: vars(watch := made()).update(widest=widest) or watch
    for i in range(steps):
        x, y = random(7, 2, 4, 4, seed=i), torch.arange(7) % (2 + (i > 1))
        new, old = Batch(x[:3], y[:3] * 0), Batch(x[3:], y[3:])
        model.zero_grad()
        with rule.watched(new, old):
            F.cross_entropy(model(x), y).backward()
        rule.step_()


@pytest.mark.parametrize("steps", [NEWEST, StepOptions(1, 3, 0.5, incoming=0.3)])
def test_parts_in_one_matrix_are_those_of_parts_added_up(steps):
    """Weighed inputs, with and without bias, few and many rows, against one sum for each part."""
    found = []
    for widest in (None, 0):
        model = weighed_net()
        rule = KroneckerLPR(model, steps=steps)
        watched_steps_(rule, model, widest=widest)
        sums = rule._sums.state()["collectors"]
        assert widest is None or "together" not in sums
        found.append({name: one.mean for name, one in averages(rule).items()})
    together, apart = found
    assert together.keys() == apart.keys() == {"0", "1", "4", "6"}
    for name, one in together.items():
        a, b = (o.dense() if hasattr(o, "dense") else o for o in (one, apart[name]))
        torch.testing.assert_close(a.G, b.G, rtol=0, atol=1e-12, msg=name)
        torch.testing.assert_close(a.H, b.H, rtol=0, atol=1e-12, msg=name)
        assert a.rows == pytest.approx(b.rows)


def test_a_window_that_was_saved_by_parts_goes_on(tmp_path):
    """As earlier versions saved it: a sum for each part, without weights."""
    options = StepOptions(1, 4, 0.5, incoming=0.3)
    models, rules = [weighed_net(), weighed_net()], []
    for model, widest in zip(models, (None, 0), strict=True):
        rules.append(KroneckerLPR(model, steps=options))
        watched_steps_(rules[-1], model, 3, widest=widest)
    save_state(tmp_path, rules[1].state_dict())
    older = load_state(tmp_path)
    assert set(older["step"]["sums"]["collectors"]) == {"incoming", "replay"}
    again = KroneckerLPR(models[1], steps=options)
    again.load_state_dict(older)
    models[1].load_state_dict(models[0].state_dict())
    for rule, model in ((rules[0], models[0]), (again, models[1])):
        watched_steps_(rule, model, 3)
    for name, one in averages(rules[0]).items():
        a, b = (
            o.dense() if hasattr(o, "dense") else o for o in (one.mean, averages(again)[name].mean)
        )
        torch.testing.assert_close(a.G, b.G, rtol=0, atol=1e-10, msg=name)


def test_without_classes_the_gradients_of_the_loss_that_was_given_count():
    """Regression: no Fisher matrix, but ``B`` from the loss's own gradients per example."""
    model = small_net()
    x, target = random(5, 3, seed=1), random(5, 3, seed=2)
    rule = KroneckerLPR(model, steps=NEWEST)
    with rule.watched():
        output = model(x)
        (output - target).square().sum(1).mean().backward()
    rule.step_()
    g = 2 * (output - target).detach()
    one = averages(rule)["2"]
    torch.testing.assert_close(one.mean.H[0] / one.weight, g.T @ g / 5)
    images = nn.Sequential(model, nn.Unflatten(1, (3, 1)))
    exact = KroneckerLPR(images, fisher="exact")
    with (
        exact.watched(),
        pytest.raises(InputError, match="fisher='exact' takes the model's output as logits"),
    ):
        images(x)


def test_a_batch_of_one_and_a_frozen_layer():
    model = small_net()
    model[0].weight.requires_grad_(False)
    rule = KroneckerLPR(model, steps=NEWEST)
    x = random(1, 3, seed=1)
    with rule.watched():
        F.cross_entropy(model(x), torch.tensor([1])).backward()
    before = flat_gradient(model)
    rule.step_()
    assert rule.layers["0"].parameters == ("0.bias",)
    assert rule.layers["2"].parameters == ("2.weight", "2.bias")
    assert model[0].weight.grad is None
    after = flat_gradient(model)
    assert 0 < after.norm() < before.norm()
    assert torch.isfinite(after).all()
