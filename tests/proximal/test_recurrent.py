"""Recurrent layers against a step-by-step twin: every weight a linear map with rows over time."""

from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence, pad_sequence

from proxreplay import LPR
from tests.reference import (
    assert_same_state,
    fill_gradients_,
    flat_gradient,
    jacobian,
    random,
    shake_,
    trained,
)

OMEGA_0, BETA = 1.7, 1.3


def step(mode, x, h, c, p, end):
    """One time of one layer, from the formulas; the new states and what a projection sees."""
    a = F.linear(x, p[f"weight_ih{end}"], p.get(f"bias_ih{end}"))
    b = F.linear(h, p[f"weight_hh{end}"], p.get(f"bias_hh{end}"))
    if mode == "LSTM":
        i, f, g, o = (a + b).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        cell = o.sigmoid() * c.tanh()
        projection = p.get(f"weight_hr{end}")
        return (cell if projection is None else F.linear(cell, projection)), c, cell
    if mode == "GRU":
        (ar, az, an), (br, bz, bn) = a.chunk(3, -1), b.chunk(3, -1)
        z = (az + bz).sigmoid()
        return (1 - z) * (an + (ar + br).sigmoid() * bn).tanh() + z * h, c, None
    return (a + b).tanh() if mode == "RNN_TANH" else (a + b).relu(), c, None


def rows_of(layer, sequence, hidden, cell):
    """The inputs of every map over one sequence ``[T, d]``, and its output."""
    p, seen = dict(layer.named_parameters()), defaultdict(list)
    ends = [[f"_l{k}"] + [f"_l{k}_reverse"] * layer.bidirectional for k in range(layer.num_layers)]
    at = iter(range(100))
    for both in ends:
        outputs = []
        for end in both:
            i, out = next(at), [None] * len(sequence)
            h, c = hidden[i], cell[i]
            times = range(len(sequence))
            for t in reversed(times) if end.endswith("reverse") else times:
                seen[f"ih{end}"].append(sequence[t])
                seen[f"hh{end}"].append(h)
                h, c, inside = step(layer.mode, sequence[t], h, c, p, end)
                if layer.proj_size:
                    seen[f"hr{end}"].append(inside)
                out[t] = h
            outputs.append(torch.stack(out))
        sequence = torch.cat(outputs, dim=-1)
    return {name: torch.stack(values).detach() for name, values in seen.items()}, sequence


def check_against_steps(layer, sequences, call, states=None, **how):
    """Gradients after a refresh with ``call`` against Jacobians of every map of the twin."""
    size = layer.proj_size or layer.hidden_size
    count = layer.num_layers * (1 + layer.bidirectional)
    rows = defaultdict(list)
    outputs = []
    for k, one in enumerate(sequences):
        hidden = random(count, size).mul(0) if states is None else states[0][:, k]
        cell = random(count, layer.hidden_size).mul(0) if states is None else states[1][:, k]
        seen, out = rows_of(layer, one, hidden, cell)
        outputs.append(out)
        for name, values in seen.items():
            rows[name].append(values)
    lpr = LPR(layer, OMEGA_0, BETA)
    lpr.refresh([call], **how)
    assert not lpr.untreated
    assert lpr.layers.keys() == rows.keys()
    g = fill_gradients_(layer)
    n, steps = len(sequences), sum(map(len, sequences))
    p = trained(layer)
    ends = torch.tensor([value.numel() for value in p.values()]).cumsum(0).tolist()
    total = torch.eye(len(g), dtype=g.dtype)
    for name, values in rows.items():
        Z = torch.cat(values)
        assert lpr.layers[name].positions == pytest.approx(steps / n)

        def output(p, Z=Z, name=name):
            return F.linear(Z, p[f"weight_{name}"], p.get(f"bias_{name}"))

        own = {key: value for key, value in p.items() if key.endswith(f"_{name}")}
        at = [torch.arange(e - p[k].numel(), e) for k, e in zip(p, ends, strict=True) if k in own]
        J = jacobian(output, own)
        at = torch.cat(at)
        total[at[:, None], at] += OMEGA_0 / (n * (steps / n) ** BETA) * J.T @ J
    lpr.precondition_()
    torch.testing.assert_close(
        flat_gradient(layer), torch.linalg.solve(total, g), rtol=0, atol=1e-9
    )
    return outputs


KINDS = {
    "lstm": lambda: nn.LSTM(2, 3),
    "lstm-deep-both-ways": lambda: nn.LSTM(
        2, 2, num_layers=2, bidirectional=True, batch_first=True
    ),
    "lstm-projected-both-ways": lambda: nn.LSTM(
        2, 3, num_layers=2, proj_size=2, bidirectional=True, batch_first=True
    ),
    "lstm-projected-no-bias": lambda: nn.LSTM(2, 3, proj_size=2, bias=False),
    "gru-deep": lambda: nn.GRU(2, 3, num_layers=2),
    "gru-both-ways-no-bias": lambda: nn.GRU(2, 3, bias=False, bidirectional=True, batch_first=True),
    "rnn": lambda: nn.RNN(2, 3, batch_first=True),
    "rnn-relu": lambda: nn.RNN(2, 3, nonlinearity="relu", batch_first=True),
}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())


@kinds
@pytest.mark.parametrize("given_state", [True, False], ids=["state", "no-state"])
def test_a_recurrent_layer_has_rows_over_time(make, given_state):
    layer, n, T = shake_(make()), 3, 4
    x = random(n, T, 2)
    count = layer.num_layers * (1 + layer.bidirectional)
    states = (
        random(count, n, layer.proj_size or layer.hidden_size, seed=1),
        random(count, n, layer.hidden_size, seed=2),
    )
    call = {"input": x if layer.batch_first else x.transpose(0, 1)}
    if given_state:
        call["hx"] = states if layer.mode == "LSTM" else states[0]
    outputs = check_against_steps(
        layer, x, call, states if given_state else None, batch_dim=0 if layer.batch_first else 1
    )
    out = layer(**call)[0]
    twin = torch.stack(outputs)
    torch.testing.assert_close(twin, out if layer.batch_first else out.transpose(0, 1))


class Packed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, lengths):
        return self.layer(
            nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        )


@kinds
def test_packed_sequences_have_rows_for_their_own_length_only(make):
    layer, lengths = shake_(make()), [2, 4, 1, 3]
    sequences = [random(T, 2, seed=T + 10 * k) for k, T in enumerate(lengths)]
    check_against_steps(layer, sequences, (pack_sequence(sequences, enforce_sorted=False),))
    x = pad_sequence(sequences, batch_first=True)
    alone = LPR(layer, OMEGA_0, BETA, batch_size=1)  # what is packed is not split
    inside = LPR(Packed(layer), OMEGA_0, BETA)
    alone.refresh(pack_sequence(sequences, enforce_sorted=False))
    inside.refresh([(x, torch.tensor(lengths))])
    for name, one in alone.layers.items():
        other = inside.layers[f"layer.{name}"]
        assert (one.positions, one.omega) == (other.positions, other.omega)
        torch.testing.assert_close(
            alone.shrinkage(name).Lambda, inside.shrinkage(f"layer.{name}").Lambda
        )


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_a_cell_called_in_a_loop_equals_the_layer(kind, bias):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = kind(2, 3, bias=bias)

        def forward(self, x):
            state = None
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
            return state[0] if isinstance(state, tuple) else state

    loop = shake_(Loop())
    whole = {nn.LSTMCell: nn.LSTM, nn.GRUCell: nn.GRU, nn.RNNCell: nn.RNN}[kind]
    layer = whole(2, 3, bias=bias, batch_first=True).double()
    layer.load_state_dict({f"{k}_l0": v for k, v in loop.cell.state_dict().items()})
    x = random(3, 4, 2)
    a, b = LPR(loop, OMEGA_0, BETA), LPR(layer, OMEGA_0, BETA)
    a.refresh(x)
    b.refresh(x)
    for name in ("ih", "hh"):
        torch.testing.assert_close(
            a.shrinkage(f"cell.{name}").Lambda, b.shrinkage(f"{name}_l0").Lambda
        )
        assert a.layers[f"cell.{name}"].positions == 4


def test_sequences_without_a_dimension_for_examples():
    class OneByOne(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return torch.stack([self.layer(one)[0] for one in x])

    layer = shake_(nn.LSTM(2, 3, bidirectional=True))
    x = random(3, 5, 2)
    alone, batch = LPR(OneByOne(layer)), LPR(layer)
    alone.refresh(x)
    batch.refresh([x.transpose(0, 1)], batch_dim=1)
    for name in batch.layers:
        torch.testing.assert_close(
            alone.shrinkage(f"layer.{name}").Lambda, batch.shrinkage(name).Lambda
        )


def test_a_state_of_a_recurrent_layer_goes_on():
    layer = nn.GRU(2, 3, batch_first=True)
    lpr, other = LPR(layer), LPR(layer)
    lpr.refresh(torch.randn(3, 4, 2))
    other.load_state_dict(lpr.state_dict())
    assert_same_state(other.state_dict(), lpr.state_dict())
    assert lpr.cost(torch.randn(1, 4, 2)).layers.keys() == lpr.layers.keys()
