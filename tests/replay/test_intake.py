import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proxreplay.errors import InputError
from proxreplay.replay.intake import InputKind, Labels, as_inputs

INPUTS = {
    "float64 array": (np.ones((2, 3)), torch.float32),
    "float32 array": (np.ones((2, 3), dtype=np.float32), torch.float32),
    "big-endian array": (np.ones((2, 3), dtype=">f8"), torch.float32),
    "reversed array": (np.ones((2, 3))[::-1], torch.float32),
    "uint8 array": (np.ones((2, 3), dtype=np.uint8), torch.uint8),
    "uint16 array": (np.ones((2, 3), dtype=np.uint16), torch.int64),
    "bool array": (np.ones((2, 3), dtype=bool), torch.bool),
    "nested list": ([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], torch.float32),
    "list of ints": ([[1, 1, 1], [1, 1, 1]], torch.int64),
    "float64 tensor": (torch.ones(2, 3, dtype=torch.float64), torch.float32),
    "tensor with a gradient": (torch.ones(2, 3, requires_grad=True), torch.float32),
}


@pytest.mark.parametrize(("x", "dtype"), INPUTS.values(), ids=INPUTS)
def test_inputs_of_every_kind(x: object, dtype: torch.dtype) -> None:
    tensor = as_inputs(x, torch.float32)
    assert tensor.dtype == dtype
    assert not tensor.requires_grad
    assert torch.equal(tensor, torch.ones(2, 3, dtype=dtype))


def test_a_read_only_array_is_no_trouble() -> None:
    array = np.ones((2, 3), dtype=np.float32)
    array.flags.writeable = False
    assert as_inputs(array, torch.float32).shape == (2, 3)


def test_kind_goes_round() -> None:
    kind = InputKind.of(torch.zeros(4, 3, 2, dtype=torch.uint8))
    assert InputKind.from_dict(kind.to_dict()) == kind
    assert str(kind) == "[3, 2] uint8"


INTEGERS = {
    "int64 tensor": torch.tensor([3, 0]),
    "uint8 tensor": torch.tensor([3, 0], dtype=torch.uint8),
    "int32 array": np.array([3, 0], dtype=np.int32),
    "uint16 array": np.array([3, 0], dtype=np.uint16),
    "list": [3, 0],
    "tuple": (3, 0),
    "list of numpy integers": [np.int64(3), np.int16(0)],
    "list of tensors": [torch.tensor(3), torch.tensor(0)],
    "object array": np.array([3, 0], dtype=object),
}


@pytest.mark.parametrize("y", INTEGERS.values(), ids=INTEGERS)
def test_integers_are_their_own_index(y: object) -> None:
    indices, labels = Labels().meet(y)
    assert indices.dtype == torch.int64
    assert indices.tolist() == [3, 0]
    assert labels.kind == "integers"
    assert labels.decode(indices) is indices


NAMES = {
    "list of strings": ["b", "a", "b"],
    "array of strings": np.array(["b", "a", "b"]),
    "object array": np.array(["b", "a", "b"], dtype=object),
    "bools": [True, False, True],
    "bool array": np.array([True, False, True]),
    "bool tensor": torch.tensor([True, False, True]),
    "mixed": [1, "a", 1],
}


@pytest.mark.parametrize("y", NAMES.values(), ids=NAMES)
def test_names_get_indices_in_order_of_arrival(y: object) -> None:
    indices, labels = Labels().meet(y)
    assert indices.tolist() == [0, 1, 0]
    assert labels.kind == "names"


def test_tuples_can_be_labels() -> None:
    indices, labels = Labels().meet([("a", 1), ("a", 2)])
    assert indices.tolist() == [0, 1]
    assert labels.names == (("a", 1), ("a", 2))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.text(max_size=2), min_size=1, max_size=5), min_size=1, max_size=5))
def test_names_keep_their_index(batches: list[list[str]]) -> None:
    labels = Labels()
    for batch in batches:
        before = labels
        indices, labels = labels.meet(batch)
        assert labels.names[: len(before.names)] == before.names
        assert labels.decode(indices).tolist() == batch
        assert labels.find(batch).tolist() == indices.tolist()
    assert len(set(labels.names)) == len(labels.names)
    assert labels.find(["longer than any"]).tolist() == [-1]


def test_meeting_labels_changes_nothing() -> None:
    labels = Labels()
    labels.meet(["a"])
    assert labels == Labels()


def test_kinds_do_not_mix() -> None:
    _, labels = Labels().meet(["a"])
    with pytest.raises(InputError, match="labels that are integers, but earlier ones were names"):
        labels.meet([1])
    with pytest.raises(InputError, match="integers"):
        labels.find(torch.tensor([1]))
