import json
import logging
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from proxreplay.data import cache
from proxreplay.data.cache import Block, Decoded, Split, cached
from proxreplay.data.roots import cache_folder, user_cache
from proxreplay.errors import DataError
from proxreplay.files import write_json
from tests.data.data_samples import everything_below, write, write_files


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
        test = Split(1, (1, 2, 2), [Block(self.images[:1], np.array([1]), np.array([0]))])
        yield Decoded(
            ("a", "b"), {"train": Split(self.announced, (1, 2, 2), blocks), "test": test}, ("d",)
        )

    def load(self):
        return cached("toy", self.path, self.decode, "toy")

    @property
    def cache(self):
        return cache_folder("toy", self.path)

    def holds(self, data):
        return torch.equal(data.train.inputs, torch.from_numpy(self.images))


@pytest.fixture
def source(tmp_path):
    return Source(tmp_path)


def flip_last_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_the_second_start_reads_the_cache_and_gives_the_same(source):
    first, second = source.load(), source.load()
    assert source.decoded == 1
    for data in (first, second):
        assert source.holds(data)
        assert data.train.labels.tolist() == [0, 1] * 3
        assert data.train.domains.tolist() == [0] * 6
        assert (data.classes, data.domains, data.name) == (("a", "b"), ("d",), "toy")
        assert len(data.test) == 1
    assert [p.name for p in user_cache().iterdir()] == [source.cache.name]


def test_arrays_of_a_cache_can_be_read_by_others(source):
    source.load()
    assert np.array_equal(np.load(source.cache / "train.inputs.npy"), source.images)


def test_inputs_are_mapped_and_a_stray_write_stays_off_the_disk(source):
    source.load().train.inputs.fill_(255)
    assert source.holds(source.load())


@pytest.mark.parametrize("name", ["train.inputs.npy", "train.labels.npy", "meta.json"])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda p: p.unlink(), id="missing"),
        pytest.param(lambda p: p.write_bytes(p.read_bytes()[:-3]), id="truncated"),
        pytest.param(lambda p: p.write_bytes(b"nonsense"), id="overwritten"),
        pytest.param(lambda p: p.write_bytes(bytes(128) + p.read_bytes()[128:]), id="zeroed"),
        pytest.param(lambda p: p.write_bytes(b"[" * 100_000), id="nested"),
        pytest.param(lambda p: p.write_bytes(pickle.dumps({"format": 1})), id="pickle"),
        pytest.param(lambda p: (p.unlink(), os.mkfifo(p)), id="pipe"),
    ],
)
def test_a_damaged_cache_is_rebuilt_and_that_is_said(source, caplog, name, damage):
    source.load()
    damage(source.cache / name)
    with caplog.at_level(logging.WARNING):
        data = source.load()
    assert source.decoded == 2
    assert source.holds(data)
    assert "is rebuilt" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda meta: meta.update(format=1), id="older-format"),
        pytest.param(lambda meta: meta.pop("source"), id="no-source"),
        pytest.param(lambda meta: meta["source"].update(sha256="0", mtime_ns=0), id="other-source"),
        pytest.param(lambda meta: meta["arrays"]["train.inputs"].update(shape=[9]), id="shape"),
        pytest.param(
            lambda meta: meta["arrays"]["train.inputs"].update(shape=[2**62, 4]), id="huge"
        ),
        pytest.param(lambda meta: meta["arrays"]["train.inputs"].update(dtype="O"), id="objects"),
        pytest.param(lambda meta: meta["arrays"]["train.inputs"].update(crc32=[]), id="no-sums"),
        pytest.param(lambda meta: meta.update(arrays=[1]), id="no-arrays"),
        pytest.param(lambda meta: meta.update(classes=["a"]), id="too-few-classes"),
    ],
)
def test_meta_data_that_does_not_fit_leads_to_a_rebuild(source, change):
    source.load()
    path = source.cache / "meta.json"
    meta = json.loads(path.read_text())
    del meta["sha256"]
    change(meta)
    write_json(path, meta)
    source.load()
    assert source.decoded == 2


def test_a_changed_letter_in_the_meta_data_leads_to_a_rebuild(source):
    classes = source.load().classes
    path = source.cache / "meta.json"
    path.write_text(path.read_text().replace(f'"{classes[0]}"', f'"{classes[0]}x"', 1))
    assert source.load().classes == classes
    assert source.decoded == 2


def test_what_a_killed_builder_left_beside_its_cache_is_removed(source):
    source.load()
    unfinished = source.cache.with_name(f"{source.cache.name}.building")
    write_files(unfinished, {"CACHEDIR.TAG": b"", ".meta.json.0123abcd.proxreplay-writing": b"{"})
    source.cache.with_name(f"{source.cache.name}.lock").touch()
    source.load()
    assert source.decoded == 1
    assert [path.name for path in source.cache.parent.iterdir()] == [source.cache.name]


def test_wrong_labels_of_the_right_size_are_noticed(source):
    source.load()
    np.save(source.cache / "train.labels.npy", np.array([1, 0] * 3))
    assert source.load().train.labels.tolist() == [0, 1] * 3


def test_a_flipped_pixel_is_noticed_when_its_block_is_read_and_rebuilt_by_the_next_start(
    source, monkeypatch
):
    monkeypatch.setattr(cache, "BLOCK_BYTES", 8)  # two images
    source.load()
    flip_last_bit(source.cache / "train.inputs.npy")
    data = source.load()
    assert data.train[torch.tensor([0, 3])].inputs.shape == (2, 1, 2, 2)  # other blocks are sound
    for rows in (torch.tensor([1, 4]), torch.arange(6) == 5, torch.tensor([-1])):
        with pytest.raises(DataError, match="from example 4 on does not match"):
            data.train[rows]
    assert source.holds(source.load())
    assert source.decoded == 2


def test_a_full_check_finds_a_single_wrong_byte_and_the_next_start_rebuilds(source):
    source.load()
    assert cache.verify(source.cache, source.path) is None
    flip_last_bit(source.cache / "train.inputs.npy")
    assert "train.inputs.npy does not match" in cache.verify(source.cache, source.path)
    assert source.holds(source.load())


@pytest.mark.parametrize("content", [b"version 2", b"another size"])
def test_a_changed_source_leads_to_a_rebuild(source, content):
    source.load()
    write(source.path, content)
    os.utime(source.path, ns=(1, 1))
    source.load()
    assert source.decoded == 2


def test_a_touched_source_with_the_same_content_does_not(source):
    source.load()
    os.utime(source.path, ns=(1, 1))
    source.load()
    assert source.decoded == 1


def test_an_interrupted_build_leaves_nothing_behind(tmp_path):
    source = Source(tmp_path, announced=7)
    with pytest.raises(DataError, match="7 train examples were announced but 6"):
        source.load()
    assert everything_below(user_cache()) == []


def test_a_stale_cache_survives_a_rebuild_that_fails(source):
    source.load()
    write(source.path, b"version 22")
    source.announced = 7
    with pytest.raises(DataError):
        source.load()
    assert (source.cache / "meta.json").is_file()


def test_what_a_killed_build_left_behind_goes_with_the_next_start(source):
    left = source.cache.with_name(f"{source.cache.name}.building")
    write_files(left, {cache.MARK: b"", "train.inputs.npy": b"half"})
    source.load()
    assert [p.name for p in user_cache().iterdir()] == [source.cache.name]


@pytest.mark.parametrize("ending", ["", ".building"])
@pytest.mark.parametrize(
    "foreign",
    [
        pytest.param({"holiday.jpg": b"mine"}, id="photos"),
        pytest.param({"meta.json": b"{}", "train.inputs.npy": b""}, id="no-mark"),
        pytest.param({cache.MARK: b"", "holiday.jpg": b"mine"}, id="photo-in-a-cache"),
        pytest.param({cache.MARK: b"", "below/x": b"mine"}, id="folder-in-a-cache"),
    ],
)
def test_what_is_not_ours_is_named_and_left_alone(source, foreign, ending):
    folder = source.cache.with_name(source.cache.name + ending)
    write_files(folder, foreign)
    before = everything_below(folder)
    with pytest.raises(DataError, match=f"{folder.name} is in the way"):
        source.load()
    assert everything_below(folder) == before


def test_a_folder_beside_the_data_is_not_touched(tmp_path):
    source = Source(tmp_path)
    write_files(tmp_path / "toy.cache", {"meta.json": b"{}", "holiday.jpg": b"mine"})
    before = everything_below(tmp_path)
    source.load()
    assert everything_below(tmp_path) == before


def test_a_linked_cache_is_not_followed_when_it_is_rebuilt(source, tmp_path):
    source.load()
    moved = source.cache.rename(tmp_path / "elsewhere")
    source.cache.symlink_to(moved)
    write(source.path, b"version 22")
    with pytest.raises(DataError, match="is in the way"):
        source.load()
    assert (moved / "meta.json").is_file()


def test_the_cache_is_in_the_folder_of_the_environment_or_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("PROXREPLAY_CACHE", str(tmp_path / "chosen"))
    assert cache_folder("toy", tmp_path).parent == tmp_path / "chosen"
    monkeypatch.delenv("PROXREPLAY_CACHE")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "me")
    assert cache_folder("toy", tmp_path).is_relative_to(tmp_path / "me")


def test_two_sources_of_one_name_do_not_share_a_cache(tmp_path):
    assert cache_folder("toy", tmp_path / "a/x") != cache_folder("toy", tmp_path / "b/x")


def test_a_folder_that_cannot_be_written_is_an_error_with_a_way_out(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PROXREPLAY_CACHE", str(write(tmp_path / "a-file", b"") / "below"))
    with pytest.raises(DataError, match="PROXREPLAY_CACHE"):
        source.load()


def test_starts_at_the_same_time_build_one_cache(source):
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: source.load(), range(8)))
    assert all(source.holds(data) for data in results)
    assert source.decoded == 1
    assert [p.name for p in user_cache().iterdir()] == [source.cache.name]


def test_a_source_that_changes_while_it_is_decoded_is_an_error(source):
    @contextmanager
    def decode_while_changing():
        with source.decode() as decoded:
            yield decoded
        write(source.path, b"changed meanwhile")

    with pytest.raises(DataError, match="its source has changed"):
        cached("toy", source.path, decode_while_changing, "toy")
