"""GPM and SGP against their own definition with singular value decompositions, and Jacobians."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from proxreplay.errors import InputError, RefreshError
from proxreplay.models import mlp, small_cnn
from proxreplay.proximal import GPM, SGP
from proxreplay.proximal.rules.gpm import grow, importance, leading
from tests.reference import fill_gradients_, flat_gradient, module_jacobian, random, shake_


def decaying(d, n, seed=0):
    """A representation matrix ``[d, n]`` with singular values that fall by halves."""
    U, _, Vt = torch.linalg.svd(random(d, n, seed=seed), full_matrices=False)
    return U @ torch.diag(0.5 ** torch.arange(min(d, n)).double()) @ Vt


def gpm_by_definition(tasks, energies):
    """The published algorithm: SVDs of the representation matrices ``R: [d, n]`` of every task."""
    M = None
    for R, energy in zip(tasks, energies, strict=True):
        total = (R**2).sum()
        if M is None:
            U, s, _ = torch.linalg.svd(R, full_matrices=False)
            k = next(k for k in range(len(s) + 1) if (s[:k] ** 2).sum() >= energy * total)
            M = U[:, :k]
        else:
            residual = R - M @ M.T @ R
            U, s, _ = torch.linalg.svd(residual, full_matrices=False)
            held = total - (residual**2).sum()
            k = next(k for k in range(len(s) + 1) if held + (s[:k] ** 2).sum() >= energy * total)
            M = torch.cat([M, U[:, :k]], dim=1)[:, : len(R)]
    return M


def sgp_by_definition(tasks, energy, a):
    """The published accumulation of importances, from SVDs."""
    M = importances = None
    for R in tasks:
        total = (R**2).sum()
        if M is None:
            U, s, _ = torch.linalg.svd(R, full_matrices=False)
            k = next(k for k in range(len(s) + 1) if (s[:k] ** 2).sum() >= energy * total)
            M, s = U[:, :k], s[:k]
            importances = (a + 1) * s / (a * s + s.max())
            continue
        Uc, Sc, _ = torch.linalg.svd(M @ M.T @ R, full_matrices=False)
        s_old = ((M.T @ Uc) ** 2 @ Sc**2).sqrt()
        residual = R - M @ M.T @ R
        U, s, _ = torch.linalg.svd(residual, full_matrices=False)
        held = total - (residual**2).sum()
        k = next(k for k in range(len(s) + 1) if held + (s[:k] ** 2).sum() >= energy * total)
        both = torch.cat([s_old, s[:k]])
        new = (a + 1) * both / (a * both + both.max())
        new[: len(importances)] += importances
        M, importances = torch.cat([M, U[:, :k]], dim=1), new.clamp(0, 1)
    return M, importances


def rule_on(tasks, rule, **options):
    """The factor of a bias-free Linear after a refresh on every task."""
    layer = nn.Linear(len(tasks[0]), 2, bias=False).double()
    made = rule(layer, accumulate=True, **options)
    for R in tasks:
        made.refresh(R.T.contiguous())
    state = made.state_dict()["layers"][""]["factor"]
    return state["U"][0], state["f"][0]


@settings(deadline=None, max_examples=30)
@given(
    d=st.integers(2, 9),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    energy=st.floats(0.3, 0.995),
    growth=st.sampled_from([0.0, 0.001]),
    seed=st.integers(0, 10**6),
)
def test_gpm_is_the_published_algorithm(d, sizes, energy, growth, seed):
    tasks = [decaying(d, n, seed + i) for i, n in enumerate(sizes)]
    M = gpm_by_definition(tasks, [min(energy + growth * t, 1) for t in range(len(tasks))])
    U, f = rule_on(tasks, GPM, energy=energy, energy_growth=growth)
    assert U.shape == M.shape
    assert torch.equal(f, torch.ones_like(f))
    torch.testing.assert_close(U.T @ U, torch.eye(U.shape[1]).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(U @ U.T, M @ M.T, rtol=0, atol=1e-7)


@settings(deadline=None, max_examples=30)
@given(
    d=st.integers(2, 9),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    energy=st.floats(0.3, 0.995),
    scale=st.sampled_from([0.0, 1.0, 10.0]),
    seed=st.integers(0, 10**6),
)
def test_sgp_is_the_published_algorithm(d, sizes, energy, scale, seed):
    tasks = [decaying(d, n, seed + i) for i, n in enumerate(sizes)]
    M, importances = sgp_by_definition(tasks, energy, scale)
    U, f = rule_on(tasks, SGP, energy=energy, scale=scale)
    assert U.shape == M.shape
    expected = M @ torch.diag(importances) @ M.T
    torch.testing.assert_close(U @ torch.diag(f) @ U.T, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("energy", "k"), [(0.5, 1), (0.75, 1), (0.76, 2), (0.9, 2), (0.99, 4), (1.0, 5)]
)
def test_as_few_directions_as_hold_the_energy(energy, k):
    G = torch.diag(torch.tensor([0.1875, 0.75, 0.01171875, 0.046875, 0.00390625]).double())[None]
    s, U = leading(G, energy)
    assert U.shape == (1, 5, k)
    assert s.shape == (1, k)
    assert s[0, 0] ** 2 == pytest.approx(0.75)


def test_a_layer_that_sees_only_zeros_keeps_its_gradient():
    s, U = leading(torch.zeros(2, 3, 3).double(), 0.97)
    assert s.shape == (2, 0)
    assert U.shape == (2, 3, 0)
    layer = nn.Linear(3, 2, bias=False)
    for rule in (GPM(layer, 1.0), SGP(layer, 1.0), GPM(layer, 1.0, accumulate=True)):
        rule.refresh(torch.zeros(4, 3))
        fill_gradients_(layer)
        g = layer.weight.grad.clone()
        rule.precondition_()
        assert torch.equal(layer.weight.grad, g)


def test_groups_that_need_different_numbers_of_directions():
    G = torch.stack(
        [torch.diag(torch.tensor(e).double()) for e in ([4, 0, 0], [1, 1, 1], [0, 2, 2])]
    )
    M, f, s = grow(G.new_zeros(3, 3, 0), G.new_zeros(3, 0), G, 1.0)
    assert (s > 0).sum(dim=1).tolist() == [1, 3, 2]
    f = (s > 0).double()
    more = torch.stack(
        [torch.diag(torch.tensor(e).double()) for e in ([0, 9, 0], [1, 1, 1], [1, 0, 0])]
    )
    M, f, s = grow(M, f, more, 1.0)
    there = (f > 0) | (s > 0)
    assert there.sum(dim=1).tolist() == [2, 3, 3]
    for g in range(3):
        kept = M[g][:, there[g]]
        torch.testing.assert_close(kept.T @ kept, torch.eye(kept.shape[1]).double())
        assert torch.equal(M[g][:, ~there[g]], torch.zeros(3, int((~there[g]).sum())).double())


def test_a_basis_never_has_more_directions_than_there_are():
    layer = nn.Linear(4, 2)
    gpm = GPM(layer, 1.0, accumulate=True)
    for seed in range(5):
        gpm.refresh(random(20, 4, seed=seed).float())
    assert gpm.rank == {"": 5}


@pytest.mark.parametrize("a", [0.0, 1.0, 10.0, 1e6])
def test_importance_rises_from_zero_to_one(a):
    s = torch.tensor([[4.0, 2.0, 1.0, 0.0]]).double()
    f = importance(s, a)
    assert f[0, 0] == 1
    assert f[0, 3] == 0
    assert (f.diff() < 0).all() or a == 1e6
    torch.testing.assert_close(f[0, 1], torch.tensor((a + 1) * 2 / (a * 2 + 4)).double())


LAYERS = {
    "linear": (nn.Linear(5, 3), (3, 5)),
    "linear on sequences": (nn.Linear(6, 2), (2, 2, 6)),
    "convolution": (nn.Conv2d(3, 4, 3, stride=2), (2, 3, 5, 5)),
    "grouped convolution": (nn.Conv2d(4, 6, 3, groups=2), (2, 4, 4, 4)),
    "1-d convolution": (nn.Conv1d(3, 2, 3), (2, 3, 4)),
    "transposed convolution": (nn.ConvTranspose2d(3, 2, 2), (1, 3, 2, 2)),
    "batch norm": (nn.BatchNorm1d(4), (1, 4)),
    "layer norm": (nn.LayerNorm(4), (1, 4)),
    "embedding": (nn.Embedding(6, 2), None),
    "attention": (nn.MultiheadAttention(4, 2, batch_first=True), (1, 3, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_outputs_of_what_is_remembered_do_not_move_whatever_the_layer(name):
    """With all energy held, what is left of a gradient is in the null space of the Jacobian."""
    layer, shape = LAYERS[name]
    layer = shake_(copy.deepcopy(layer))
    x = torch.tensor([[0, 3], [3, 5]]) if shape is None else random(*shape)
    args = (x, x, x) if name == "attention" else (x,)
    gpm = GPM(layer, 1.0, norms="treat")
    gpm.refresh([args])
    assert gpm.untreated == {}
    g = fill_gradients_(layer)
    gpm.precondition_()
    after = flat_gradient(layer)
    if name == "attention":  # its output is not linear in all its maps together
        assert 0 < after.norm() < g.norm()
        return
    J = module_jacobian(layer, *args)
    torch.testing.assert_close(after, g - torch.linalg.pinv(J) @ (J @ g), rtol=0, atol=1e-9)
    assert (J @ after).abs().max() < 1e-9
    assert 0 < after.norm() < g.norm()


def test_a_step_leaves_the_network_as_it_was_on_stored_examples():
    """Layer by layer nothing moves, so nothing moves at the end, however large the step."""
    model = mlp(12, 3, hidden=(16, 16))
    memory = torch.randn(8, 12)
    gpm = GPM(model, 1.0)
    gpm.refresh(memory)
    before = model(memory).detach()
    new = torch.randn(5, 12)
    old_output = model(new).detach()
    model(new).square().sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    gpm.attach(optimizer)
    optimizer.step()
    torch.testing.assert_close(model(memory), before, rtol=0, atol=1e-4)
    assert (model(new) - old_output).abs().max() > 1e-2


@pytest.mark.parametrize("free", ["linear1", "linear2", "head"])
def test_one_layer_left_free_is_enough_to_move_what_was_learned(free):
    """Why a single head for all classes has to be projected as well."""
    torch.manual_seed(0)
    model = mlp(12, 3, hidden=(16, 16))
    memory, new = torch.randn(8, 12), torch.randn(5, 12)
    gpm = GPM(model, 1.0, exclude=[free])
    gpm.refresh(memory)
    before = model(memory).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    gpm.attach(optimizer)
    model(new).square().sum().backward()
    optimizer.step()
    assert (model(memory) - before).abs().max() > 1e-2


def test_made_anew_the_directions_are_those_of_the_last_memory_only():
    layer = nn.Linear(4, 2, bias=False).double()
    gpm = GPM(layer, 1.0)
    first, second = torch.eye(4).double()[:1], torch.eye(4).double()[1:3]
    gpm.refresh(first)
    gpm.refresh(second)
    layer.weight.grad = torch.ones(2, 4).double()
    gpm.precondition_()
    expected = torch.tensor([1, 0, 0, 1]).double().expand(2, -1)
    torch.testing.assert_close(layer.weight.grad, expected)
    grows = GPM(layer, 1.0, accumulate=True)
    grows.refresh(first)
    grows.refresh(second)
    layer.weight.grad = torch.ones(2, 4).double()
    grows.precondition_()
    expected = torch.tensor([0, 0, 0, 1]).double().expand(2, -1)
    torch.testing.assert_close(layer.weight.grad, expected)


class Experts(nn.Module):
    """Two layers of which every example uses one."""

    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)

    def forward(self, x):
        return self.low(x) if x.sum() < 0 else self.high(x)


def test_accumulated_directions_stay_where_new_examples_never_come():
    gpm = GPM(Experts(), 1.0, accumulate=True)
    gpm.refresh(-torch.ones(2, 3))
    assert set(gpm.layers) == {"low"}
    assert "high" in gpm.untreated
    gpm.refresh(torch.ones(2, 3))
    assert set(gpm.layers) == {"low", "high"}
    assert gpm.untreated == {}


@pytest.mark.parametrize("rule", [GPM, SGP], ids=lambda rule: rule.__name__)
def test_norm_layers_follow_the_option(rule):
    model = small_cnn(1, 3, widths=(4, 5))
    x = torch.randn(6, 1, 8, 8)
    plain, frozen, treated = (rule(model, 0.9, norms=n) for n in ("plain", "freeze", "treat"))
    for one in (plain, frozen, treated):
        one.refresh(x)
    assert set(plain.untreated) == {"norm1", "norm2"}
    assert set(frozen.layers) == set(treated.layers) == {"conv1", "norm1", "conv2", "norm2", "head"}
    fill_gradients_(model)
    g = model.norm1.weight.grad.clone()
    plain.precondition_()
    assert torch.equal(model.norm1.weight.grad, g)
    frozen.precondition_()
    assert not model.norm1.weight.grad.any()
    assert not model.norm2.bias.grad.any()
    assert model.conv1.weight.grad.any()


def test_a_parameter_that_does_not_move_leaves_the_problem_of_the_others():
    """Groups of different rank, a frozen bias, and directions that are only padding."""
    layer = shake_(nn.Conv2d(4, 4, 1, groups=2))
    x = random(6, 4, 1, 1)
    x[:, 1] = x[:, 0]  # the first group has one direction fewer
    for rule in (GPM(layer, 1.0), SGP(layer, 0.95)):
        rule.refresh(x)
        factor = rule.shrinkage("")
        Lambda = torch.eye(3).double() - factor.U @ torch.diag_embed(factor.f) @ factor.U.mT
        fill_gradients_(layer)
        G = layer.weight.grad.reshape(2, 2, 2).clone()
        layer.bias.grad = None
        rule.precondition_()
        rest = torch.linalg.pinv(Lambda[:, 2:, 2:], hermitian=True)
        alone = Lambda[:, :2, :2] - Lambda[:, :2, 2:] @ rest @ Lambda[:, 2:, :2]
        expected = (G @ alone).reshape(4, 2, 1, 1)
        torch.testing.assert_close(layer.weight.grad, expected, rtol=0, atol=1e-9)


def test_a_layer_that_has_changed_asks_for_a_new_rule():
    layer = nn.Linear(3, 2)
    gpm = GPM(layer, accumulate=True)
    gpm.refresh(torch.randn(5, 3))
    before = gpm.state_dict()
    layer.bias.requires_grad_(False)
    with pytest.raises(RefreshError, match="had 4 columns in 1 groups, but has 3 in 1 now"):
        gpm.refresh(torch.randn(5, 3))
    assert gpm.state_dict()["refreshes"] == 1
    assert torch.equal(
        gpm.state_dict()["layers"][""]["factor"]["U"], before["layers"][""]["factor"]["U"]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"energy": 0.0}, "energy=0.0"),
        ({"energy": 1.1}, "energy=1.1"),
        ({"energy": float("nan")}, "energy=nan"),
        ({"energy_growth": -0.1, "accumulate": True}, "energy_growth=-0.1"),
        ({"energy_growth": 0.003}, "without accumulate=True"),
        ({"norms": "drop"}, "norms=drop"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"include": ["haed"]}, "did you mean 'head'"),
    ],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("rule", [GPM, SGP], ids=lambda rule: rule.__name__)
def test_options_are_checked(rule, options, message):
    with pytest.raises(InputError, match=message):
        rule(mlp(3, 2, hidden=(4,)), **options)


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf")])
def test_the_scale_is_checked(scale):
    with pytest.raises(InputError, match="scale="):
        SGP(nn.Linear(1, 1), scale=scale)
