"""How statistics are added up over calls and batches."""

import pytest
import torch
from torch import nn

from proxreplay import LPR
from proxreplay.errors import RefreshError
from proxreplay.proximal.gram.patches import PatchRows
from proxreplay.proximal.gram.rows import DenseRows
from proxreplay.proximal.layers.sites import find_sites
from proxreplay.proximal.statistics.collect import Source
from tests.reference import assert_same_state, random


def statistics_of(model: nn.Module, batches: list[torch.Tensor]):
    statistics, _ = Source(max_dim=100).collect(model, find_sites(model).sites, batches, 0)
    return statistics


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_batches_of_a_convolution_add_up_in_float64(dtype):
    conv = nn.Conv2d(3, 4, 3, padding=1).to(dtype)
    batches = [random(20, 3, 16, 16, seed=i).to(dtype) for i in range(3)]
    statistic = statistics_of(conv, batches)[""]
    x = torch.cat(batches).double()
    Z = PatchRows(x, (3, 3), (1, 1), (1, 1), 1, ((1, 1), (1, 1))).dense()
    Z = torch.cat([Z, Z.new_ones(1, Z.shape[1], 1)], dim=2)
    assert statistic.dtype == dtype
    assert (statistic.rows, statistic.samples, statistic.d) == (60 * 256, 60, 27)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(
        statistic.G.double(), Z.mT @ Z, rtol=tolerance, atol=tolerance * 60 * 256
    )


@pytest.mark.parametrize("batch", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_a_convolution_whose_input_is_not_finite_is_named(value, batch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1))
    lpr = LPR(model, batch_size=20)
    x = torch.randn(60, 2, 16, 16)
    lpr.refresh(x)
    before = lpr.state_dict()
    x[20 * batch + 7, 1, 3, 15] = value
    with pytest.raises(RefreshError, match=rf"Conv2d '0' in batch {batch}"):
        lpr.refresh(x)
    assert_same_state(lpr.state_dict(), before)


def test_maps_that_read_the_same_rows_share_one_product(monkeypatch):
    model = nn.MultiheadAttention(6, 2, batch_first=True).double()
    products = []
    monkeypatch.setattr(
        "proxreplay.proximal.gram.rows.self_product", lambda Z: products.append(Z) or Z.mT @ Z
    )
    x = random(3, 5, 6)
    statistics = statistics_of(model, [(x, x, x)])
    assert len(products) == 2  # query, key and value; the output projection
    assert torch.equal(statistics["q_proj"].G, statistics["v_proj"].G)


def test_an_untrained_weight_needs_no_product(monkeypatch):
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    monkeypatch.setattr(DenseRows, "gram", lambda rows: pytest.fail("a product was made"))
    statistic = statistics_of(model, [torch.randn(4, 3), torch.randn(2, 3)])[""]
    assert statistic.G.tolist() == [[[6.0]]]
