import numpy as np
import pytest

from proxreplay.data import tinyimagenet
from proxreplay.data.images import decode
from proxreplay.errors import DataError
from tests.data.data_samples import jpeg, tiny_files, write_files, zipped

TOP = "tiny-imagenet-200/"


@pytest.mark.parametrize("packed", [True, False], ids=["zip", "unpacked"])
def test_labels_follow_wnids_and_val_serves_as_test(tmp_path, packed):
    files = tiny_files()
    if packed:
        zipped(tmp_path / "tiny-imagenet-200.zip", files)
    else:
        write_files(tmp_path, files)
    data = tinyimagenet(tmp_path)
    assert data.train.inputs.shape == (20, 3, 64, 64)
    assert data.train.labels.tolist() == sorted([0, 1, 2, 3] * 5)
    assert data.test.labels.tolist() == [0, 1, 2, 3, 0, 1]
    assert data.classes == ("goldfish", "n89999999", "n89999998", "n89999997")
    first = decode(files[f"{TOP}train/n90000000/images/n90000000_0.JPEG"], 64, "x")
    assert np.array_equal(data.train.inputs[0].numpy(), first)


def test_images_of_another_size_are_resized(tmp_path):
    zipped(tmp_path / "tiny-imagenet-200.zip", tiny_files(image=jpeg((10, 7))))
    assert tinyimagenet(tmp_path).train.inputs.shape[1:] == (3, 64, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"wnids.txt": None}, "wnids.txt missing", id="no-wnids"),
        pytest.param({"val/val_annotations.txt": None}, "val_annotations", id="no-annotations"),
        pytest.param({"val/images/val_3.JPEG": None}, "val_3.JPEG", id="missing-image"),
        pytest.param({"val/val_annotations.txt": b"val_0.JPEG\tn1"}, "class 'n1'", id="bad-class"),
        pytest.param({"val/val_annotations.txt": b"val_0.JPEG"}, "val_0.JPEG", id="no-class"),
        pytest.param(
            {"wnids.txt": tiny_files()[f"{TOP}wnids.txt"] + b"\nn555"},
            "no training images for n555",
            id="class-without-images",
        ),
        pytest.param(
            {"train/n90000000/images/n90000000_2.JPEG": b"oops"}, "n90000000_2.JPEG", id="no-image"
        ),
    ],
)
def test_malformed_sets_are_refused_and_leave_no_cache(tmp_path, change, message):
    files = tiny_files()
    for name, content in change.items():
        if content is None:
            del files[TOP + name]
        else:
            files[TOP + name] = content
    zipped(tmp_path / "tiny-imagenet-200.zip", files)
    with pytest.raises(DataError, match=message):
        tinyimagenet(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny-imagenet-200.zip"]
