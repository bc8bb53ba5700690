"""The Kronecker factors beside those of curvlinops, which somebody else has written."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from proxreplay import KroneckerLPR
from proxreplay.options import StepOptions
from tests.proximal.states import averages
from tests.reference import random

curvlinops = pytest.importorskip(
    "curvlinops", reason="curvlinops is not installed; `make test` installs it without torchvision"
)
NEWEST = StepOptions(every=1, rebuild=1, decay=0.0, incoming=1.0)
CLASSES = 3


def networks():
    yield "Linear", [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)], (6, 4)
    convolutions = [nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 2, stride=2)]
    yield "Conv2d", [*convolutions, nn.Flatten(), nn.Linear(16, CLASSES)], (6, 2, 4, 4)


def columns(layer, width):
    """Where our columns, kernel before channel, are among theirs; the bias is last in both."""
    if not isinstance(layer, nn.Conv2d):
        return torch.arange(width)
    *_, channels, height, wide = layer.weight.shape
    order = torch.arange(channels * height * wide).view(channels, height, wide)
    return torch.cat([order.permute(1, 2, 0).flatten(), torch.tensor([width - 1])])


@pytest.mark.parametrize(("fisher", "theirs"), [("exact", "type-2"), ("loss", "empirical")])
@pytest.mark.parametrize(
    ("layers", "shape"), [n[1:] for n in networks()], ids=[n[0] for n in networks()]
)
def test_factors_are_those_of_curvlinops(layers, shape, fisher, theirs):
    torch.manual_seed(0)
    for layer in layers:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    model = nn.Sequential(*layers).double().train()
    x, y = random(*shape, seed=1), torch.arange(shape[0]) % CLASSES
    rule = KroneckerLPR(model, steps=NEWEST, fisher=fisher)
    with rule.watched():
        F.cross_entropy(model(x), y).backward()
    rule.step_()
    witness = curvlinops.KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        [(x, y)],
        check_deterministic=False,
        fisher_type=theirs,
        separate_weight_and_bias=False,
    )
    witness.compute_kronecker_factors()
    assert averages(rule)
    for name, one in averages(rule).items():
        A, B = one.mean.G[0] / one.weight, one.mean.H[0] / one.weight
        at = columns(model.get_submodule(name), len(A))
        aa, gg = witness._input_covariances[name][at][:, at], witness._gradient_covariances[name]
        torch.testing.assert_close(torch.kron(B, A), torch.kron(gg, aa), rtol=0, atol=1e-10)
        torch.testing.assert_close(A / A.trace(), aa / aa.trace(), rtol=0, atol=1e-10)
