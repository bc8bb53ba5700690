"""LPR's identities, its options, its state."""

import copy
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from proxreplay import LPR
from proxreplay.errors import InputError
from proxreplay.models import small_cnn
from proxreplay.models.heads import GrowingHead
from proxreplay.proximal import Strength
from proxreplay.proximal.shrinkage.forms import SpectralShrinkage
from proxreplay.proximal.shrinkage.inverse import dense_inverse_
from tests.reference import (
    assert_same_state,
    dense_shrinkage,
    fill_gradients_,
    flat_gradient,
    random,
    shake_,
)


def lambda_of(lpr, name=""):
    return lpr.shrinkage(name).Lambda


def test_omega_zero_is_bit_identical_to_no_lpr():
    torch.manual_seed(0)
    model = small_cnn(1, 3)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin)]
    lpr = LPR(model, omega_0=0.0, beta=2.0).attach(optimizers[0])
    for step in range(5):
        x = torch.randn(4, 1, 6, 6)
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            one(x).square().sum().backward()
            optimizer.step()
        if step % 2 == 0:
            lpr.refresh(x)
    assert_same_state(dict(model.state_dict()), dict(twin.state_dict()))
    assert set(lpr.untreated.values()) == {"its strength is 0."}


@settings(deadline=None, max_examples=30)
@given(
    n=st.integers(1, 8),
    d=st.integers(1, 6),
    omega_0=st.floats(0.01, 1e4),
    seed=st.integers(0, 1000),
)
def test_it_never_lengthens_a_gradient_and_leaves_orthogonal_ones_alone(n, d, omega_0, seed):
    layer = nn.Linear(d, 3, bias=False).double()
    Z = random(n, d, seed=seed)
    lpr = LPR(layer, omega_0)
    lpr.refresh(Z)
    g = fill_gradients_(layer)
    lpr.precondition_()
    assert flat_gradient(layer).norm() <= g.norm() * (1 + 1e-12)

    outside = torch.eye(d, dtype=torch.float64) - torch.linalg.pinv(Z) @ Z
    layer.weight.grad = random(3, d, seed=seed + 1) @ outside
    before = layer.weight.grad.clone()
    lpr.precondition_()
    torch.testing.assert_close(layer.weight.grad, before, rtol=0, atol=1e-9)


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 8), d=st.integers(1, 6), omega=st.floats(0.01, 100))
def test_woodbury(n, d, omega):
    Z = random(n, d)
    layer = nn.Linear(d, 1, bias=False).double()
    lpr = LPR(layer, omega * n)
    lpr.refresh(Z)
    small = torch.linalg.inv(torch.eye(n, dtype=Z.dtype) / omega + Z @ Z.T)
    expected = torch.eye(d, dtype=Z.dtype) - Z.T @ small @ Z
    torch.testing.assert_close(lambda_of(lpr)[0], expected, rtol=0, atol=1e-10)


def test_projection_limit_as_omega_grows():
    Z = random(3, 7)
    layer = nn.Linear(7, 1, bias=False).double()
    projector = torch.eye(7, dtype=Z.dtype) - torch.linalg.pinv(Z) @ Z
    distances = []
    for omega_0 in (1e2, 1e4, 1e6, 1e8):
        lpr = LPR(layer, omega_0)
        lpr.refresh(Z)
        distances.append(torch.linalg.matrix_norm(lambda_of(lpr)[0] - projector, 2).item())
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-6


def test_mean_form_of_the_metric():
    """P = I + omega_0 n_eff^(1-beta) E[z z']."""
    layer = nn.Linear(3, 2, bias=False).double()
    x = random(5, 4, 3)
    lpr = LPR(layer, omega_0=2.0, beta=1.7)
    lpr.refresh(x)
    z = x.reshape(-1, 3)
    P = torch.eye(3, dtype=z.dtype) + 2.0 * 4 ** (1 - 1.7) * z.T @ z / len(z)
    torch.testing.assert_close(lambda_of(lpr)[0], torch.linalg.inv(P), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Linear(4, 3), random(6, 4)),
        (nn.Conv2d(2, 3, 2, stride=2, padding=1, dilation=2), random(3, 2, 5, 5)),
        (nn.BatchNorm2d(3), random(4, 3, 2, 2)),
        (nn.LayerNorm(4), random(3, 2, 4)),
    ],
    ids=["linear", "convolution", "batchnorm", "layernorm"],
)
def test_one_step_minimises_the_proximal_objective(layer, x):
    """Appendix A: the new weights have a zero gradient of loss + proximity + change of outputs."""
    shake_(layer)
    eta = 0.3
    optimizer = torch.optim.SGD(layer.parameters(), lr=eta)
    lpr = LPR(layer, omega_0=3.0, beta=1.0).attach(optimizer)
    lpr.refresh(x)
    omega = lpr.layers[""].omega
    old = {name: p.detach().clone() for name, p in layer.named_parameters()}
    before = layer(x).detach()
    fill_gradients_(layer)
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters()}
    optimizer.step()

    optimizer.zero_grad()
    linear = sum((gradients[name] * p).sum() for name, p in layer.named_parameters())
    near = sum((p - old[name]).square().sum() for name, p in layer.named_parameters())
    change = (layer(x) - before).square().sum()
    (linear + near / (2 * eta) + omega * change / (2 * eta)).backward()
    torch.testing.assert_close(
        flat_gradient(layer), torch.zeros_like(flat_gradient(layer)), rtol=0, atol=1e-10
    )


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_order_and_size_of_refresh_batches_do_not_matter(data):
    torch.manual_seed(0)
    model = small_cnn(1, 3)
    shake_(model)
    x = random(9, 1, 6, 6)
    whole = LPR(model, omega_0=4.0, beta=1.0)
    whole.refresh([x])
    order = torch.tensor(data.draw(st.permutations(range(9))))
    parts = LPR(model, omega_0=4.0, beta=1.0, batch_size=data.draw(st.integers(1, 9)))
    parts.refresh(x[order])
    assert_same_state(parts.state_dict(), whole.state_dict(), rtol=0, atol=1e-10)


def test_float32_sums_over_many_batches_do_not_drift():
    """A naive float32 sum over 5,000 batches is off by far more."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 1, bias=False)
    x = torch.rand(5000, 3) + 1
    lpr = LPR(layer, omega_0=1.0, batch_size=1)
    lpr.refresh(x)
    expected = dense_shrinkage(x.double(), 1 / 5000)
    torch.testing.assert_close(lambda_of(lpr)[0].double(), expected, rtol=0, atol=3e-7)


def test_authors_batchnorm_divides_by_the_variance():
    layer = shake_(nn.BatchNorm2d(3))
    x = random(4, 3, 2, 2)
    lpr = LPR(layer, omega_0=2.0, beta=1.0, reference="authors")
    lpr.refresh(x)
    mean, var = (b.view(1, 3, 1, 1) for b in (layer.running_mean, layer.running_var))
    rows = ((x - mean) / (var + layer.eps)).transpose(0, 1).reshape(3, -1)
    for c in range(3):
        Z = torch.stack([rows[c], torch.ones(16, dtype=x.dtype)], dim=1)
        expected = dense_shrinkage(Z, 2.0 / (4 * 4))
        torch.testing.assert_close(lambda_of(lpr)[c], expected, rtol=0, atol=1e-12)


def test_authors_linear_is_not_spared_for_sequences():
    layer, x = nn.Linear(3, 2), torch.randn(4, 5, 3)
    for reference, omega in {"paper": 2.0 / (4 * 5**1.5), "authors": 2.0 / 4}.items():
        lpr = LPR(layer, 2.0, 1.5, reference=reference)
        lpr.refresh(x)
        assert lpr.layers[""].omega == pytest.approx(omega)
        assert lpr.layers[""].positions == 5


@pytest.mark.parametrize(
    "options",
    [
        {"omega_0": -1.0},
        {"omega_0": float("nan")},
        {"beta": float("inf")},
        {"batch_size": 0},
        {"max_dim": 0},
        {"reference": "official"},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options):
    (name,) = options
    with pytest.raises(InputError, match=name):
        LPR(nn.Linear(2, 2), **options)


def test_strength_checks_itself():
    with pytest.raises(InputError, match="beta=-1"):
        Strength(1.0, -1)


class TestState:
    def make(self):
        model = nn.Sequential(
            nn.Conv1d(2, 4, 3, groups=2), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(12, 40)
        )
        model[3].bias.requires_grad_(False)
        return model

    def options(self):
        return {"omega_0": 3.0, "beta": 1.5, "max_dim": 10, "exclude": ["1"]}

    def test_round_trip_into_a_fresh_lpr_on_a_fresh_model(self):
        torch.manual_seed(0)
        model = self.make()
        lpr = LPR(model, **self.options())
        lpr.refresh(torch.randn(9, 2, 5))
        state = lpr.state_dict()
        other_model = self.make()
        other = LPR(other_model, **self.options())
        other.load_state_dict(copy.deepcopy(state))
        assert_same_state(other.state_dict(), state)
        assert other.layers == lpr.layers
        assert other.untreated == lpr.untreated
        for one, rule in ((model, lpr), (other_model, other)):
            fill_gradients_(one)
            rule.precondition_()
        assert torch.equal(flat_gradient(model), flat_gradient(other_model))

    def test_it_holds_plain_values_only(self, tmp_path):
        lpr = LPR(self.make(), **self.options())
        lpr.refresh(torch.randn(9, 2, 5))
        torch.save(lpr.state_dict(), tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "state.pt", weights_only=True)
        assert_same_state(loaded, lpr.state_dict())

    def test_the_state_is_not_changed_by_a_later_refresh(self):
        lpr = LPR(self.make(), **self.options())
        lpr.refresh(torch.randn(9, 2, 5))
        state = lpr.state_dict()
        before = copy.deepcopy(state)
        lpr.refresh(torch.randn(9, 2, 5))
        assert_same_state(state, before)

    def test_a_state_that_does_not_fit_is_refused_before_anything_changes(self):
        lpr = LPR(nn.Sequential(nn.Linear(2, 2)))
        lpr.refresh(torch.randn(3, 2))
        state = lpr.state_dict()
        frozen = nn.Sequential(nn.Linear(2, 2))
        frozen[0].bias.requires_grad_(False)
        other = LPR(frozen)
        other.refresh(torch.randn(3, 2))
        before = other.state_dict()
        with pytest.raises(InputError, match=r"'0' has factors for .*0\.bias"):
            other.load_state_dict(state)
        assert_same_state(other.state_dict(), before)
        with pytest.raises(InputError, match="state of AGEM"):
            other.load_state_dict(state | {"rule": "AGEM"})


def test_a_growing_head_needs_no_care():
    torch.manual_seed(0)
    head = GrowingHead(4)
    model = nn.Sequential(nn.Linear(3, 4), head)
    head.grow(2)
    lpr = LPR(model, omega_0=3.0)
    lpr.refresh(torch.randn(5, 3))
    head.grow(6)
    fill_gradients_(model)
    before = torch.cat([head.weight.grad, head.bias.grad[:, None]], dim=1)
    lpr.precondition_()
    after = torch.cat([head.weight.grad, head.bias.grad[:, None]], dim=1)
    torch.testing.assert_close(after, before @ lambda_of(lpr, "1")[0])


class TestLargeLayers:
    def test_the_spectral_form_is_within_its_tolerance(self):
        layer = nn.Linear(60, 7).double()
        x = random(50, 60) * 0.8 ** torch.arange(60.0)
        dense, spectral = LPR(layer, 4.0), LPR(layer, 4.0, max_dim=40, tolerance=0.01)
        for lpr in (dense, spectral):
            lpr.refresh(x)
        factor = spectral.shrinkage("")
        made = factor.apply(torch.eye(61, dtype=x.dtype)[None])[0]
        assert torch.linalg.matrix_norm(made - lambda_of(dense)[0], 2) <= 0.01
        assert factor.U.shape[2] < 20
        assert spectral.layers[""].bytes < dense.layers[""].bytes

    def test_a_layer_that_needs_too_many_directions_is_left_alone_and_named(self):
        layer = nn.Linear(60, 7)
        lpr = LPR(layer, 100.0, max_dim=30)
        lpr.refresh(torch.randn(500, 60))
        assert not lpr.layers
        assert "d = 61 is more than max_dim" in lpr.untreated[""]
        assert "tolerance 0.05" in lpr.untreated[""]

    def test_without_a_tolerance_they_are_left_alone_and_named(self):
        lpr = LPR(nn.Linear(60, 7), max_dim=30, tolerance=0)
        lpr.refresh(torch.randn(3, 60))
        assert not lpr.layers
        assert lpr.untreated == {"": "d = 61 is more than max_dim = 30."}

    def test_patches_have_a_spectral_form_too(self):
        torch.manual_seed(0)
        layer = nn.Conv2d(8, 4, 3, padding=1).double()
        x = random(3, 8, 1, 1).expand(3, 8, 5, 5)  # 27 different patches
        dense, spectral = LPR(layer), LPR(layer, max_dim=72, tolerance=0.01)
        for lpr in (dense, spectral):
            lpr.refresh(x)
        factor = spectral.shrinkage("")
        made = factor.apply(torch.eye(73, dtype=x.dtype)[None])[0]
        assert torch.linalg.matrix_norm(made - lambda_of(dense)[0], 2) <= 0.01

    def test_no_large_square_is_ever_made(self, monkeypatch):
        d = 5000
        layer = nn.Linear(d, 2)
        lpr = LPR(layer, max_dim=100)
        largest = 0

        class Watch(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                nonlocal largest
                out = func(*args, **(kwargs or {}))
                if isinstance(out, torch.Tensor):
                    largest = max(largest, out.numel())
                return out

        with Watch():
            lpr.refresh(torch.randn(20, d))
        assert largest < d * 100


class TestCost:
    def test_it_tells_the_bytes_that_refresh_then_takes(self):
        model = small_cnn(1, 3)
        lpr = LPR(model)
        x = torch.randn(6, 1, 8, 8)
        plan = lpr.cost(x[:1], samples=6)
        assert not lpr.layers
        lpr.refresh(x)
        for name, layer in lpr.layers.items():
            cost = plan.layers[name]
            assert (cost.bytes, cost.d, cost.groups) == (layer.bytes, layer.d, layer.groups)
            assert cost.positions == layer.positions
        assert plan.bytes == sum(layer.bytes for layer in lpr.layers.values())

    def test_flops_by_hand(self):
        plan = LPR(nn.Linear(9, 4)).cost(torch.randn(2, 3, 9), samples=20)
        cost = plan.layers[""]
        assert cost.step_flops == 2 * 4 * 10 * 10
        assert cost.refresh_flops == 2 * 60 * 10 * 10 + 10**3
        assert cost.refresh_bytes == 8 * 10 * 10
        assert "linear" not in str(plan)
        assert "20 examples" in str(plan)

    def test_it_names_what_will_be_left_alone(self):
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.GRU(2, 2)})
        model.forward = lambda x: model["a"](x)
        plan = LPR(model).cost(torch.randn(2, 2))
        assert {name.split(".")[0] for name in plan.untreated} == {"b", "c"}

    def test_no_gram_is_built(self, monkeypatch):
        def refuse(*_args, **_kwargs):
            raise AssertionError("a Gram was built")

        monkeypatch.setattr("proxreplay.proximal.statistics.collect.gram_with_bias", refuse)
        LPR(nn.Linear(3, 2)).cost(torch.randn(2, 3))
        with pytest.raises(AssertionError, match="was built"):
            LPR(nn.Linear(3, 2)).refresh(torch.randn(2, 3))


def test_half_precision_parameters_keep_float32_factors():
    torch.manual_seed(0)
    exact = nn.Linear(4, 3).double()
    x = random(6, 4)
    for dtype in (torch.bfloat16, torch.float16):
        layer = copy.deepcopy(exact).to(dtype)
        lpr = LPR(layer, omega_0=2.0)
        lpr.refresh(x.to(dtype))
        assert lambda_of(lpr).dtype == torch.float32
        fill_gradients_(layer)
        Z = F.pad(x.to(dtype).double(), (0, 1), value=1.0)
        G = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], dim=1).double()
        expected = G @ dense_shrinkage(Z, 2.0 / 6)
        lpr.precondition_()
        got = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], dim=1)
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected.to(dtype), rtol=2**-7, atol=1e-3)


class TestTolerance:
    def test_large_layers_keep_few_directions_and_gradients_are_near(self):
        torch.manual_seed(0)
        layer = nn.Linear(600, 3).double()
        x = random(40, 600).repeat(8, 1)  # at most 40 of 601 directions are shrunk at all
        exact, near = LPR(layer, 5.0, tolerance=0), LPR(layer, 5.0, tolerance=0.02)
        exact.refresh(x)
        near.refresh(x)
        assert isinstance(near.shrinkage(""), SpectralShrinkage)
        assert near.layers[""].bytes < exact.layers[""].bytes / 10
        g = fill_gradients_(layer)
        exact.precondition_()
        expected = flat_gradient(layer)
        fill_gradients_(layer)
        near.precondition_()
        error = (flat_gradient(layer) - expected).norm() / g.norm()
        assert 0 < error <= 0.02

    def test_layers_in_which_most_directions_matter_stay_dense_and_exact(self):
        layer = nn.Linear(520, 2)
        x = torch.randn(1000, 520)
        lpr, exact = LPR(layer, 1e3, tolerance=0.02), LPR(layer, 1e3, tolerance=0)
        lpr.refresh(x)
        exact.refresh(x)
        assert_same_state(lpr.state_dict()["layers"], exact.state_dict()["layers"])

    def test_a_state_comes_back(self):
        layer = nn.Linear(600, 3)
        lpr, again = LPR(layer, 5.0, tolerance=0.1), LPR(layer, 5.0, tolerance=0.1)
        lpr.refresh(torch.randn(40, 600))
        again.load_state_dict(lpr.state_dict())
        fill_gradients_(layer)
        lpr.precondition_()
        first = flat_gradient(layer)
        fill_gradients_(layer)
        again.precondition_()
        assert torch.equal(flat_gradient(layer), first)

    @pytest.mark.parametrize("tolerance", [-0.1, 0.5, float("nan")])
    def test_it_is_checked(self, tolerance):
        with pytest.raises(InputError, match="tolerance"):
            LPR(nn.Linear(2, 2), tolerance=tolerance)


def test_scales_and_shifts_of_several_layers_are_multiplied_together_and_apart_alike():
    """BatchNorms in one product, against one that is treated alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Tanh(), nn.BatchNorm1d(3)).double()
    for layer in (model[0], model[2]):
        layer.running_mean.normal_()
    x = random(7, 3)
    everything = LPR(model, 4.0)
    everything.refresh(x)
    fill_gradients_(model)
    everything.precondition_()
    together = flat_gradient(model)
    fill_gradients_(model)
    for name in ("0", "2"):
        alone = LPR(model, 4.0, include=[name])
        alone.refresh(x)
        alone.precondition_()
    assert torch.equal(flat_gradient(model), together)


def test_a_refresh_lets_go_of_a_layers_inputs_before_the_next_layers():
    model = nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(6)))
    inputs = []
    alive = []

    def look(module, args):
        inputs.append(weakref.ref(args[0]))
        alive.append(sum(one() is not None for one in inputs))

    for layer in list(model)[1:]:  # the first one's are the caller's own
        layer.register_forward_pre_hook(look)
    LPR(model).refresh(torch.randn(4, 2, 8, 8))
    assert len(alive) == 5
    assert max(alive) <= 2, alive


def test_factors_stay_when_one_of_the_next_cannot_be_made(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    lpr = LPR(model)
    lpr.refresh(torch.randn(5, 3))
    before = copy.deepcopy(lpr.state_dict())
    made = []

    def failing(G, omega):
        made.append(G)
        if len(made) == 2:
            raise torch.linalg.LinAlgError("not positive definite")
        return dense_inverse_(G, omega)

    monkeypatch.setattr("proxreplay.proximal.shrinkage.choose.dense_inverse_", failing)
    with pytest.raises(torch.linalg.LinAlgError):
        lpr.refresh(torch.randn(5, 3))
    assert_same_state(lpr.state_dict(), before)
