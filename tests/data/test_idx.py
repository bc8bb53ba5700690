import gzip

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxreplay.data import fashion_mnist, mnist
from proxreplay.data.idx import read_idx
from proxreplay.errors import DataError
from tests.data.data_samples import idx_bytes, mnist_files, write, write_files


@pytest.mark.parametrize("compressed", [True, False], ids=["gz", "plain"])
@pytest.mark.parametrize(
    ("load", "folder"),
    [
        pytest.param(mnist, "mnist", id="mnist"),
        pytest.param(mnist, "MNIST/raw", id="mnist-as-torchvision-puts-it"),
        pytest.param(fashion_mnist, "fashion-mnist", id="fashion"),
    ],
)
def test_idx_sets_are_read_with_one_channel(tmp_path, compressed, load, folder):
    write_files(tmp_path / folder, mnist_files(compressed=compressed))
    data = load(tmp_path)
    images = np.frombuffer(mnist_files()["train-images-idx3-ubyte"][16:], np.uint8)
    assert data.train.inputs.shape == (30, 1, 28, 28)
    assert np.array_equal(data.train.inputs.numpy().ravel(), images)
    assert data.train.labels.tolist() == [i % 10 for i in range(30)]
    assert len(data.test) == 10
    assert len(data.classes) == 10


def test_mnist_is_not_taken_for_fashion(tmp_path):
    write_files(tmp_path / "mnist", mnist_files())
    with pytest.raises(DataError, match="fashion-mnist: not found"):
        fashion_mnist(tmp_path)


def test_one_missing_file_is_noticed(tmp_path):
    files = mnist_files()
    del files["t10k-labels-idx1-ubyte"]
    write_files(tmp_path / "mnist", files)
    with pytest.raises(DataError, match="proxreplay data fetch mnist"):
        mnist(tmp_path)


@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=4), compressed=st.booleans())
@settings(deadline=None, max_examples=30)
def test_any_array_survives_the_round_trip(tmp_path_factory, shape, compressed):
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    data = idx_bytes(array)
    folder = tmp_path_factory.mktemp("idx")
    path = write(
        folder / ("x.gz" if compressed else "x"), gzip.compress(data) if compressed else data
    )
    assert np.array_equal(read_idx(path), array)


GOOD = idx_bytes(np.zeros((2, 3, 3), np.uint8))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("x", GOOD[:-1], "17 bytes where the header says 18", id="truncated"),
        pytest.param("x", GOOD + b"!", "more bytes where", id="too-long"),
        pytest.param("x", GOOD[:9], "sizes", id="header-cut"),
        pytest.param("x", b"", "expected an IDX file", id="empty"),
        pytest.param("x", b"<html></html>", "expected an IDX file", id="web-page"),
        pytest.param("x", b"\0\0\x0d\1" + GOOD[4:], "unsigned bytes", id="floats"),
        pytest.param("x", b"\0\0\x08\3" + b"\xff" * 12, "sizes", id="huge"),
        pytest.param("x.gz", GOOD, "is damaged", id="not-gzipped"),
        pytest.param("x.gz", gzip.compress(GOOD)[:-9], "is damaged", id="gz-truncated"),
    ],
)
def test_malformed_files_are_named_with_the_way_out(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)
    assert "get it again" in str(caught.value)


def test_labels_that_do_not_fit_the_images_are_refused(tmp_path):
    files = mnist_files()
    files["train-labels-idx1-ubyte"] = idx_bytes(np.arange(7))
    write_files(tmp_path / "mnist", files)
    with pytest.raises(DataError, match="labels of shape"):
        mnist(tmp_path)


def test_labels_above_nine_are_refused(tmp_path):
    files = mnist_files()
    files["train-labels-idx1-ubyte"] = idx_bytes(np.full(30, 10))
    write_files(tmp_path / "mnist", files)
    with pytest.raises(DataError, match="label 10"):
        mnist(tmp_path)
