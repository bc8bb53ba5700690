import json

import pytest

from proxreplay.data import DomainIncremental, clear10
from proxreplay.errors import DataError
from tests.data.data_samples import clear_files, write_files


def test_buckets_are_domains_in_the_order_of_the_training_metadata(tmp_path):
    write_files(tmp_path / "clear10", clear_files())
    data = clear10(tmp_path, stored_size=16)
    assert data.classes == ("bus", "BACKGROUND")
    assert data.domains == ("1", "2", "3")
    assert data.train.inputs.shape == (24, 3, 16, 16)
    for part in (data.train, data.test):
        assert part.domains.tolist() == sorted([0, 1, 2] * 8)
        assert part.labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 1] * 3
    stream = DomainIncremental().stream(data, seed=0)
    assert [task.name for task in stream.tasks] == ["1", "2", "3"]


def test_the_folder_names_of_the_published_zips_are_known(tmp_path):
    files = {
        name.replace("train/", "train_image_only/", 1): content
        for name, content in clear_files().items()
    }
    write_files(tmp_path / "clear10", files)
    assert len(clear10(tmp_path, stored_size=8).train) == 24


def test_stored_sizes_have_caches_of_their_own(tmp_path):
    write_files(tmp_path / "clear10", clear_files())
    for size in (8, 12, 8):
        assert clear10(tmp_path, stored_size=size).train.inputs.shape[-1] == size


def test_train_without_test_is_not_found(tmp_path):
    files = {n: c for n, c in clear_files().items() if n.startswith("train/")}
    write_files(tmp_path / "clear10", files)
    with pytest.raises(DataError, match=r"test/labeled_metadata\.json"):
        clear10(tmp_path)


LISTING = "train/labeled_metadata/1/bus.json"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("train/labeled_metadata.json", b"{", "is no JSON", id="broken-json"),
        pytest.param("train/labeled_metadata.json", b"[]", "holds no object", id="list"),
        pytest.param("test/class_names.txt", b"tram", "differ in their classes", id="classes"),
        pytest.param("train/class_names.txt", None, "class_names.txt is missing", id="no-names"),
        pytest.param(LISTING, None, "bus.json is missing", id="no-listing"),
        pytest.param(
            LISTING, {"0": {"IMG_PATH": "../../../etc/passwd"}}, "no path inside", id="traversal"
        ),
        pytest.param(LISTING, {"0": {"IMG_PATH": "/etc/passwd"}}, "no path inside", id="absolute"),
        pytest.param(LISTING, {"0": {}}, "no path inside", id="no-path"),
        pytest.param(LISTING, {"0": {"IMG_PATH": "gone.jpg"}}, "gone.jpg is listed", id="gone"),
        pytest.param(LISTING, {"0": 3}, "no path inside", id="no-record"),
    ],
)
def test_malformed_sets_are_refused(tmp_path, name, content, message):
    files = clear_files()
    if content is None:
        del files[name]
    else:
        files[name] = content if isinstance(content, bytes) else json.dumps(content).encode()
    write_files(tmp_path / "clear10", files)
    with pytest.raises(DataError, match=message):
        clear10(tmp_path, stored_size=8)


def test_a_bucket_without_a_class_is_refused(tmp_path):
    files = clear_files()
    metadata = json.loads(files["train/labeled_metadata.json"])
    del metadata["2"]["bus"]
    files["train/labeled_metadata.json"] = json.dumps(metadata).encode()
    write_files(tmp_path / "clear10", files)
    with pytest.raises(DataError, match="bucket 2 has no class bus"):
        clear10(tmp_path, stored_size=8)
