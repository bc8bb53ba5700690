"""How each layer type of torch turns its input into rows ``Z``: one small function per layer.

The shape they share is described in `registry`. Arguments are named as in the layer's ``forward``.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from proxreplay.proximal.gram.patches import PatchRows
from proxreplay.proximal.gram.rows import ColumnRows, DenseRows, Rows, span_of
from proxreplay.proximal.layers.registry import LinearMap, Part, register_layer


@register_layer(nn.Linear)
def linear_rows(layer: nn.Linear, input: Tensor) -> Tensor:
    """``z = x``, one row for every leading position."""
    return input.reshape(1, -1, layer.in_features)


@register_layer(nn.Conv1d, nn.Conv2d, nn.Conv3d, maps=LinearMap(weight=Part("weight", last=True)))
def convolution_rows(layer: _ConvNd, input: Tensor) -> Rows:
    """``z`` = the patch under the kernel, one row for every output position."""
    x = _batched(input, len(layer.kernel_size))
    around = layer._reversed_padding_repeated_twice  # last dimension first, as F.pad wants it
    zeros: tuple[tuple[int, int], ...] = ()
    if layer.padding_mode == "zeros":  # left to PatchRows, which need not copy x
        zeros = tuple(zip(around[-2::-2], around[::-2], strict=True))
    else:
        x = F.pad(x, around, mode=layer.padding_mode)
    return PatchRows(x, layer.kernel_size, layer.stride, layer.dilation, layer.groups, zeros)


@register_layer(
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    maps=LinearMap(weight=Part("weight", swap=True, last=True)),
)
def transposed_convolution_rows(
    layer: _ConvTransposeNd, input: Tensor, output_size: list[int] | None = None
) -> Rows:
    """Patches of the input with ``stride - 1`` zeros put between its elements.

    A transposed convolution is a convolution of stride 1 over that, with the kernel reversed and
    padded by ``dilation (k - 1) - padding``, plus the output padding at the far end.
    """
    dims = len(layer.kernel_size)
    x = _batched(input, dims)
    stride, dilation, kernel = (list(v) for v in (layer.stride, layer.dilation, layer.kernel_size))
    padding = [int(p) for p in layer.padding]  # never a word for this type
    extra = layer._output_padding(input, output_size, stride, padding, kernel, dims, dilation)
    size = [(length - 1) * s + 1 for length, s in zip(x.shape[2:], stride, strict=True)]
    spread = x.new_zeros(*x.shape[:2], *size)
    between = tuple(slice(None, None, s) for s in stride)
    spread[(slice(None), slice(None), *between)] = x
    margin = [
        (dil * (k - 1) - pad, dil * (k - 1) - pad + more)
        for k, dil, pad, more in zip(kernel, dilation, padding, extra, strict=True)
    ]
    # Margins may be negative, which F.pad reads as cropping.
    padded = F.pad(spread, [zeros for pair in reversed(margin) for zeros in pair])
    return PatchRows(padded, layer.kernel_size, (1,) * dims, layer.dilation, layer.groups)


@register_layer(_BatchNorm, nn.SyncBatchNorm)
def batchnorm_rows(layer: _BatchNorm, input: Tensor) -> Rows:
    """``z = (x - mean) / sqrt(var + eps)``, one group for every channel.

    Statistics are those of the batch in training and where the layer keeps no running ones, as the
    layer itself does.
    """
    if not layer.training and layer.running_mean is not None and layer.running_var is not None:
        return ColumnRows(input, layer.running_mean, (layer.running_var + layer.eps).rsqrt())
    return ColumnRows(F.batch_norm(input, None, None, training=True, momentum=0, eps=layer.eps))


@register_layer(_InstanceNorm)
def instancenorm_rows(layer: _InstanceNorm, input: Tensor) -> Rows:
    """``z`` = the input normalised over its positions, one group for every channel."""
    x = _batched(input, layer._get_no_batch_dim() - 1)
    own = layer.training or not layer.track_running_stats
    running = (None, None) if own else (layer.running_mean, layer.running_var)
    return ColumnRows(F.instance_norm(x, *running, use_input_stats=own, eps=layer.eps))


@register_layer(nn.GroupNorm)
def groupnorm_rows(layer: nn.GroupNorm, input: Tensor) -> Rows:
    """``z`` = the input normalised over its group of channels, one group for every channel."""
    return ColumnRows(F.group_norm(input, layer.num_groups, eps=layer.eps))


@register_layer(nn.LayerNorm)
def layernorm_rows(layer: nn.LayerNorm, input: Tensor) -> Tensor:
    """``z`` = the input normalised over ``normalized_shape``, one group for every element of it."""
    normalised = F.layer_norm(input, layer.normalized_shape, eps=layer.eps)
    return rows_by_element(normalised, len(layer.normalized_shape))


@register_layer(nn.RMSNorm)
def rmsnorm_rows(layer: nn.RMSNorm, x: Tensor) -> Tensor:
    """``z = x / rms(x)`` over ``normalized_shape``, one group for every element of it."""
    normalised = F.rms_norm(x, layer.normalized_shape, eps=layer.eps)
    return rows_by_element(normalised, len(layer.normalized_shape))


@dataclass(frozen=True)
class TokenRows(Rows):
    """The rows of an embedding: one group per token of the vocabulary, ``z = 1`` where it occurs.

    The Gram matrix of an embedding is diagonal; in this form it is the vector of the counts.
    """

    tokens: Tensor  # every position of the input, [rows]
    counted: Tensor  # which positions pass a gradient to the weight, [rows]
    vocabulary: int  # number of tokens there are
    dtype: torch.dtype  # of the statistic
    scale: float = 1.0  # what embeddings are multiplied with; z is that number, instead of 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(groups, rows, d)``."""
        return self.vocabulary, len(self.tokens), 1

    def part(self, start: int, stop: int, of: int) -> "TokenRows | None":
        """The tokens of some examples."""
        span = span_of(len(self.tokens), start, stop, of)
        if span is None:
            return None
        return replace(self, tokens=self.tokens[span], counted=self.counted[span])

    def dense(self) -> Tensor:
        """``Z`` itself, ``[vocabulary, rows, 1]``."""
        one_hot = F.one_hot(self.tokens, self.vocabulary) * self.counted[:, None]
        return one_hot.T[:, :, None].to(self.dtype) * self.scale

    def gram(self) -> Tensor:
        """``scale^2`` times how often every token occurs, ``[vocabulary, 1, 1]``."""
        return self._counts()[:, None, None] * self.scale**2

    def total(self) -> Tensor:
        """``Z'1``, ``[vocabulary, 1]``."""
        return self._counts()[:, None] * self.scale

    def only(self, keep: Tensor) -> "TokenRows":
        """Some of the positions: those where ``keep: [rows]`` is True."""
        keep = keep.to(self.tokens.device)
        return replace(self, tokens=self.tokens[keep], counted=self.counted[keep])

    def _counts(self) -> Tensor:
        counts = torch.bincount(self.tokens[self.counted], minlength=self.vocabulary)
        return counts.to(self.dtype)


@register_layer(nn.Embedding, maps=LinearMap(bias=None, lookup=True))
def embedding_rows(layer: nn.Embedding, input: Tensor) -> TokenRows:
    """``z = 1`` in the group of the token, one row for every token."""
    tokens = input.reshape(-1)
    counted = torch.ones_like(tokens, dtype=torch.bool)
    if layer.padding_idx is not None:
        counted = tokens != layer.padding_idx
    dtype = torch.promote_types(layer.weight.dtype, torch.float32)
    return TokenRows(tokens, counted, layer.num_embeddings, dtype)


def attention_maps(layer: nn.MultiheadAttention) -> dict[str, LinearMap]:
    """Three input projections, the output projection, and the learned extra key and value."""
    maps = {"out_proj": LinearMap(Part("out_proj.weight"), Part("out_proj.bias"))}
    E = layer.embed_dim
    for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
        packed = Part("in_proj_weight", i * E, (i + 1) * E)
        weight = packed if layer._qkv_same_embed_dim else Part(f"{name}_weight")
        maps[name] = LinearMap(weight, Part("in_proj_bias", i * E, (i + 1) * E))
    for name in ("bias_k", "bias_v"):
        maps[name] = LinearMap(None, Part(name))
    return maps


@register_layer(nn.MultiheadAttention, maps=attention_maps)
def attention_rows(
    layer: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> dict[str, Rows]:
    """``z`` = query, key and value for the input projections; the heads' output for the last one.

    The heads' output is had exactly by calling the layer with the identity as output projection.
    """
    identity = {"out_proj.weight": torch.eye(layer.embed_dim).to(layer.out_proj.weight)}
    if layer.out_proj.bias is not None:
        identity["out_proj.bias"] = torch.zeros_like(layer.out_proj.bias)
    heads, _ = functional_call(layer, identity, (query, key, value, *args), kwargs)
    same = {id(x): DenseRows(x.reshape(1, -1, x.shape[-1])) for x in (query, key, value)}
    examples = 1 if query.ndim == 2 else query.shape[0 if layer.batch_first else 1]
    once = DenseRows(query.new_ones(1, examples, 1))
    return {
        "q_proj": same[id(query)],
        "k_proj": same[id(key)],
        "v_proj": same[id(value)],
        "out_proj": DenseRows(heads.reshape(1, -1, layer.embed_dim)),
        "bias_k": once,
        "bias_v": once,
    }


def _batched(x: Tensor, spatial: int) -> Tensor:
    """The input with a leading dimension for the examples, which torch lets one leave out."""
    return x if x.ndim == spatial + 2 else x[None]


def rows_by_element(x: Tensor, dims: int) -> Tensor:
    """``[*positions, *shape]`` as ``[elements, rows, 1]`` with ``shape`` the last ``dims``."""
    return x.flatten(-dims).reshape(-1, x.shape[-dims:].numel()).T[:, :, None]
