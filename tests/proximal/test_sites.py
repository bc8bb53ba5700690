"""What is found in a model, what is shared, what is chosen, and what is left alone and named."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from proxreplay import LPR
from proxreplay.errors import InputError, RefreshError
from proxreplay.proximal import Strength
from proxreplay.proximal.layers.sites import find_sites
from tests.reference import (
    assert_same_state,
    fill_gradients_,
    flat_gradient,
    jacobian,
    random,
    shake_,
    trained,
)


def covered(lpr):
    """Parameters that treated layers speak for."""
    return {name for one in lpr.layers.values() for name in one.parameters}


class Twins(nn.Module):
    """Two layers that share the weight, and perhaps the bias."""

    def __init__(self, bias):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        if bias == "shared":
            self.b.bias = self.a.bias
        elif bias == "one":
            self.b.bias = None

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("bias", ["own", "shared", "one"])
@pytest.mark.parametrize("frozen", ["nothing", "weight"])
def test_modules_that_share_a_weight_share_one_statistic(bias, frozen):
    model = shake_(Twins(bias))
    if frozen == "weight":
        model.a.weight.requires_grad_(False)
    x = random(5, 3)
    lpr = LPR(model, omega_0=2.0, beta=1.5)
    lpr.refresh(x)
    g = fill_gradients_(model)
    lpr.precondition_()

    p = trained(model)
    hidden = torch.tanh(model.a(x)).detach()

    def outputs(q):
        weight = q.get("a.weight", model.a.weight.detach())
        bias_b = {"own": q.get("b.bias"), "shared": q.get("a.bias"), "one": None}[bias]
        return torch.cat([F.linear(x, weight, q["a.bias"]), F.linear(hidden, weight, bias_b)])

    J = jacobian(outputs, p)
    if frozen == "weight" and bias != "shared":  # nothing is shared then: each bias for itself
        per_bias = 2.0 / 5 * torch.ones(len(g), dtype=g.dtype)
        expected = g / (1 + per_bias * 5)
    else:
        omega = 2.0 / (5 * 2**1.5)
        expected = torch.linalg.solve(torch.eye(len(g), dtype=g.dtype) + omega * J.T @ J, g)
    torch.testing.assert_close(flat_gradient(model), expected, rtol=0, atol=1e-10)
    if frozen == "nothing":
        assert lpr.layers["a"].shared_with == ("b",)
        assert lpr.layers["a"].positions == 2
    assert not lpr.untreated


class Language(nn.Module):
    """An embedding and an output layer with one weight, as most language models have."""

    def __init__(self, bias):
        super().__init__()
        self.embed = nn.Embedding(6, 3)
        self.mix = nn.Linear(3, 3)
        self.out = nn.Linear(3, 6, bias=bias)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(torch.tanh(self.mix(self.embed(tokens))))


@pytest.mark.parametrize("missing", [None, "out.bias", "embed.weight"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_an_embedding_and_a_linear_that_share_a_weight_are_treated_together(bias, missing):
    model = shake_(Language(bias))
    tokens = torch.tensor([[0, 2, 2, 5], [1, 2, 0, 0]])
    lpr = LPR(model, omega_0=2.0, beta=1.5, include=["embed", "out"])
    lpr.refresh(tokens)
    assert lpr.layers.keys() == {"out"}
    assert lpr.layers["out"].shared_with == ("embed",)
    assert lpr.layers["out"].positions == 8  # four tokens looked up, four multiplied
    assert lpr.untreated == {"mix": "not included."}

    model.mix.requires_grad_(False)
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if missing in names and len(names) > 1:
        names.pop(missing).requires_grad_(False)
    hidden = torch.tanh(model.mix(model.embed(tokens))).detach()
    g = fill_gradients_(model)

    def outputs(q):
        weight = q.get("embed.weight", model.embed.weight.detach())
        logits = F.linear(hidden, weight, q.get("out.bias"))
        return torch.cat([F.embedding(tokens, weight).flatten(), logits.flatten()])

    J = jacobian(outputs, trained(model))
    omega = 2.0 / (2 * 8**1.5)
    lpr.precondition_()
    expected = torch.linalg.solve(torch.eye(len(g), dtype=g.dtype) + omega * J.T @ J, g)
    torch.testing.assert_close(flat_gradient(model), expected, rtol=0, atol=1e-10)


def test_a_tied_language_model_has_a_plan_and_a_state():
    model = Language(True)
    tokens = torch.randint(6, (4, 5))
    lpr = LPR(model)
    plan = lpr.cost(tokens)
    lpr.refresh(tokens)
    assert (plan.layers["out"].d, plan.layers["out"].positions) == (4, 10)
    assert plan.bytes == sum(layer.bytes for layer in lpr.layers.values())
    other = LPR(Language(True))
    other.load_state_dict(lpr.state_dict())
    assert_same_state(other.state_dict(), lpr.state_dict())


def test_weights_read_in_two_ways_are_left_alone_and_named():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 4, bias=False)
            self.conv = nn.Conv1d(3, 4, 1, bias=False)
            self.conv.weight = self.linear.weight

    lpr = LPR(Both())
    assert lpr.untreated.keys() == {"linear", "conv"}
    assert "read it differently" in lpr.untreated["conv"]


def test_a_bias_shared_by_different_weights_is_left_alone_and_named():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].bias = model[0].bias
    lpr = LPR(model)
    lpr.refresh(torch.randn(4, 3))
    assert covered(lpr) == {"0.weight", "1.weight"}
    assert lpr.untreated.keys() == {"0.bias", "1.bias"}
    assert "shared" in lpr.untreated["0.bias"]


def test_parameters_that_no_known_layer_reads_are_named():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd = nn.Bilinear(3, 3, 4)
            self.token = nn.Parameter(torch.zeros(4))
            self.relu = nn.ReLU()
            self.frozen = nn.PReLU().requires_grad_(False)
            self.out = nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.frozen(self.odd(x, x) + self.token))

    lpr = LPR(Odd())
    assert lpr.untreated.keys() == {"token", "out", "odd.weight", "odd.bias"}
    lpr.refresh(torch.randn(2, 5, 3))
    assert lpr.layers.keys() == {"out", "token"}
    assert lpr.untreated.keys() == {"odd.weight", "odd.bias"}
    assert "Bilinear is not known, and this parameter goes into bilinear()" in str(lpr)


@pytest.mark.parametrize(
    ("normed", "computing"),
    [
        (
            lambda layer: nn.utils.parametrizations.weight_norm(layer),
            {"0.parametrizations.weight.original0", "0.parametrizations.weight.original1"},
        ),
        (
            lambda layer: nn.utils.parametrizations.spectral_norm(layer),
            {"0.parametrizations.weight.original"},
        ),
    ],
    ids=["weight-norm", "spectral-norm"],
)
def test_a_layer_whose_weight_is_computed_is_left_alone_and_its_parameters_named(normed, computing):
    model = nn.Sequential(normed(nn.Linear(3, 2)), nn.Linear(2, 2))
    lpr = LPR(model)
    lpr.refresh(torch.randn(4, 3))
    assert lpr.layers.keys() == {"1"}
    assert lpr.untreated.keys() == {"0.bias", *computing}
    assert all("computed from other parameters" in why for why in lpr.untreated.values())


def test_extra_parameters_of_a_derived_layer_are_named():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.scale = nn.Parameter(torch.ones(()))

    lpr = LPR(nn.Sequential(Scaled()))
    lpr.refresh(torch.randn(4, 3))
    assert lpr.untreated == {"0.scale": "no linear map of Scaled reads it."}


def test_every_trained_parameter_is_treated_or_named():
    block = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True, custom_decoder=None)
    model.decoder.layers[0] = block
    lpr = LPR(model)
    x = torch.randn(2, 4, 8)
    lpr.refresh([(x, x)])
    assert covered(lpr) == set(dict(model.named_parameters()))
    assert not lpr.untreated


def make_net():
    stem = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    return nn.Sequential(stem, nn.Flatten(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, {"0.0", "0.1", "2", "4"}),
        ({"include": ["0"]}, {"0.0", "0.1"}),
        ({"include": [nn.Linear]}, {"2", "4"}),
        ({"include": ["0.1", nn.Linear]}, {"0.1", "2", "4"}),
        ({"exclude": ["0"]}, {"2", "4"}),
        ({"exclude": [nn.BatchNorm2d, "2"]}, {"0.0", "4"}),
        ({"include": [nn.Linear], "exclude": ["4"]}, {"2"}),
        ({"overrides": {"2": Strength(0.0)}}, {"0.0", "0.1", "4"}),
    ],
    ids=[
        "all",
        "a container",
        "a type",
        "a name and a type",
        "without a container",
        "without a type and a name",
        "a type without a name",
        "strength 0",
    ],
)
def test_layers_are_chosen_by_name_or_type_and_the_others_named(options, names):
    lpr = LPR(make_net(), **options)
    lpr.refresh(torch.randn(3, 1, 4, 4))
    assert lpr.layers.keys() == names
    assert lpr.untreated.keys() == {"0.0", "0.1", "2", "4"} - names


def test_overrides_by_the_longest_name_then_by_the_nearest_type():
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), Special(3, 3)), Special(3, 3))
    overrides = {
        nn.Linear: Strength(2.0, 1.0),
        Special: Strength(3.0, 1.0),
        "0": Strength(5.0, 1.0),
        "0.1": Strength(7.0, 2.0),
    }
    lpr = LPR(model, overrides=overrides)
    lpr.refresh(torch.randn(10, 3))
    assert {name: layer.omega * 10 for name, layer in lpr.layers.items()} == pytest.approx(
        {"0.0": 5.0, "0.1": 7.0, "1": 3.0}
    )


@pytest.mark.parametrize("option", ["include", "exclude", "overrides"])
def test_unknown_names_are_refused_with_the_nearest_one(option):
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    wrong = {"encoderr": Strength()} if option == "overrides" else ["encoderr"]
    with pytest.raises(InputError, match=rf"{option}.*'encoderr'; did you mean 'encoder'"):
        LPR(model, **{option: wrong})
    wrong = {nn.Conv1d: Strength()} if option == "overrides" else [nn.Conv1d]
    with pytest.raises(InputError, match=rf"{option}.*no Conv1d; its types are .*Linear"):
        LPR(model, **{option: wrong})


def test_maps_inside_a_module_can_be_named():
    model = nn.Sequential(nn.MultiheadAttention(4, 2))
    sites = find_sites(model, exclude=["0.q_proj"])
    assert sites.sites.keys() == {"0.k_proj", "0.v_proj", "0.out_proj"}
    assert sites.untreated == {"0.q_proj": "excluded."}
    LPR(model, exclude=["0.q_proj"])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.LazyLinear(3)), "'0.weight' is not initialised yet"),
        (nn.LazyBatchNorm1d(), "'weight' is not initialised yet"),
        (nn.Linear(2, 2, device="meta"), "'weight' is on the meta device"),
    ],
    ids=["lazy-linear", "lazy-norm", "meta"],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_models_without_values_are_refused(model, message):
    with pytest.raises(InputError, match=message):
        LPR(model)


def test_rows_that_do_not_add_up_are_refused():
    class TwoWays(nn.Module):
        def __init__(self):
            super().__init__()
            self.grouped = nn.Conv1d(4, 4, 1, groups=2, bias=False)
            self.plain = nn.Conv1d(2, 4, 1, bias=False)
            self.plain.weight = self.grouped.weight

        def forward(self, x):
            return self.grouped(x), self.plain(x[:, :2])

    lpr = LPR(TwoWays())
    with pytest.raises(RefreshError, match="do not add up"):
        lpr.refresh(torch.randn(2, 4, 3))
