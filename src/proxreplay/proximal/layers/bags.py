"""Sums and means of looked-up rows (EmbeddingBag): a Linear over counts of tokens."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from proxreplay.proximal.layers.registry import LinearMap, Part, register_layer


def bag_maps(layer: nn.EmbeddingBag) -> Mapping[str, LinearMap] | str:
    """The weight ``[vocabulary, out]``, unless the bag takes a maximum."""
    if layer.mode == "max":
        return "the maximum of an EmbeddingBag is not linear in its weight."
    return {"": LinearMap(Part("weight", swap=True), None)}


@register_layer(nn.EmbeddingBag, maps=bag_maps)
def bag_rows(
    layer: nn.EmbeddingBag,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """``z[v]`` = the weight of token ``v`` in the bag: its count, or its share; one row per bag."""
    tokens = input.reshape(-1)
    if offsets is None:  # one bag for every row of the input
        bags = torch.arange(len(input), device=tokens.device).repeat_interleave(input.shape[1])
        count = len(input)
    else:
        count = len(offsets) - layer.include_last_offset
        places = torch.arange(len(tokens), device=tokens.device)
        bags = torch.searchsorted(offsets[:count].to(places), places, right=True) - 1
    dtype = torch.promote_types(layer.weight.dtype, torch.float32)
    shares = torch.ones(len(tokens), dtype=dtype, device=tokens.device)
    if per_sample_weights is not None:
        shares = per_sample_weights.reshape(-1).to(dtype)
    if layer.padding_idx is not None:
        shares = shares * (tokens != layer.padding_idx)
    Z = shares.new_zeros(count, layer.num_embeddings)
    Z.index_put_((bags, tokens), shares, accumulate=True)
    if layer.mode == "mean":
        Z = Z / Z.sum(dim=1, keepdim=True).clamp_min(1)
    return Z[None]
