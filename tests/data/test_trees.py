import logging
import os

import pytest
import torch

from proxreplay.data import image_tree, pacs
from proxreplay.data.images import ImageFile
from proxreplay.data.trees import sorted_naturally, split_by_hash
from proxreplay.errors import DataError
from tests.data.data_samples import jpeg, tar_gz, write_files, zipped

REAL = os.environ.get("PROXREPLAY_DATA")


def tree(prefixes, per_class=10, size=(8, 8)):
    return {f"{p}/{i}.jpg": jpeg(size, seed=i) for p in prefixes for i in range(per_class)}


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "zip"])
def test_class_folders(tmp_path, packed):
    files = tree(["cat", "dog"])
    if packed:
        path = zipped(tmp_path / "pets.zip", {f"pets/{n}": c for n, c in files.items()})
    else:
        path = write_files(tmp_path / "pets", files)
    data = image_tree(path)
    assert (data.name, data.classes, data.domains) == ("pets", ("cat", "dog"), ())
    assert (len(data.train), len(data.test)) == (16, 4)
    assert data.test.labels.tolist() == [0, 0, 1, 1]
    assert data.train.inputs.shape[1:] == (3, 8, 8)


def test_domain_and_class_folders(tmp_path):
    files = tree(["2/cat", "2/dog", "10/dog", "10/cow"])
    data = image_tree(write_files(tmp_path / "pets", files))
    assert data.domains == ("2", "10")
    assert data.classes == ("cat", "cow", "dog")
    pairs = set(zip(data.train.domains.tolist(), data.train.labels.tolist(), strict=True))
    assert pairs == {(0, 0), (0, 2), (1, 1), (1, 2)}
    assert torch.bincount(data.test.domains).tolist() == [4, 4]


@pytest.mark.parametrize("domains", [False, True], ids=["classes", "domains"])
def test_train_test_and_val_folders(tmp_path, domains):
    middle = "/d" if domains else ""
    files = tree([f"train{middle}/a", f"train{middle}/b"], 5)
    files |= tree([f"test{middle}/a"], 3) | tree([f"val{middle}/b"], 2)
    data = image_tree(write_files(tmp_path / "pets", files))
    assert (len(data.train), len(data.test), len(data.validation)) == (10, 3, 2)
    assert data.test.labels.tolist() == [0, 0, 0]
    assert data.validation.labels.tolist() == [1, 1]
    assert data.domains == (("d",) if domains else ())


def test_only_a_train_folder_still_gives_a_test_set(tmp_path):
    data = image_tree(write_files(tmp_path / "x", tree(["train/a", "train/b"])))
    assert (len(data.train), len(data.test)) == (16, 4)


def test_classes_may_be_called_train(tmp_path):
    data = image_tree(write_files(tmp_path / "vehicles", tree(["train", "bus", "car"])))
    assert data.classes == ("bus", "car", "train")


def test_the_split_is_stratified_disjoint_and_the_same_everywhere():
    images = [
        ImageFile(f"{d}/{c}/{i}", c, d) for d in range(2) for c in range(3) for i in range(11)
    ]
    train, test = split_by_hash(images)
    assert sorted(train + test, key=images.index) == images
    assert len(test) == 2 * 3 * 2
    assert split_by_hash(images[::-1])[1] == test[::-1]


@pytest.mark.parametrize(
    ("size", "asked", "stored"),
    [
        pytest.param((32, 32), None, 32, id="common-square-size-is-kept"),
        pytest.param((40, 32), None, 64, id="not-square"),
        pytest.param((200, 200), None, 64, id="large"),
        pytest.param((200, 200), 48, 48, id="asked-for"),
    ],
)
def test_stored_size(tmp_path, size, asked, stored):
    path = write_files(tmp_path / "x", tree(["a", "b"], 2, size))
    assert image_tree(path, image_size=asked).train.inputs.shape[1:] == (3, stored, stored)


def test_mixed_sizes_are_stored_as_64(tmp_path):
    files = tree(["a"], 2, (20, 20)) | tree(["b"], 2, (30, 30))
    assert image_tree(write_files(tmp_path / "x", files)).train.inputs.shape[-1] == 64


def test_other_files_are_ignored_and_counted_and_hidden_ones_ignored(tmp_path, caplog):
    files = tree(["a", "b"]) | {"readme.txt": b"", "a/notes.md": b"", ".DS_Store": b""}
    with caplog.at_level(logging.WARNING):
        data = image_tree(write_files(tmp_path / "x", files))
    assert len(data.train) + len(data.test) == 20
    assert "2 files that are no images are ignored" in caplog.text


def test_linked_class_folders_are_followed_and_loops_refused(tmp_path):
    real = write_files(tmp_path / "real", tree(["cat", "dog"]))
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "cat").symlink_to(real / "cat")
    (linked / "dog").symlink_to(real / "dog")
    assert len(image_tree(linked).train) == 16
    (real / "cat" / "loop").symlink_to(real)
    with pytest.raises(DataError, match="link to a parent"):
        image_tree(real)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        pytest.param({"readme.txt": b""}, "no images", id="no-images"),
        pytest.param({"0.jpg": jpeg()}, "do not fit one layout", id="images-at-the-top"),
        pytest.param(tree(["a", "b", "d/c"]), "do not fit one layout", id="mixed-depths"),
        pytest.param(tree(["p/q/r/s"]), "do not fit one layout", id="too-deep"),
        pytest.param(tree(["a"]), "one class only", id="one-class"),
        pytest.param(tree(["a", "b"]) | {"b/x.jpg": b"no"}, r"b/x\.jpg", id="broken-image"),
    ],
)
def test_malformed_trees_are_refused_and_leave_no_cache(tmp_path, files, message):
    path = write_files(tmp_path / "x", files)
    with pytest.raises(DataError, match=message):
        image_tree(path)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("asked", [None, 8], ids=["size by the images", "size asked for"])
@pytest.mark.parametrize("packed", [False, True], ids=["folder", "zip"])
def test_all_broken_images_are_named_at_once(tmp_path, packed, asked, caplog):
    """In all parts, by whatever is wrong with them."""
    files = tree(["train/a", "train/b", "test/a", "val/b"])
    whole = jpeg((8, 8), fmt="PNG")
    broken = {f"train/b/broken{i}.png": whole[: len(whole) // 2] for i in range(9)}
    broken |= {"test/a/text.jpg": b"no image", "val/b/empty.jpg": b"", "train/a/0.jpg": b""}
    files |= broken
    path = zipped(tmp_path / "x.zip", files) if packed else write_files(tmp_path / "x", files)
    with pytest.raises(DataError) as said:
        image_tree(path, image_size=asked)
    message = str(said.value)
    assert f"{path}: 12 of 51 images cannot be used" in message
    assert "replace or remove them" in message
    assert sum(name in message for name in broken) == 10
    assert "and 2 others" in message
    everything = message + caplog.text
    assert all(name in everything for name in broken)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_one_broken_image_keeps_its_own_reason(tmp_path):
    files = tree(["a", "b"]) | {"b/x.jpg": b"no"}
    with pytest.raises(DataError, match=r"^b/x\.jpg: not an image in one of .*; replace or rem"):
        image_tree(write_files(tmp_path / "x", files))


def test_missing_folders_and_tars_are_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        image_tree(tmp_path / "nothing")
    with pytest.raises(DataError, match="unpack the tar"):
        image_tree(tar_gz(tmp_path / "x.tar.gz", tree(["a", "b"])))
    with pytest.raises(DataError, match="image_size=0"):
        image_tree(tmp_path, image_size=0)


def test_numbers_are_sorted_as_numbers():
    assert sorted_naturally(["b10", "b9", "a", "10", "9"]) == ["9", "10", "a", "b9", "b10"]


def test_missing_pacs_says_what_to_put_where(tmp_path):
    with pytest.raises(DataError, match="put the images into one of these folders"):
        pacs(tmp_path)


@pytest.mark.skipif(not REAL, reason="PROXREPLAY_DATA is not set: no real PACS")
def test_the_real_pacs_tree():
    data = pacs(REAL)
    assert len(data.train) + len(data.test) == 9991
    assert data.domains == ("art_painting", "cartoon", "photo", "sketch")
    assert data.classes == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    everything = torch.cat([data.train.domains, data.test.domains])
    assert torch.bincount(everything).tolist() == [2048, 2344, 1670, 3929]
