"""Which example, and which place in it, every row of a call belongs to.

Sequences of different lengths come as one batch with a mask ``[n, T]``. Rows of padded tokens are
not data: they are left out. Rows that are no tokens (of a head over pooled sequences) all stay. A
lookup that is made once for the whole batch (position ids of shape ``[1, T]``) counts once for each
example, as its output is broadcast over them.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from proxreplay.errors import InputError
from proxreplay.proximal.gram.rows import Rows
from proxreplay.proximal.layers.batches import Padded, count_samples, tensors_of
from proxreplay.proximal.layers.torch_layers import TokenRows

MASK, DECODER_MASK = "attention_mask", "decoder_attention_mask"
CROSS = ("EncDecAttention", "encoder_attn", "crossattention", "cross_attn", "cross_attention")
SOURCES = ("k", "v", "key", "value", "k_proj", "v_proj")  # by which those read the encoder


@dataclass(frozen=True)
class Layout:
    """How a batch is laid out."""

    n: int  # number of examples
    # the number of places per example of every tensor of the batch
    lengths: frozenset[int] = frozenset()
    # [n, T], True for data: of the model's input, and of its decoder's where it has one; None where
    # all is data
    masks: tuple[Tensor | None, Tensor | None] = (None, None)
    # the model's input, which tells encoder and decoder apart where both are as long
    first: Tensor | None = None
    two: bool = False  # whether the model has an encoder and a decoder
    batch_dim: int = 0  # the dimension of the examples

    @classmethod
    def of(
        cls, batch: Any, batch_dim: int = 0, *, two: bool = False, where: str = "refresh"
    ) -> "Layout":
        """The layout of a batch, with the mask that came with it; a mask that is none is refused.

        Args:
            batch: what the model is called with, see `call`.
            batch_dim: the dimension of the examples.
            two: whether the model has an encoder and a decoder.
            where: what a refusal begins with.
        """
        n = count_samples(batch, batch_dim)
        call = batch.call if isinstance(batch, Padded) else batch
        first = next(tensors_of(call), None)
        lengths = frozenset(_lengths(call, batch_dim))
        named = call if isinstance(call, Mapping) else {}
        given = {MASK: named.get(MASK), DECODER_MASK: named.get(DECODER_MASK)}
        if isinstance(batch, Padded):
            given = {"mask": batch.mask, DECODER_MASK: None}
        masks = [
            _checked(f"{where}: {key}", mask, call, n, batch_dim) for key, mask in given.items()
        ]
        return cls(n, lengths, (masks[0], masks[1]), first, two, batch_dim)

    def seen(self, name: str, args: Any, kwargs: Mapping[str, Any], rows: Rows) -> Rows:
        """The rows of a call that are data, once for every example that sees them; see `real`."""
        rows, real = self.real(name, args, kwargs, rows)
        return rows if real is None else rows.only(real)

    def real(
        self, name: str, args: Any, kwargs: Mapping[str, Any], rows: Rows
    ) -> tuple[Rows, Tensor | None]:
        """The rows of a call, once for every example that sees them, and which of them are data.

        Args:
            name: of the module.
            args: of the call.
            kwargs: of the call.
            rows: of all places, in the order of the leading dimensions of the module's input.

        Returns:
            Rows, and booleans ``[rows]``; None if all are data.
        """
        if self.masks == (None, None) and not isinstance(rows, TokenRows):
            return rows, None
        mask = self._mask(name, rows)
        dims = _leading(args, kwargs, rows.shape[1])
        if isinstance(rows, TokenRows) and self._shared(dims):
            return self._for_each(rows, dims, mask)
        if mask is None or not dims or rows.shape[1] == int(mask.sum()):
            return rows, None  # all is data, or packed already
        real = self.places(mask, dims)
        if real is not None:
            return rows, real.flatten()
        if dims[0] % self.n:
            warnings.warn(
                f"'{name}': its {rows.shape[1]} rows cannot be matched with a mask of shape "
                f"{tuple(mask.shape)}; all of them count, those of padding too.",
                stacklevel=2,
            )
        return rows, None

    def _for_each(
        self, rows: TokenRows, dims: tuple[int, ...], mask: Tensor | None
    ) -> tuple[Rows, Tensor | None]:
        """A lookup that was made once, as every example sees it: up to its own length."""
        tokens, counted = rows.tokens.repeat(self.n), rows.counted.repeat(self.n)
        rows = replace(rows, tokens=tokens, counted=counted)
        dims = (self.n, *(dims[1:] if dims[0] == 1 else dims))
        if mask is None or mask.shape[1] not in dims[1:]:
            return rows, None
        real = torch.ones(dims, dtype=torch.bool, device=mask.device)
        for at in (i for i in range(1, len(dims)) if dims[i] == mask.shape[1]):
            own = [self.n] + [mask.shape[1] if i == at else 1 for i in range(1, len(dims))]
            real = real & mask.view(own)  # relative positions have two such dimensions
        return rows, real.flatten()

    def places(self, mask: Tensor, dims: tuple[int, ...]) -> Tensor | None:
        """Which places of ``dims`` are data; None if no dimensions are those of the mask."""
        n, T = mask.shape
        if dims[0] == n and T in dims[1:]:
            at = dims.index(T, 1)
            shape = (n, *(T if i == at else 1 for i in range(1, len(dims))))
        elif self.batch_dim == 1 and dims[:2] == (T, n):
            mask, shape = mask.T, (T, n, *(1 for _ in dims[2:]))
        elif dims[0] == n * T:
            shape = (n * T, *(1 for _ in dims[1:]))
        elif len(dims) > 1 and dims[0] % n == 0 and dims[1] == T:  # heads or windows of an example
            mask = mask.repeat_interleave(dims[0] // n, dim=0)
            shape = (dims[0], T, *(1 for _ in dims[2:]))
        else:
            return None
        return mask.reshape(shape).expand(dims)

    def _shared(self, dims: tuple[int, ...]) -> bool:
        """Whether a lookup of these dimensions was made once for all examples."""
        return self.n > 1 and bool(dims) and dims[0] != self.n and dims[0] in {1, *self.lengths}

    def _mask(self, name: str, rows: Rows) -> Tensor | None:
        """The mask of what a module is given: that of the decoder, if it belongs to one."""
        main, decoder = self.masks
        if not self.two or (main is None and decoder is None):
            return main
        *path, last = name.split(".")
        if "encoder" in path or (last in SOURCES and any(part in CROSS for part in path)):
            return main
        if isinstance(rows, TokenRows) and "decoder" not in path and self.first is not None:
            return main if torch.equal(rows.tokens, self.first.flatten()) else decoder
        return decoder


def has_two_sides(names: Iterable[str]) -> bool:
    """Whether modules of these names are an encoder and a decoder."""
    parts = {part for name in names for part in name.split(".")}
    return {"encoder", "decoder"} <= parts


def _checked(key: str, mask: Any, call: Any, n: int, batch_dim: int) -> Tensor | None:
    """A mask as ``[n, T]`` of booleans; None if it says that all is data."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) != n:
        shape = tuple(getattr(mask, "shape", ())) or type(mask).__name__
        raise InputError(
            f"{key} has shape {shape}; a mask of padding is [n, T] with n = {n} examples. "
            "Give one of that shape; or refresh(..., mask=False) if nothing is padded."
        )
    lengths = set(_lengths(call, batch_dim, besides=mask))
    if lengths and mask.shape[1] not in lengths:
        raise InputError(
            f"{key} has shape {tuple(mask.shape)}, but the tensors of the batch have "
            f"{sorted(lengths)} places per example; give it as many."
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError(
            f"{key} holds other values than 0 (padding) and 1 (data); give mask != 0 or "
            "whatever says which places are data."
        )
    real = mask.bool()
    empty = (~real.any(dim=1)).nonzero()[:, 0].tolist()
    if empty:
        raise InputError(f"{key} says that all of example {empty[0]} is padding; leave it out.")
    return None if bool(real.all()) else real


def _lengths(call: Any, batch_dim: int, besides: Tensor | None = None) -> Iterator[int]:
    """How many places per example every tensor of a call has, besides one."""
    for x in tensors_of(call):
        if x.ndim >= 2 and x is not besides and batch_dim < 2:
            yield x.shape[1 - batch_dim]


def _leading(args: Any, kwargs: Mapping[str, Any], rows: int) -> tuple[int, ...]:
    """The leading dimensions of the first tensor of a call that make up its rows."""
    for x in filter(torch.is_tensor, (*args, *kwargs.values())):
        for count in range(1, x.ndim + 1):
            if prod(x.shape[:count]) == rows:
                return tuple(x.shape[:count])
        if x.ndim > 2 and rows == len(x) * prod(x.shape[2:]):  # channels come second
            return (len(x), *x.shape[2:])
    return ()
