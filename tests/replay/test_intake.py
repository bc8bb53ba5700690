import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proxreplay import Batch, Learner, UnlimitedMemory
from proxreplay.errors import InputError
from proxreplay.models import mlp
from proxreplay.replay.inputs import InputKind, as_inputs
from proxreplay.replay.labels import Labels

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
    assert labels.met == {0, 3}
    assert labels.decode(indices).tolist() == [3, 0]


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


class Column:
    """What pandas and polars have in common."""

    def __init__(self, values: list[object]) -> None:
        self.values = values

    def to_numpy(self) -> np.ndarray:
        return np.array(self.values, dtype=object)


def test_columns_of_tables_are_labels() -> None:
    assert Labels().meet(Column(["b", "a"]))[1].names == ("b", "a")
    assert Labels().meet(Column([3, 0]))[0].tolist() == [3, 0]
    learner = Learner(mlp(2)).learn_stream(np.ones((4, 2)), Column(["a", "b", "a", "c"]))
    assert learner.labels == ["a", "b", "c"]


def test_one_example_is_a_batch_of_one() -> None:
    learner = Learner(mlp(2))
    for label in ("cat", "dog"):
        learner.learn([0.0, 1.0], label)
    assert learner.labels == ["cat", "dog"]
    assert learner.predict([0.0, 1.0]).shape == (1,)
    assert learner.predict_proba(torch.ones(2)).shape == (1, 2)
    numbers = Learner(mlp(2))
    numbers.learn(np.ones(2), np.int64(1))
    numbers.learn(torch.ones(2), torch.tensor(0))
    assert numbers.memory.class_counts == {0: 1, 1: 1}


@pytest.mark.parametrize("y", [[3, 0], ["b", "a"]], ids=["integers", "names"])
def test_predictions_are_arrays_whatever_the_labels(y: list[object]) -> None:
    learner = Learner(mlp(2))
    learner.learn(torch.eye(2), y)
    predicted = learner.predict(torch.eye(2))
    assert isinstance(predicted, np.ndarray)
    assert set(predicted.tolist()) <= set(y)


@pytest.mark.parametrize("action", ["learn", "remember"])
def test_an_integer_far_beyond_what_was_met_is_refused(action: str) -> None:
    learner = Learner(mlp(2))
    with pytest.raises(InputError, match=r"label 1000000, but the head has 1 outputs.*Give names"):
        getattr(learner, action)(torch.eye(2), [0, 10**6])
    assert learner.model.head.out_features == 1
    assert learner.labels == []
    learner.learn(torch.eye(2), [0, 9_000])
    learner.learn(torch.eye(2), [18_000, 1])
    learner.model.head.grow(30_000)
    memory = UnlimitedMemory()
    memory.add(Batch(torch.eye(2), torch.tensor([0, 10**6])), torch.Generator())
    with pytest.raises(InputError, match="label 1000000"):
        Learner(mlp(2), memory)


def test_a_source_of_something_else_is_refused() -> None:
    with pytest.raises(InputError, match="a source of Tensor; give Batch objects or pairs"):
        Learner(mlp(2)).learn_stream(torch.eye(2))


def test_an_integer_beyond_64_bits_is_refused() -> None:
    with pytest.raises(InputError, match=f"label {2**70}; give names"):
        Labels().meet([1, 2**70])
