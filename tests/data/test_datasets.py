import pytest
import torch

from proxreplay.data import Dataset, Examples, digits
from proxreplay.errors import DataError


def examples(labels, domains=None):
    labels = torch.tensor(labels)
    return Examples(torch.zeros(len(labels), 2), labels, domains)


def test_indexing_gathers_inputs_labels_and_domains_together():
    inputs = torch.arange(12).view(6, 2)
    everything = Examples(inputs, torch.arange(6), torch.arange(6) // 3)
    some = everything[torch.tensor([4, 0])]
    assert some.inputs.tolist() == [[8, 9], [0, 1]]
    assert some.labels.tolist() == [4, 0]
    assert some.domains.tolist() == [1, 0]


def test_gathered_examples_are_a_copy():
    everything = examples([0, 1, 2])
    everything[torch.tensor([1])].inputs.fill_(7)
    assert everything.inputs.sum() == 0


def test_too_few_labels_are_refused():
    with pytest.raises(DataError, match="3 inputs but labels of shape"):
        Examples(torch.zeros(3, 2), torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize(
    ("train", "classes", "message"),
    [
        pytest.param(examples([0, 2]), ("a", "b"), "run from 0 to 2", id="label-beyond-classes"),
        pytest.param(examples([-1, 1]), ("a", "b"), "run from -1 to 1", id="negative-label"),
        pytest.param(
            Examples(torch.zeros(1, 2), torch.zeros(1)), ("a",), "torch.float32", id="float-labels"
        ),
        pytest.param(
            Examples(torch.zeros(0, 2), torch.zeros(0).long()),
            ("a",),
            "no training examples",
            id="empty",
        ),
    ],
)
def test_a_data_set_checks_itself(train, classes, message):
    with pytest.raises(DataError, match=message):
        Dataset("toy", train, examples([0]), classes)


def test_named_domains_need_domains():
    with pytest.raises(DataError, match="domains are named"):
        Dataset("toy", examples([0]), examples([0]), ("a",), domains=("d",))


def test_digits_are_split_without_overlap_and_with_every_class_in_each_part():
    data = digits()
    parts = [data.train, data.validation, data.test]
    assert sum(map(len, parts)) == 1797
    for part in parts:
        assert part.inputs.dtype == torch.uint8
        assert part.labels.unique().tolist() == list(range(10))
