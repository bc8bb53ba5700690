"""Recurrent layers: every weight is a linear map with rows over time.

Before its gates, a layer with hidden states ``h`` computes two linear maps,

    W_ih x[t] + b_ih   and   W_hh h[t-1] + b_hh,

and an LSTM with a projection a third, ``h[t] = W_hr (o[t] tanh(c[t]))``. The inputs of the first
are the layer's, those of the second its own outputs one step before; both have one row for every
example and time. Sequences that were packed have rows for their own length only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from proxreplay.proximal.gram.rows import DenseRows, Rows
from proxreplay.proximal.layers.registry import LinearMap, Part, register_layer

KERNELS: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


def recurrent_maps(layer: nn.RNNBase) -> dict[str, LinearMap]:
    """Two maps for every layer and direction, three with a projection."""
    maps = {}
    for end in _ends(layer):
        for one in ("ih", "hh"):
            maps[f"{one}{end}"] = LinearMap(Part(f"weight_{one}{end}"), Part(f"bias_{one}{end}"))
        maps[f"hr{end}"] = LinearMap(Part(f"weight_hr{end}"), None)  # left out where there is none
    return maps


@register_layer(nn.LSTM, nn.GRU, nn.RNN, maps=recurrent_maps)
def recurrent_rows(
    layer: nn.RNNBase, input: Tensor | PackedSequence, hx: Any = None
) -> dict[str, Rows]:
    """``z`` = the input for ``ih``, the hidden state before for ``hh``, both over all times.

    The sequence goes through one layer after the other, as the module itself does in evaluation.
    """
    sequence = _Sequence.of(layer, input)
    directions = 2 if layer.bidirectional else 1
    hidden, cell = _initial(layer, hx, sequence)
    rows: dict[str, Rows] = {}
    ends = list(_ends(layer))
    for depth in range(layer.num_layers):
        mine = slice(depth * directions, (depth + 1) * directions)
        output = _one_layer(layer, sequence, hidden[mine], cell[mine], ends[mine])
        for side, (end, h) in enumerate(zip(ends[mine], output.chunk(directions, -1), strict=True)):
            before = sequence.before(h, hidden[mine][side], backwards=side == 1)
            rows[f"ih{end}"] = DenseRows(sequence.rows(sequence.x))
            rows[f"hh{end}"] = DenseRows(sequence.rows(before))
            if layer.proj_size > 0:
                c = cell[mine][side]
                cells = _unprojected(layer, end, sequence, before, c, backwards=side == 1)
                rows[f"hr{end}"] = DenseRows(sequence.rows(cells))
        sequence = replace(sequence, x=output)
    return rows


@register_layer(
    nn.LSTMCell,
    nn.GRUCell,
    nn.RNNCell,
    maps=lambda layer: {
        one: LinearMap(Part(f"weight_{one}"), Part(f"bias_{one}")) for one in ("ih", "hh")
    },
)
def cell_rows(layer: nn.RNNCellBase, input: Tensor, hx: Any = None) -> dict[str, Rows]:
    """``z`` = the input for ``ih``, the hidden state for ``hh``, one row for every example."""
    hidden = hx[0] if isinstance(hx, tuple) else hx
    if hidden is None:
        hidden = input.new_zeros(*input.shape[:-1], layer.hidden_size)
    return {
        "ih": DenseRows(input.reshape(1, -1, layer.input_size)),
        "hh": DenseRows(hidden.reshape(1, -1, layer.hidden_size)),
    }


@dataclass(frozen=True)
class _Sequence:
    """Examples over time, ``x: [T, n, d]``, of lengths ``[n]``; how rows are laid out."""

    x: Tensor  # zeros after the end of a sequence
    lengths: Tensor  # of every example
    packed: bool  # rows are those of the sequences only
    batch_first: bool  # rows are ordered by examples, then times

    @classmethod
    def of(cls, layer: nn.RNNBase, input: Tensor | PackedSequence) -> "_Sequence":
        if isinstance(input, PackedSequence):
            x, lengths = pad_packed_sequence(input)
            return cls(x, lengths.to(x.device), True, True)
        x = input[:, None] if input.ndim == 2 else input
        if layer.batch_first and input.ndim == 3:
            x = x.transpose(0, 1)
        lengths = torch.full((x.shape[1],), len(x), device=x.device)
        return cls(x, lengths, False, layer.batch_first)

    @property
    def inside(self) -> Tensor:
        """Whether a time is before the end, ``[T, n]``."""
        times = torch.arange(len(self.x), device=self.x.device)
        return times[:, None] < self.lengths

    def rows(self, values: Tensor) -> Tensor:
        """``[T, n, d]`` as rows ``[1, rows, d]``."""
        inside = self.inside
        if self.batch_first:
            values, inside = values.transpose(0, 1), inside.T
        return (values[inside] if self.packed else values.flatten(0, 1))[None]

    def before(self, h: Tensor, first: Tensor, *, backwards: bool) -> Tensor:
        """The states ``[T, n, d]`` that each step started from; ``first: [n, d]`` for the first."""
        if not backwards:
            return torch.cat([first[None], h[:-1]])
        later = torch.cat([h[1:], first[None]])
        last = (self.lengths - 1)[None, :, None].expand(1, *first.shape)
        return later.scatter(0, last, first[None])


def _ends(layer: nn.RNNBase) -> Iterator[str]:
    """How the names of the parameters of every layer and direction end."""
    for depth in range(layer.num_layers):
        yield f"_l{depth}"
        if layer.bidirectional:
            yield f"_l{depth}_reverse"


def _initial(layer: nn.RNNBase, hx: Any, sequence: _Sequence) -> tuple[Tensor, Tensor]:
    """Hidden and cell states ``[layers * directions, n, size]``; zeros where none are given."""
    count, examples = len(list(_ends(layer))), sequence.x.shape[1]
    given = (None, None) if hx is None else hx if isinstance(hx, tuple) else (hx, None)
    states = []
    for state, size in zip(given, (layer.proj_size or layer.hidden_size, layer.hidden_size)):  # noqa: B905
        if state is None:
            states.append(sequence.x.new_zeros(count, examples, size))
        else:
            states.append(state[:, None] if state.ndim == 2 else state)
    return states[0], states[1]


def _one_layer(
    layer: nn.RNNBase, sequence: _Sequence, hidden: Tensor, cell: Tensor, ends: list[str]
) -> Tensor:
    """The outputs ``[T, n, directions * size]`` of one of the module's layers."""
    names = ["weight_ih", "weight_hh"] + ["bias_ih", "bias_hh"] * layer.bias
    names += ["weight_hr"] * (layer.proj_size > 0)
    weights = [getattr(layer, name + end) for end in ends for name in names]
    how = (weights, layer.bias, 1, 0.0, False, layer.bidirectional)
    kernel, lstm = KERNELS[layer.mode], layer.mode == "LSTM"
    output: Tensor
    if not sequence.packed:
        output = kernel(sequence.x, (hidden, cell) if lstm else hidden, *how, False)[0]
        return output
    packed = nn.utils.rnn.pack_padded_sequence(
        sequence.x, sequence.lengths.cpu(), enforce_sorted=False
    )
    hidden, cell = hidden[:, packed.sorted_indices], cell[:, packed.sorted_indices]
    start = (hidden, cell) if lstm else hidden
    data = kernel(packed.data, packed.batch_sizes, start, *how)[0]
    output = pad_packed_sequence(packed._replace(data=data))[0]
    return output


def _unprojected(
    layer: nn.RNNBase, end: str, sequence: _Sequence, before: Tensor, c: Tensor, *, backwards: bool
) -> Tensor:
    """``o tanh(c)`` of an LSTM at every time, ``[T, n, hidden]``, from the states before."""
    bias = (getattr(layer, f"bias_{one}{end}", None) for one in ("ih", "hh"))
    gates = F.linear(sequence.x, getattr(layer, f"weight_ih{end}"), next(bias))
    gates = gates + F.linear(before, getattr(layer, f"weight_hh{end}"), next(bias))
    i, f, g, o = gates.chunk(4, dim=-1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    inside = sequence.inside[:, :, None]
    out = torch.empty_like(o)
    for t in reversed(range(len(o))) if backwards else range(len(o)):
        c = torch.where(inside[t], f[t] * c + i[t] * g[t], c)
        out[t] = o[t] * c.tanh()
    return out
