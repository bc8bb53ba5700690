"""No layer is treated by rows that are not its own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from proxreplay import LPR
from proxreplay.errors import RefreshError
from proxreplay.models.heads import GrowingHead
from proxreplay.proximal import OWM, LinearMap, Part, register_layer
from proxreplay.proximal.layers import registry
from tests.reference import fill_gradients_


class CosLinear(nn.Linear):
    def forward(self, x):
        return F.linear(F.normalize(x), self.weight, self.bias)


class ChannelsFirstNorm(nn.LayerNorm):
    """As in ConvNeXt; width equal to channels, so that nothing fails by shape."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Symmetric(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight + weight.mT, bias)


@pytest.mark.parametrize(
    ("layer", "x", "base", "method"),
    [
        (CosLinear(4, 3), torch.randn(5, 4), "Linear", "forward"),
        (ChannelsFirstNorm(4), torch.randn(2, 4, 4, 4), "LayerNorm", "forward"),
        (Symmetric(2, 3, 3), torch.randn(2, 2, 5, 5), "Conv2d", "_conv_forward"),
    ],
    ids=["Linear", "LayerNorm", "Conv2d"],
)
def test_a_derived_layer_with_a_forward_of_its_own_is_left_alone(layer, x, base, method):
    lpr = LPR(nn.Sequential(layer), 100.0)
    lpr.refresh(x)
    assert not lpr.layers
    kind = type(layer).__name__
    assert lpr.untreated.keys() == {"0.weight", "0.bias"}
    for why in lpr.untreated.values():
        assert f".{kind} overrides {method} of torch.nn.{base}," in why
        assert f"register_layer({kind})" in why
    fill_gradients_(layer)
    before = layer.weight.grad.clone()
    lpr.precondition_()
    assert torch.equal(layer.weight.grad, before)


def test_a_class_with_the_name_of_its_base_is_told_apart_and_may_be_declared_the_same():
    """timm calls its own LayerNorm, with a forward of its own, just so."""
    fast = type("LayerNorm", (nn.LayerNorm,), {"forward": lambda self, x: self.own(x)})
    fast.__module__ = "timm.layers.norm"
    fast.own = nn.LayerNorm.forward
    lpr = LPR(nn.Sequential(fast(4)))
    lpr.refresh(torch.randn(5, 4))
    assert lpr.untreated["0.weight"] == (
        "timm.layers.norm.LayerNorm overrides forward of torch.nn.LayerNorm, so it may compute "
        "something else. Teach it with register_layer(LayerNorm); or, if LayerNorm is linear in "
        "the same rows, say so with LayerNorm.treated_as = torch.nn.LayerNorm."
    )
    fast.treated_as = nn.LayerNorm
    lpr = LPR(nn.Sequential(fast(4)))
    lpr.refresh(torch.randn(5, 4))
    assert lpr.layers.keys() == {"0"}


def test_a_derived_layer_that_inherits_forward_is_treated():
    class Named(nn.Linear):
        def extra_repr(self):
            return "mine"

    lpr = LPR(nn.Sequential(Named(4, 3), GrowingHead(3)))
    lpr.refresh(torch.randn(5, 4))
    assert lpr.layers.keys() == {"0", "1"}


@pytest.fixture
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_LAYERS", dict(registry._LAYERS))


@pytest.mark.usefixtures("own_registry")
def test_a_derived_layer_is_treated_once_it_is_taught():
    register_layer(CosLinear)(lambda layer, x: F.normalize(x)[None])
    torch.manual_seed(0)
    cos, x = CosLinear(4, 3), torch.randn(5, 4)
    twin = nn.Linear(4, 3)
    twin.load_state_dict(cos.state_dict())
    gradients = []
    for layer, inputs in ((cos, x), (twin, F.normalize(x))):
        lpr = LPR(layer, 5.0)
        lpr.refresh(inputs)
        fill_gradients_(layer)
        lpr.precondition_()
        gradients.append(layer.weight.grad)
    torch.testing.assert_close(*gradients)


WRONG = {
    "not normalised": lambda layer, x: x[None],
    "columns reversed": lambda layer, x: F.normalize(x).flip(1)[None],
    "a row too few": lambda layer, x: F.normalize(x)[None, 1:],
}


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("rule", [LPR, OWM])
@pytest.mark.parametrize("rows", WRONG.values(), ids=WRONG.keys())
def test_rows_that_do_not_reproduce_the_output_are_noticed(rows, rule):
    register_layer(CosLinear)(rows)
    torch.manual_seed(0)
    made = rule(nn.Sequential(nn.Linear(4, 4), CosLinear(4, 3)))
    x = torch.randn(5, 4)
    refresh = made.refresh if rule is LPR else lambda x: made.observe(_batch(x))
    with pytest.warns(UserWarning, match="CosLinear '1' is left alone"):
        refresh(x)
    assert made.layers.keys() == {"0"}
    assert "do not reproduce its output" in made.untreated["1"]
    refresh(x)  # said once
    register_layer(CosLinear)(lambda layer, x: F.normalize(x)[None])
    refresh(x)
    assert made.layers.keys() == {"0", "1"}


def _batch(x):
    from proxreplay.batch import Batch

    return Batch(x, torch.zeros(len(x), dtype=torch.int64))


@pytest.mark.usefixtures("own_registry")
def test_a_bias_that_is_not_added_is_noticed():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(3, 2))
            self.bias = nn.Parameter(torch.randn(3))

        def forward(self, x):
            return x @ self.kernel.T

    register_layer(Bare, maps=LinearMap(weight=Part("kernel")))(lambda layer, x: x[None])
    lpr = LPR(Bare())
    with pytest.warns(UserWarning, match="do not reproduce"):
        lpr.refresh(torch.randn(5, 2))
    assert not lpr.layers


def test_looking_leaves_no_trace_and_calls_no_hook_of_others():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    LPR(model).refresh(torch.randn(6, 3))
    assert len(calls) == 1
    for name, p in model.named_parameters():
        assert p is before[name][0]
        assert torch.equal(p, before[name][1])


def test_nan_is_not_taken_for_a_wrong_rows_function():
    lpr = LPR(nn.Linear(3, 2))
    with pytest.raises(RefreshError, match="in batch 0 are not finite"):
        lpr.refresh(torch.full((4, 3), torch.nan))
    lpr.refresh(torch.ones(4, 3))
    assert not lpr.untreated
