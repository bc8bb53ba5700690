import os

import numpy as np
import pytest
import torch

from proxreplay.data import ClassIncremental, cifar10, cifar100
from proxreplay.errors import DataError
from tests.data.data_samples import cifar10_files, cifar100_files, tar_gz, write_files

REAL = os.environ.get("PROXREPLAY_DATA")


@pytest.mark.parametrize("packed", [True, False], ids=["archive", "unpacked"])
def test_cifar100_reads_fine_labels_images_and_names(tmp_path, packed):
    files, truth = cifar100_files()
    if packed:
        tar_gz(tmp_path / "cifar-100-binary.tar.gz", files)
    else:
        write_files(tmp_path, files)
    data = cifar100(tmp_path)
    for part in ("train", "test"):
        images, fine = truth[part]
        examples = getattr(data, part)
        assert examples.inputs.dtype == torch.uint8
        assert np.array_equal(examples.inputs.numpy(), images)
        assert examples.labels.tolist() == fine.tolist()
    assert data.classes == ("fine0", "fine1", "fine2", "fine3")
    assert data.name == "cifar100"


def test_cifar10_joins_its_five_batches(tmp_path):
    tar_gz(tmp_path / "cifar-10-binary.tar.gz", cifar10_files())
    data = cifar10(tmp_path)
    assert data.train.labels.tolist() == sorted([0, 1, 2, 3, 4] * 10)
    assert data.test.labels.tolist() == [5] * 10
    assert data.classes == tuple("abcdefghij")


def test_the_data_root_may_come_from_the_environment(tmp_path, monkeypatch):
    tar_gz(tmp_path / "cifar-100-binary.tar.gz", cifar100_files()[0])
    monkeypatch.setenv("PROXREPLAY_DATA", str(tmp_path))
    assert len(cifar100().train) == 40


def test_a_missing_archive_says_where_it_was_looked_for_and_what_to_type(tmp_path):
    with pytest.raises(DataError) as caught:
        cifar100(tmp_path)
    assert f"{tmp_path}/cifar-100-binary.tar.gz" in str(caught.value)
    assert f"proxreplay data fetch cifar100 --data-root {tmp_path}" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"test.bin": None}, "test.bin missing", id="no-test"),
        pytest.param({"train.bin": b"x" * 5000}, "multiple of 3074", id="cut-inside-an-image"),
        pytest.param({"train.bin": b""}, "multiple of 3074", id="empty"),
        pytest.param({"train.bin": b"\x63" * 3074}, "label 99, but there are 4", id="bad-label"),
    ],
)
def test_malformed_archives_are_refused_and_leave_no_cache(tmp_path, change, message):
    files, _ = cifar100_files()
    for name, content in change.items():
        if content is None:
            del files[f"cifar-100-binary/{name}"]
        else:
            files[f"cifar-100-binary/{name}"] = content
    tar_gz(tmp_path / "cifar-100-binary.tar.gz", files)
    with pytest.raises(DataError, match=message):
        cifar100(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["cifar-100-binary.tar.gz"]


def test_the_python_version_of_the_archive_is_refused_without_unpickling(tmp_path):
    tar_gz(tmp_path / "cifar-100-binary.tar.gz", {"cifar-100-python/train": b"\x80\x04."})
    with pytest.raises(DataError, match="expected the binary version"):
        cifar100(tmp_path)


@pytest.mark.parametrize("name", ["../train.bin", "/train.bin"])
def test_a_hostile_archive_is_refused(tmp_path, name):
    files, _ = cifar100_files()
    tar_gz(tmp_path / "cifar-100-binary.tar.gz", {**files, name: b"evil"})
    with pytest.raises(DataError, match="outside the folder"):
        cifar100(tmp_path)


@pytest.mark.skipif(not REAL, reason="PROXREPLAY_DATA is not set: no real CIFAR-100")
def test_the_real_archive_gives_the_counts_of_the_protocol():
    data = cifar100(REAL)
    assert (len(data.train), len(data.test), len(data.classes)) == (50_000, 10_000, 100)
    assert torch.bincount(data.train.labels).tolist() == [500] * 100
    stream = ClassIncremental(20).stream(data, seed=0)
    per_task = [sum(stream.task_at(p) == t for p in range(len(stream))) for t in range(20)]
    assert per_task == [238] * 20
    assert stream.trained_batches == 20 * 237
    assert [len(task.validation) for task in stream.tasks] == [125] * 20
    assert [len(task.test) for task in stream.tasks] == [500] * 20
