"""OWM and AOP against the rank-one recursion, the closed form, and Jacobians of batch means."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from proxreplay import Batch
from proxreplay.errors import InputError, RefreshError
from proxreplay.models import mlp, small_cnn
from proxreplay.proximal import AOP, OWM, AdaptiveAlpha, DecayingAlpha, StreamProgress
from proxreplay.proximal.rules.owm import absorb
from tests.reference import fill_gradients_, flat_gradient, jacobian, random, shake_, trained


def batch_of(inputs):
    return Batch(inputs, torch.zeros(len(inputs), dtype=torch.int64))


def sequential(P, R, alpha):
    """The method's own recursion, one row after the other: ``P <- P - k k' / (alpha + r k)``."""
    for r, a in zip(R, alpha, strict=True):
        k = P @ r
        P = P - torch.outer(k, k) / (a + r @ k)
    return P


def block(P, R, alpha):
    """The block recursion on P itself."""
    inner = torch.diag(alpha) + R @ P @ R.T
    return P - P @ R.T @ torch.linalg.solve(inner, R @ P)


@settings(deadline=None, max_examples=40)
@given(
    d=st.integers(1, 8),
    rows=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    exponent=st.floats(-4, 0),
    seed=st.integers(0, 10**6),
)
def test_the_root_recursion_is_the_sequential_one_the_block_one_and_the_closed_form(
    d, rows, exponent, seed
):
    S = torch.eye(d).double()[None]
    P, Q, precision = torch.eye(d).double(), torch.eye(d).double(), torch.eye(d).double()
    for i, count in enumerate(rows):
        R = random(1, count, d, seed=seed + i)
        alpha = 10**exponent * (1 + random(1, count, seed=seed + i + 99).abs())
        S = absorb(S, R, alpha)
        P, Q = sequential(P, R[0], alpha[0]), block(Q, R[0], alpha[0])
        precision = precision + (R[0] / alpha[0][:, None]).T @ R[0]
    found = (S @ S.mT)[0]
    torch.testing.assert_close(found, torch.linalg.inv(precision), rtol=0, atol=1e-9)
    torch.testing.assert_close(found, P, rtol=0, atol=1e-9)
    torch.testing.assert_close(found, Q, rtol=0, atol=1e-9)


def test_groups_are_absorbed_each_for_itself():
    R, alpha = random(3, 4, 5), random(3, 4, seed=1).abs() + 0.1
    S = absorb(torch.eye(5).double().expand(3, -1, -1), R, alpha)
    for g in range(3):
        P = sequential(torch.eye(5).double(), R[g], alpha[g])
        torch.testing.assert_close((S[g] @ S[g].T), P, rtol=0, atol=1e-10)


def rows_in_a_subspace(d, used, rows, steps):
    """Rows that leave ``d - used`` directions alone, where subtracting from P goes wrong."""
    rng = torch.Generator().manual_seed(0)
    mix = torch.randn(used, d, generator=rng)
    for _ in range(steps):
        yield (torch.randn(rows, used, generator=rng) + 0.5) @ mix


@pytest.mark.parametrize(("alpha", "error"), [(1e-5, 5e-2), (1e-3, 5e-4)], ids=["1e-5", "1e-3"])
def test_ten_thousand_float32_updates_stay_symmetric_and_positive_definite(alpha, error):
    d = 24
    S = torch.eye(d)[None]
    precision = torch.eye(d).double()
    for R in rows_in_a_subspace(d, d // 2, 1, 10_000):
        S = absorb(S, R[None], torch.full((1, 1), alpha))
        precision += R.double().T @ R.double() / alpha
    P = S[0].double() @ S[0].double().T
    eigenvalues = torch.linalg.eigvalsh(P)
    assert S.dtype == torch.float32
    assert torch.equal(P, P.T)
    assert eigenvalues.min() > 0
    assert eigenvalues.max() < 1 + 1e-5
    torch.testing.assert_close(P, torch.linalg.inv(precision), rtol=0, atol=error)


def test_positive_definite_where_updates_of_P_itself_are_not():
    """Why a root is kept: its twin has negative eigenvalues soon, re-symmetrised or not."""
    d, alpha = 64, torch.full((9,), 1e-5)
    P, S = torch.eye(d), torch.eye(d)[None]
    for R in rows_in_a_subspace(d, 16, 9, 100):
        P = block(P, R, alpha)
        P = (P + P.T) / 2
        S = absorb(S, R[None], alpha[None])
    assert torch.linalg.eigvalsh(P.double()).min() < 0
    eigenvalues = torch.linalg.svdvals(S[0].double()) ** 2
    assert eigenvalues.min() > 0
    assert eigenvalues.max() < 1 + 1e-5


LAYERS = {
    "linear": (nn.Linear(5, 3), (4, 5)),
    "linear without bias": (nn.Linear(5, 3, bias=False), (4, 5)),
    "linear on sequences": (nn.Linear(3, 2), (4, 6, 3)),
    "convolution": (nn.Conv2d(2, 3, 3, stride=2, padding=1), (4, 2, 5, 5)),
    "padded otherwise": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (4, 2, 5, 5)),
    "grouped convolution": (nn.Conv2d(4, 6, 3, groups=2, dilation=2), (3, 4, 6, 6)),
    "1-d convolution": (nn.Conv1d(2, 3, 3), (4, 2, 7)),
    "transposed convolution": (nn.ConvTranspose2d(2, 3, 3, stride=2), (3, 2, 3, 3)),
    "batch norm": (nn.BatchNorm2d(3), (4, 3, 2, 2)),
    "layer norm": (nn.LayerNorm(4), (3, 2, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_against_the_jacobian_of_its_mean_output(name):
    """The rows of a batch mean are the Jacobian of the batch mean of the outputs."""
    layer, shape = LAYERS[name]
    layer = shake_(copy.deepcopy(layer))
    owm = OWM(layer, alpha=0.3, norms="treat")
    precision = torch.eye(sum(p.numel() for p in layer.parameters())).double()
    for seed in range(3):
        x = random(*shape, seed=seed)
        owm.observe(batch_of(x))

        def mean_output(parameters, x=x):
            return torch.func.functional_call(layer, parameters, (x,)).mean(dim=0)

        J = jacobian(mean_output, trained(layer))
        precision += J.T @ J / 0.3
    g = fill_gradients_(layer)
    owm.precondition_()
    expected = torch.linalg.solve(precision, g)
    torch.testing.assert_close(flat_gradient(layer), expected, rtol=0, atol=1e-10)


def test_embeddings_count_the_mean_of_their_tokens():
    layer = nn.Embedding(4, 3).double()
    owm = OWM(layer, alpha=0.5)
    owm.observe(batch_of(torch.tensor([[0, 1], [0, 2]])))  # means: 1, 0.5, 0.5, 0 in two positions
    fill_gradients_(layer)
    g = layer.weight.grad.clone()
    owm.precondition_()
    shrink = 1 / (1 + torch.tensor([1.0, 0.25, 0.25, 0.0]).double() / 0.5)
    torch.testing.assert_close(layer.weight.grad, g * shrink[:, None])


def test_a_weight_that_modules_share_gets_the_rows_of_all():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = shake_(nn.Sequential(first, nn.Tanh(), second))
    owm = OWM(model, alpha=0.3)
    x = random(4, 3)
    owm.observe(batch_of(x))
    inner = model[1](model[0](x)).detach()
    one, zero = torch.ones(1).double(), torch.zeros(1).double()
    R = torch.stack([torch.cat([x.mean(0), one, zero]), torch.cat([inner.mean(0), zero, one])])
    P = torch.linalg.inv(torch.eye(5).double() + R.T @ R / 0.3)
    fill_gradients_(model)
    G = torch.cat([first.weight.grad, first.bias.grad[:, None], second.bias.grad[:, None]], dim=1)
    owm.precondition_()
    after = torch.cat([first.weight.grad, first.bias.grad[:, None], second.bias.grad[:, None]], 1)
    torch.testing.assert_close(after, G @ P, rtol=0, atol=1e-10)


def test_the_very_step_that_observes_is_projected_already():
    model = nn.Linear(3, 2, bias=False).double()
    x = random(1, 3)
    model(x).sum().backward()
    owm = OWM(model, alpha=1e-9)
    owm.observe(batch_of(x))
    owm.precondition_()
    assert model.weight.grad.abs().max() < 1e-7


def test_progress_counts_observations_and_survives_saving():
    model = nn.Linear(3, 2).double()
    owm = OWM(model, alpha=DecayingAlpha(1e-4, StreamProgress(4)))
    precision = torch.eye(4).double()
    for step in range(6):
        x = random(5, 3, seed=step)
        if step == 3:
            state, owm = owm.state_dict(), OWM(model, DecayingAlpha(1e-4, StreamProgress(4)))
            owm.load_state_dict(state)
        owm.observe(batch_of(x))
        r = torch.cat([x.mean(0), torch.ones(1).double()])
        precision += torch.outer(r, r) / 1e-4 ** min(step / 4, 1)
    fill_gradients_(model)
    G = torch.cat([model.weight.grad, model.bias.grad[:, None]], dim=1)
    owm.precondition_()
    after = torch.cat([model.weight.grad, model.bias.grad[:, None]], dim=1)
    torch.testing.assert_close(after, G @ torch.linalg.inv(precision), rtol=0, atol=1e-9)


def test_aop_takes_its_alpha_from_the_row_without_the_one_of_the_bias():
    model = nn.Linear(3, 2).double()
    aop = AOP(model, AdaptiveAlpha(lambda observed: 0.5))
    x = random(5, 3)
    aop.observe(batch_of(x))
    row = x.mean(0)
    alpha = (row.mean() ** 4 + row.var()) ** 0.5
    r = torch.cat([row, torch.ones(1).double()])
    expected = torch.linalg.inv(torch.eye(4).double() + torch.outer(r, r) / alpha)
    S = aop.state_dict()["layers"][""]["factor"]["S"][0]
    torch.testing.assert_close(S @ S.T, expected)


def test_layers_may_have_an_alpha_of_their_own():
    model = mlp(3, 2, hidden=(4,)).double()
    x = random(5, 3)
    plain = OWM(model, alpha=0.1)
    plain.observe(batch_of(x))
    mixed = OWM(model, alpha=1e9, overrides={"linear1": 0.1, nn.Linear: 7.0})
    mixed.observe(batch_of(x))
    alone = OWM(model, alpha=7.0)
    alone.observe(batch_of(x))
    factors = [
        {name: one["factor"]["S"] for name, one in rule.state_dict()["layers"].items()}
        for rule in (plain, mixed, alone)
    ]
    assert torch.equal(factors[1]["linear1"], factors[0]["linear1"])
    assert torch.equal(factors[1]["head"], factors[2]["head"])


def test_norm_layers_are_named_unless_treated():
    model = small_cnn(1, 3, widths=(4, 5))
    x = torch.randn(6, 1, 8, 8)
    owm = OWM(model)
    assert owm.untreated["head"] == "no batch observed yet."
    owm.observe(batch_of(x))
    assert set(owm.untreated) == {"norm1", "norm2"}
    assert "norms='treat'" in owm.untreated["norm1"]
    assert set(owm.layers) == {"conv1", "conv2", "head"}
    treated = OWM(model, norms="treat")
    treated.observe(batch_of(x))
    assert set(treated.layers) == {"conv1", "norm1", "conv2", "norm2", "head"}
    assert treated.untreated == {}


class Constant(nn.Module):
    """Calls a layer on learned positions that belong to no example."""

    def __init__(self):
        super().__init__()
        self.inner, self.unused, self.outer = nn.Linear(2, 3), nn.Linear(2, 2), nn.Linear(3, 2)
        self.register_buffer("grid", torch.randn(5, 2))

    def forward(self, x):
        return self.outer(x + self.inner(self.grid).mean(0))


def test_what_has_no_batch_mean_or_is_never_called_is_named():
    owm = OWM(Constant(), max_dim=3)
    owm.observe(batch_of(torch.randn(4, 3)))
    assert owm.layers == {}
    assert owm.untreated["inner"] == "5 rows for 4 examples; their mean is not defined."
    assert owm.untreated["unused"] == "not called in the forward pass of any batch observed."
    assert owm.untreated["outer"] == "d = 4 is more than max_dim = 3."


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(self.tokens(x).mean(dim=1))


@pytest.mark.parametrize("rule", [OWM, AOP], ids=lambda rule: rule.__name__)
def test_an_embedding_tied_to_the_head_is_named(rule):
    model = Tied()
    made = rule(model)
    x = torch.randint(0, 6, (5, 3))
    model(x).sum().backward()
    g = model.head.weight.grad.clone()
    made.observe(batch_of(x))
    made.precondition_()
    assert list(made.untreated.values()) == [
        "an Embedding shares its weight; only LPR treats both."
    ]
    assert torch.equal(model.head.weight.grad, g)


def test_a_batch_that_is_not_finite_is_not_absorbed():
    model = mlp(3, 2, hidden=(4,))
    owm = OWM(model)
    owm.observe(batch_of(torch.randn(5, 3)))
    before = copy.deepcopy(owm.state_dict())
    x = torch.randn(5, 3)
    x[2, 1] = float("nan")
    with pytest.raises(RefreshError, match="the inputs of 'linear1' are not finite"):
        owm.observe(batch_of(x))
    after = owm.state_dict()
    assert after["observed"] == before["observed"] == 1
    for name, one in before["layers"].items():
        assert torch.equal(one["factor"]["S"], after["layers"][name]["factor"]["S"])


def test_a_layer_that_has_changed_asks_for_a_new_rule():
    model = nn.Sequential(nn.Linear(3, 2))
    owm = OWM(model)
    owm.observe(batch_of(torch.randn(5, 3)))
    model[0].bias.requires_grad_(False)
    with pytest.raises(RefreshError, match="had 4 columns in 1 groups, but has 3 in 1 now"):
        owm.observe(batch_of(torch.randn(5, 3)))


def test_half_precision_models_keep_float32_roots():
    model = nn.Linear(3, 2).bfloat16()
    owm = OWM(model)
    owm.observe(batch_of(torch.randn(5, 3).bfloat16()))
    assert owm.state_dict()["layers"][""]["factor"]["S"].dtype == torch.float32
    model(torch.randn(5, 3).bfloat16()).sum().backward()
    owm.precondition_()
    assert model.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.0}, "alpha=0.0"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"norms": "freeze"}, "norms=freeze"),
        ({"overrides": {"nowhere": 0.1}}, "no module 'nowhere'"),
        ({"overrides": {"linear1": -1.0}}, "alpha=-1.0"),
        ({"max_dim": 0}, "max_dim=0"),
        ({"exclude": ["haed"]}, "did you mean 'head'"),
    ],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("rule", [OWM, AOP], ids=lambda rule: rule.__name__)
def test_options_are_checked(rule, options, message):
    with pytest.raises(InputError, match=message):
        rule(mlp(3, 2, hidden=(4,)), **options)
