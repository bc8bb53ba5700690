"""Layers of Hugging Face transformers, by the names of their classes.

`registry.ADAPTERS` imports this file when a model first holds a class of transformers. It does not
import transformers itself.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from proxreplay.integrations.versions import check_version
from proxreplay.proximal import LinearMap, Part, register_layer
from proxreplay.proximal.gram.rows import Rows
from proxreplay.proximal.layers.torch_layers import embedding_rows, layernorm_rows, rows_by_element

check_version("transformers")


@register_layer(
    "transformers.pytorch_utils.Conv1D", maps=LinearMap(weight=Part("weight", swap=True))
)
def conv1d_rows(layer: nn.Module, x: Tensor) -> Tensor:
    """``z = x``: a Linear that stores its weight as ``[in, out]``, as GPT-2 has it."""
    return x.reshape(1, -1, x.shape[-1])


RMS_NORMS = (
    "transformers.models.*RMSNorm",
    "transformers.models.*T5LayerNorm",  # T5, MT5, UMT5, LongT5
    "transformers.models.*.SwitchTransformersLayerNorm",
    "transformers.models.*.Pix2StructLayerNorm",
    "transformers.models.*.Pop2PianoLayerNorm",
    "transformers.models.*.UdopLayerNorm",
)


@register_layer(*RMS_NORMS, maps=LinearMap(bias=None))
def rms_norm_rows(layer: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
    """``z = x / rms(x)``, one group for every element of the weight.

    The output is ``w z``, or ``(1 + w) z`` as Gemma has it. Either way ``z`` is what the output
    changes by when all weights go from 0 to 1, whatever the layer adds under the root.
    """
    weight = torch.zeros_like(layer.get_parameter("weight"), dtype=torch.float32)
    if any(x.dtype == torch.float64 for x in (*args, *kwargs.values())):
        weight = weight.double()
    args = tuple(x.to(weight.dtype) for x in args)
    kwargs = {name: x.to(weight.dtype) for name, x in kwargs.items()}
    at_0 = functional_call(layer, {"weight": weight}, args, kwargs)
    at_1 = functional_call(layer, {"weight": weight + 1}, args, kwargs)
    return rows_by_element(at_1 - at_0, weight.ndim)


@register_layer("transformers.models.*ScaledWordEmbedding", maps=LinearMap(bias=None, lookup=True))
def scaled_embedding_rows(layer: nn.Embedding, input_ids: Tensor) -> Rows:
    """``z = scale`` in the group of the token, one row for every token."""
    scale: Any = layer.embed_scale  # a number, or a buffer with one
    return replace(embedding_rows(layer, input_ids), scale=float(scale))


@register_layer("transformers.models.*.ConvNext*LayerNorm", "transformers.models.*.Sam*LayerNorm")
def channels_layernorm_rows(layer: nn.LayerNorm, features: Tensor) -> Tensor:
    """The rows of a LayerNorm over the channels, wherever they are."""
    first = layer.data_format == "channels_first"
    return layernorm_rows(layer, features.permute(0, 2, 3, 1) if first else features)
