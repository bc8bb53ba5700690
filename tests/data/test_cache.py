import json
import logging
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from proxreplay.data import cache
from proxreplay.data.cache import Block, Decoded, Part, cached
from proxreplay.errors import DataError
from tests.data.data_samples import write


class Source:
    """A source file and a decoder that counts how often it is asked."""

    def __init__(self, folder, blocks=3, announced=None):
        self.path = write(folder / "source.bin", b"version 1")
        self.decoded = 0
        self.images = np.arange(blocks * 2 * 4, dtype=np.uint8).reshape(-1, 1, 2, 2)
        self.announced = announced or len(self.images)

    @contextmanager
    def decode(self):
        self.decoded += 1
        blocks = (
            Block(pair, np.array([0, 1]), np.array([0, 0]))
            for pair in self.images.reshape(-1, 2, 1, 2, 2)
        )
        test = Part(1, (1, 2, 2), [Block(self.images[:1], np.array([1]), np.array([0]))])
        yield Decoded(
            ("a", "b"), {"train": Part(self.announced, (1, 2, 2), blocks), "test": test}, ("d",)
        )

    def load(self):
        return cached("toy", [self.path], self.decode)


@pytest.fixture(autouse=True)
def user_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("PROXREPLAY_CACHE", raising=False)
    folder = tmp_path / "user-cache"
    monkeypatch.setattr(cache, "user_cache", lambda: folder)
    return folder


def test_the_second_start_reads_the_cache_and_gives_the_same(tmp_path):
    source = Source(tmp_path)
    first, second = source.load(), source.load()
    assert source.decoded == 1
    for data in (first, second):
        assert torch.equal(data.train.inputs, torch.from_numpy(source.images))
        assert data.train.labels.tolist() == [0, 1] * 3
        assert data.train.domains.tolist() == [0] * 6
        assert (data.classes, data.domains, data.name) == (("a", "b"), ("d",), "toy")
        assert len(data.test) == 1
    assert (tmp_path / "toy.cache" / "meta.json").is_file()


def test_inputs_are_mapped_and_a_stray_write_stays_off_the_disk(tmp_path):
    source = Source(tmp_path)
    data = source.load()
    data.train.inputs.fill_(255)
    assert torch.equal(source.load().train.inputs, torch.from_numpy(source.images))


@pytest.mark.parametrize("name", ["train.inputs.npy", "train.labels.npy", "meta.json"])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda p: p.unlink(), id="missing"),
        pytest.param(lambda p: p.write_bytes(p.read_bytes()[:-3]), id="truncated"),
        pytest.param(lambda p: p.write_bytes(b"nonsense"), id="overwritten"),
        pytest.param(lambda p: p.write_bytes(b""), id="empty"),
        pytest.param(lambda p: p.write_bytes(pickle.dumps({"format": 1})), id="pickle"),
    ],
)
def test_a_damaged_cache_is_rebuilt_and_that_is_said(tmp_path, caplog, name, damage):
    source = Source(tmp_path)
    source.load()
    damage(tmp_path / "toy.cache" / name)
    with caplog.at_level(logging.WARNING):
        data = source.load()
    assert source.decoded == 2
    assert torch.equal(data.train.inputs, torch.from_numpy(source.images))
    assert "is rebuilt" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda meta: meta.update(format=0), id="older-format"),
        pytest.param(lambda meta: meta.pop("sources"), id="no-sources"),
        pytest.param(lambda meta: meta["sources"].clear(), id="other-sources"),
        pytest.param(lambda meta: meta["arrays"]["train.inputs"].update(shape=[9]), id="shape"),
        pytest.param(lambda meta: meta.update(classes=["a"]), id="too-few-classes"),
    ],
)
def test_meta_data_that_does_not_fit_leads_to_a_rebuild(tmp_path, change):
    source = Source(tmp_path)
    source.load()
    path = tmp_path / "toy.cache" / "meta.json"
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))
    source.load()
    assert source.decoded == 2


def test_wrong_labels_of_the_right_size_are_noticed(tmp_path):
    source = Source(tmp_path)
    source.load()
    np.save(tmp_path / "toy.cache" / "train.labels.npy", np.array([1, 0] * 3))
    assert source.load().train.labels.tolist() == [0, 1] * 3


@pytest.mark.parametrize("content", [b"version 2", b"another size"])
def test_a_changed_source_leads_to_a_rebuild(tmp_path, content):
    source = Source(tmp_path)
    source.load()
    write(source.path, content)
    os.utime(source.path, ns=(1, 1))
    source.load()
    assert source.decoded == 2


def test_a_touched_source_with_the_same_content_does_not(tmp_path):
    source = Source(tmp_path)
    source.load()
    os.utime(source.path, ns=(1, 1))
    source.load()
    assert source.decoded == 1


def test_an_interrupted_build_leaves_nothing_behind(tmp_path):
    source = Source(tmp_path, announced=7)
    with pytest.raises(DataError, match="7 train examples were announced but 6"):
        source.load()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source.bin"]


def test_a_stale_cache_survives_a_rebuild_that_fails(tmp_path):
    source = Source(tmp_path)
    source.load()
    write(source.path, b"version 22")
    source.announced = 7
    with pytest.raises(DataError):
        source.load()
    assert (tmp_path / "toy.cache" / "meta.json").is_file()


def test_a_read_only_folder_sends_the_cache_to_the_user_folder_and_says_so(
    tmp_path, caplog, user_cache
):
    source = Source(tmp_path / "data")
    (tmp_path / "data").chmod(0o555)
    try:
        with caplog.at_level(logging.WARNING):
            source.load()
            source.load()
    finally:
        (tmp_path / "data").chmod(0o755)
    assert source.decoded == 1
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["source.bin"]
    assert len(list(user_cache.iterdir())) == 1
    assert caplog.text.count("is read-only") == 1


def test_the_environment_chooses_the_folder(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("PROXREPLAY_CACHE", str(tmp_path / "chosen"))
    Source(tmp_path).load()
    assert not (tmp_path / "toy.cache").exists()
    assert len(list((tmp_path / "chosen").iterdir())) == 1


def test_two_sources_of_one_name_do_not_share_a_user_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PROXREPLAY_CACHE", str(tmp_path))
    assert cache.cache_folders("toy", tmp_path / "a/x") != cache.cache_folders(
        "toy", tmp_path / "b/x"
    )


def test_a_full_check_finds_a_single_wrong_byte(tmp_path):
    source = Source(tmp_path)
    source.load()
    folder = tmp_path / "toy.cache"
    assert cache.verify(folder, [source.path]) is None
    inputs = folder / "train.inputs.npy"
    content = bytearray(inputs.read_bytes())
    content[-1] ^= 1
    inputs.write_bytes(content)
    assert "train.inputs.npy does not match" in cache.verify(folder, [source.path])


def test_a_folder_that_cannot_be_written_is_an_error_with_a_way_out(tmp_path, monkeypatch):
    blocked = write(tmp_path / "a-file", b"")
    monkeypatch.setenv("PROXREPLAY_CACHE", "set")
    monkeypatch.setattr(cache, "user_cache", lambda: blocked / "below")
    with pytest.raises(DataError, match="PROXREPLAY_CACHE"):
        Source(tmp_path).load()


def test_starts_at_the_same_time_agree_on_one_cache(tmp_path):
    source = Source(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: source.load(), range(8)))
    for data in results:
        assert torch.equal(data.train.inputs, torch.from_numpy(source.images))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source.bin", "toy.cache"]


def test_a_source_that_changes_while_it_is_decoded_is_an_error(tmp_path):
    source = Source(tmp_path)

    @contextmanager
    def decode_while_changing():
        with source.decode() as decoded:
            yield decoded
        write(source.path, b"changed meanwhile")

    with pytest.raises(DataError, match="its source has changed"):
        cached("toy", [source.path], decode_while_changing)


def test_leftovers_of_a_killed_build_are_swept_after_a_day(tmp_path):
    for name, age in ((".toy.cache-old", 2 * 86400), (".toy.cache-new", 60), (".other-old", 10**6)):
        (tmp_path / name).mkdir()
        then = time.time() - age
        os.utime(tmp_path / name, (then, then))
    Source(tmp_path).load()
    hidden = sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("."))
    assert hidden == [".other-old", ".toy.cache-new"]
