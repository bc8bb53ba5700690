import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from proxreplay.data import from_arrays, from_npz, from_torch_dataset
from proxreplay.errors import DataError

X = np.arange(60, dtype=np.float32).reshape(20, 3)
Y = np.arange(20) % 4


def test_arrays_become_a_data_set():
    data = from_arrays("toy", (X, Y), (X[:2], Y[:2]), classes=["a", "b", "c", "d"])
    assert np.array_equal(data.train.inputs.numpy(), X)
    assert data.train.labels.tolist() == Y.tolist()
    assert (len(data.test), data.classes) == (2, ("a", "b", "c", "d"))


def test_without_test_every_fifth_example_of_a_class_is_set_aside():
    data = from_arrays("toy", (X, Y))
    assert (len(data.train), data.test.labels.tolist()) == (16, [0, 1, 2, 3])
    assert np.array_equal(data.test.inputs.numpy(), X[16:])


def test_domains_are_kept_and_counted():
    data = from_arrays("toy", (X, Y, np.arange(20) // 10), (X, Y, np.zeros(20, int)))
    assert data.domains == ("0", "1")
    assert data.train.domains.tolist() == [0] * 10 + [1] * 10


def test_grey_images_get_a_channel():
    data = from_arrays("toy", (np.zeros((4, 5, 5), np.uint8), np.arange(4)))
    assert data.train.inputs.shape == (4, 1, 5, 5)


def test_read_only_and_big_endian_arrays_are_fine():
    x = X.astype(">f4")
    x.setflags(write=False)
    assert from_arrays("toy", (x, Y)).train.inputs.dtype == torch.float32


@pytest.mark.parametrize(
    ("train", "message"),
    [
        pytest.param((X, Y[:3]), "20 inputs but labels", id="too-few-labels"),
        pytest.param((X, Y - 1), "run from -1", id="negative-labels"),
        pytest.param((X, Y + 0.5), "give integers", id="float-labels"),
        pytest.param((X * np.nan, Y), "NaN", id="nan"),
        pytest.param((X,), "1 arrays", id="no-labels"),
        pytest.param((X[:, 0], Y), "shape", id="one-dimensional"),
        pytest.param((np.zeros((20, 8, 8, 3)), Y), "channels last", id="channels-last"),
        pytest.param((np.array([object()] * 20), Y), "give numbers", id="objects"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(train, message):
    with pytest.raises(DataError, match=message):
        from_arrays("toy", train)


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(("train_inputs", "train_labels", "test_inputs", "test_labels"), id="own"),
        pytest.param(("x_train", "y_train", "x_test", "y_test"), id="aliases"),
    ],
)
def test_npz_round_trip(tmp_path, keys):
    arrays = dict(zip(keys, (X, Y, X[:4], Y[:4]), strict=True))
    np.savez(tmp_path / "toy.npz", classes=np.array(list("abcd")), **arrays)
    data = from_npz(tmp_path / "toy.npz")
    assert np.array_equal(data.train.inputs.numpy(), X)
    assert (len(data.test), data.classes, data.name) == (4, ("a", "b", "c", "d"), "toy")


def test_npz_with_validation_and_domains(tmp_path):
    np.savez(
        tmp_path / "toy.npz",
        train_inputs=X,
        train_labels=Y,
        train_domains=Y % 2,
        test_inputs=X,
        test_labels=Y,
        test_domains=Y % 2,
        validation_inputs=X,
        validation_labels=Y,
        validation_domains=Y % 2,
        domains=np.array(["old", "new"]),
    )
    data = from_npz(tmp_path / "toy.npz")
    assert data.domains == ("old", "new")
    assert data.validation.domains.tolist() == (Y % 2).tolist()


@pytest.mark.parametrize(
    "keys",
    [("X", "y"), ("x", "y"), ("data", "target"), ("X_train", "y_train"), ("train_x", "train_y")],
    ids="-".join,
)
def test_usual_names_of_npz_keys_are_understood(tmp_path, keys):
    np.savez(tmp_path / "x.npz", **dict(zip(keys, (X, Y), strict=True)))
    data = from_npz(tmp_path / "x.npz")
    assert (len(data.train), len(data.test), data.classes) == (16, 4, ("0", "1", "2", "3"))


@pytest.mark.parametrize("kind", [np.str_, np.bytes_])
def test_names_as_labels_get_numbers_in_natural_order(tmp_path, kind):
    names = np.array(["c10", "c9", "c10", "a"]).astype(kind)
    np.savez(tmp_path / "x.npz", x=X[:4], y=names, x_test=X[:1], y_test=names[1:2])
    data = from_npz(tmp_path / "x.npz")
    assert data.classes == ("a", "c9", "c10")
    assert data.train.labels.tolist() == [2, 1, 2, 0]
    assert data.test.labels.tolist() == [1]


def test_names_follow_the_classes_that_are_given():
    names = np.array(["b", "a"], dtype=object)
    assert from_arrays("t", (X[:2], names), (X[:2], names), classes=["b", "a"]).train.labels[0] == 0
    with pytest.raises(DataError, match="'b' is not among the names"):
        from_arrays("t", (X[:2], names), classes=["a", "c"])


def test_sixteen_bit_inputs_keep_their_values():
    deep = np.full((20, 1, 2, 2), 65535, np.uint16)
    assert from_arrays("t", (deep, Y)).train.inputs.max() == 65535


def test_labels_with_large_gaps_and_ragged_labels_are_refused():
    with pytest.raises(DataError, match="the largest is 50000"):
        from_arrays("t", (X, np.where(Y == 3, 50_000, Y)))
    with pytest.raises(DataError, match="rows of one length"):
        from_arrays("t", (X[:2], [[0], [1, 2]]))


def test_npz_with_objects_is_refused_without_unpickling(tmp_path):
    class Boom:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    np.savez(tmp_path / "x.npz", train_inputs=np.array([Boom()]), train_labels=Y)
    with pytest.raises(DataError, match="nothing pickled"):
        from_npz(tmp_path / "x.npz")


def test_npz_problems_are_named(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        from_npz(tmp_path / "none.npz")
    for keys in ({"inputs": X, "test_labels": Y}, {"x": X, "data": X, "y": Y}, {"x": X, "z": Y}):
        np.savez(tmp_path / "x.npz", **keys)
        with pytest.raises(DataError, match="Expected: train_inputs, train_labels"):
            from_npz(tmp_path / "x.npz")
    np.save(tmp_path / "x.npy", X)
    with pytest.raises(DataError, match=r"not an \.npz"):
        from_npz(tmp_path / "x.npy")
    (tmp_path / "y.npz").write_bytes((tmp_path / "x.npz").read_bytes()[:200])
    with pytest.raises(DataError, match="damaged"):
        from_npz(tmp_path / "y.npz")
    with zipfile.ZipFile(tmp_path / "z.npz", "w") as file:
        file.writestr("train_inputs.npy", b"no array")
        file.writestr("train_labels.npy", b"")
    with pytest.raises(DataError):
        from_npz(tmp_path / "z.npz")


def test_any_torch_data_set_works():
    train = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    data = from_torch_dataset("toy", train, train)
    assert torch.equal(data.train.inputs, torch.from_numpy(X))
    assert data.test.labels.tolist() == Y.tolist()


class Pictures(torch.utils.data.Dataset):
    classes = ("left", "right")

    def __init__(self, mode="RGB", sizes=(6,) * 10):
        self.mode, self.sizes = mode, sizes

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, i):
        return Image.new(self.mode, (self.sizes[i], 4)), i % 2, i % 3


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_pil_images_labels_and_domains_from_a_torch_data_set(mode, channels):
    data = from_torch_dataset("pictures", Pictures(mode), Pictures(mode))
    assert data.train.inputs.shape == (10, channels, 4, 6)
    assert data.train.inputs.dtype == torch.uint8
    assert data.classes == ("left", "right")
    assert data.train.domains.tolist() == [i % 3 for i in range(10)]


def test_torch_data_sets_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="item 1 has shape"):
        from_torch_dataset("x", Pictures(sizes=(6, 7)))
    with pytest.raises(DataError, match="no items"):
        from_torch_dataset("x", Pictures(sizes=()))
    with pytest.raises(DataError, match="item 0 is no"):
        from_torch_dataset("x", TensorDataset(torch.zeros(3, 2)))
