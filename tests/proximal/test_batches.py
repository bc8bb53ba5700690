"""What refresh takes, and what it refuses."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from proxreplay import LPR
from proxreplay.errors import InputError
from tests.reference import assert_same_state, random


class Masked(nn.Module):
    """Called with tokens and a mask, as language models are."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 2)
        self.calls = []

    def forward(self, x, mask=None, scale=1.0):
        self.calls.append(len(x))
        return self.out(x if mask is None else x * mask * scale)


def refreshed(examples, model=None, **options):
    lpr = LPR(Masked().double() if model is None else model, batch_size=4, **options)
    lpr.refresh(examples)
    return lpr


def test_a_tuple_is_one_calls_arguments_and_split_like_a_tensor():
    x, mask = random(6, 3), random(6, 3, seed=1)
    model = Masked().double()
    lpr, truth = refreshed((x, mask), model), refreshed(x * mask)
    assert model.calls[:2] == [4, 2]
    assert lpr.layers["out"].positions == 1
    torch.testing.assert_close(lpr.shrinkage("out").Lambda, truth.shrinkage("out").Lambda)


def test_a_dict_is_split_like_a_tensor_and_what_has_no_examples_goes_along():
    x, mask = random(6, 3), random(1, 3, seed=1)
    model = Masked().double()
    lpr = refreshed({"x": x, "mask": mask, "scale": 2.0}, model)
    assert model.calls[:2] == [4, 2]
    truth = refreshed(x * mask * 2)
    torch.testing.assert_close(lpr.shrinkage("out").Lambda, truth.shrinkage("out").Lambda)


def test_arrays_are_welcome_in_the_precision_of_the_model():
    x = random(6, 3)
    truth = refreshed(x.float(), Masked()).shrinkage("out").Lambda
    for given in (x.numpy(), [x.numpy()], (x.numpy(),), {"x": x.numpy()}):
        torch.testing.assert_close(refreshed(given, Masked()).shrinkage("out").Lambda, truth)


def test_a_list_that_may_be_batches_or_arguments_is_refused_with_both_spellings():
    a, b = random(4, 3), random(4, 3, seed=1)
    with pytest.raises(InputError, match=r"\[\(a,\), \(b,\)\] for batches, \(a, b\) for arg"):
        refreshed([a, b])
    truth = refreshed(torch.cat([a, b])).shrinkage("out").Lambda
    for batches in ([(a,), (b,)], iter([a, b]), [{"x": a}, {"x": b}]):
        made = refreshed(batches)
        torch.testing.assert_close(made.shrinkage("out").Lambda, truth)
    one = nn.Sequential(nn.Linear(3, 2)).double()
    assert refreshed([a, b], one).layers["0"].d == 4  # one argument only: batches


def test_a_loader_of_inputs_and_labels_needs_a_word():
    x, y = random(6, 3), torch.zeros(6, dtype=torch.int64)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    lpr = LPR(Masked().double())
    with pytest.raises(InputError, match=r"inputs=lambda batch: batch\[0\]"):
        lpr.refresh(loader)
    assert not lpr.layers
    lpr.refresh(loader, inputs=lambda batch: batch[0])
    truth = refreshed(x).shrinkage("out").Lambda
    torch.testing.assert_close(lpr.shrinkage("out").Lambda, truth)
    lpr.refresh(DataLoader(TensorDataset(x), batch_size=4))  # lists of one
    torch.testing.assert_close(lpr.shrinkage("out").Lambda, truth)


@pytest.mark.parametrize(
    "examples", [(torch.randn(4, 3), torch.randn(4, 3)), [(torch.randn(4, 3), torch.ones(4))]]
)
def test_more_arguments_than_the_model_takes_are_refused_with_the_way_out(examples):
    lpr = LPR(nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(InputError, match=r"cannot be called with 2 arguments.*refresh\(\[a, b\]\)"):
        lpr.refresh(examples)
    assert not lpr.layers


@pytest.mark.parametrize("examples", [3, None, "x"])
def test_what_is_nothing_to_call_a_model_with_is_refused(examples):
    with pytest.raises(InputError, match="not something a model is called with"):
        LPR(nn.Linear(3, 2)).refresh(examples)


def test_inputs_must_be_a_function():
    with pytest.raises(InputError, match="inputs=0; give a function"):
        LPR(nn.Linear(3, 2)).refresh([random(6, 3)], inputs=0)


def test_examples_without_a_dimension_of_examples_are_not_counted_by_their_width():
    with pytest.raises(InputError, match=r"of shape \[3\] is one example without a dimension"):
        LPR(nn.Linear(3, 2).double()).refresh([random(3), random(3, seed=1)])
    scalars = nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 2)).double()
    assert refreshed([random(5)], scalars).layers["1"].positions == 1


def test_a_dict_whose_tensors_differ_in_length_is_named():
    lpr = refreshed(random(6, 3))
    before = lpr.state_dict()
    with pytest.raises(InputError, match=r"differ in length \({'x': 4, 'mask': 5}\).*Masked fails"):
        lpr.refresh({"x": random(6, 3), "mask": random(5, 3)})
    assert_same_state(lpr.state_dict(), before)
