"""Layers of transformers against the dense Jacobian, and never an import of transformers."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from proxreplay.errors import InputError
from proxreplay.integrations.versions import OLDEST, check_version
from tests.proximal.test_layers import check_against_jacobian
from tests.reference import random

pytest.importorskip("transformers", reason="needs the extra 'integrations'")
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.models.gemma.modeling_gemma import (
    GemmaRMSNorm,
    GemmaTextScaledWordEmbedding,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.pytorch_utils import Conv1D


@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
def test_conv1d_is_a_linear_with_its_weight_the_other_way_round(frozen):
    layer = Conv1D(4, 3)
    if frozen:
        layer.get_parameter(frozen).requires_grad_(False)
    check_against_jacobian(layer, random(2, 5, 3), positions=5)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm, GemmaRMSNorm, T5LayerNorm])
def test_rmsnorm_multiplies_a_normalised_input(kind):
    class Exact(kind):  # these compute in float32 whatever they are given; the oracle does not
        def forward(self, x):
            eps = getattr(self, "variance_epsilon", None) or self.eps
            z = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
            return z * (self.weight + (kind is GemmaRMSNorm))

        treated_as = kind

    check_against_jacobian(Exact(4, eps=0.1), random(3, 5, 4), positions=5)
    layer, x = kind(4, eps=0.1), random(3, 5, 4).float()
    exact = Exact(4, eps=0.1)
    torch.nn.init.normal_(layer.weight)
    exact.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), exact(x))


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm, GemmaRMSNorm, T5LayerNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layer_itself_agrees_with_its_rows(kind, dtype):
    from proxreplay.proximal.layers.registry import find_layer

    layer, x = kind(4, eps=0.1).to(dtype), random(3, 5, 4).to(dtype)
    Z = find_layer(layer).rows(layer, x)
    assert Z.dtype == torch.float32
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, -2.0, 3.0, 0.5]))
        change = layer(x).double()
        layer.weight.zero_()
        change -= layer(x).double()
        expected = torch.tensor([1.0, -2.0, 3.0, 0.5])[:, None] * Z[:, :, 0]
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(
        change.reshape(-1, 4).T, expected.double(), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("layout", ["channels_first", "channels_last"])
def test_layernorm_over_channels_wherever_they_are(layout):
    shape = (2, 3, 4, 2) if layout == "channels_first" else (2, 4, 2, 3)
    layer = ConvNextLayerNorm(3, eps=0.1, data_format=layout)
    check_against_jacobian(layer, random(*shape), positions=8)


def test_a_scaled_embedding_counts_the_square_of_its_scale():
    layer = GemmaTextScaledWordEmbedding(6, 3, padding_idx=0, embed_scale=2.5)
    tokens = torch.tensor([[1, 2, 2, 0], [5, 1, 1, 0]])
    layer.embed_scale = torch.tensor(2.5)  # a buffer, which shake_ would change
    check_against_jacobian(layer, tokens, positions=4)


def test_transformers_is_never_imported():
    code = """
import sys, torch, proxreplay
lpr = proxreplay.LPR(torch.nn.Linear(2, 2))
lpr.refresh(torch.randn(3, 2))
import proxreplay.integrations
assert not {"transformers", "lightning", "accelerate"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_framework_older_than_supported_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="4.9.2"))
    with pytest.raises(InputError, match=r"transformers 4.9.2 is older .* needs 4\.\d+ or newer"):
        check_version("transformers")
    monkeypatch.setitem(
        sys.modules, "transformers", SimpleNamespace(__version__=OLDEST["transformers"] + ".1")
    )
    check_version("transformers")
