"""Downloads against a server on this machine that serves real, broken and hostile files."""

import hashlib
import logging
from dataclasses import replace

import pytest

from proxreplay.data import catalog, cifar100, clear10, fetch
from proxreplay.data.catalog import RemoteFile
from proxreplay.errors import DataError, InputError
from tests.data.data_samples import cifar100_files, clear_files, tar_gz, write, zipped
from tests.data.downloads import QUICK, served


@pytest.fixture
def server():
    with served() as state:
        yield state


@pytest.fixture
def archive(tmp_path, server, monkeypatch):
    """A small CIFAR-100 at its canonical source, with its checksum published."""
    content = tar_gz(tmp_path / "made.tar.gz", cifar100_files()[0]).read_bytes()
    server.files["/cifar-100-binary.tar.gz"] = content
    publish(monkeypatch, "cifar100", f"{server.address}/cifar-100-binary.tar.gz", content)
    return content


def publish(monkeypatch, name, url, content, **options):
    file = RemoteFile(url, hashlib.md5(content).hexdigest(), **options)
    monkeypatch.setitem(catalog.CATALOG, name, replace(catalog.CATALOG[name], files=(file,)))


def names(folder):
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def fetched(tmp_path, **options):
    return fetch.fetch("cifar100", tmp_path / "data", patience=QUICK, **options)


def test_a_fetched_archive_can_be_loaded(tmp_path, archive, server):
    assert fetched(tmp_path) == [tmp_path / "data" / "cifar-100-binary.tar.gz"]
    assert names(tmp_path / "data") == ["cifar-100-binary.tar.gz"]
    assert len(cifar100(tmp_path / "data").train) == 40
    fetched(tmp_path)
    assert len(server.requests) == 1, "what is there already is not fetched again"


def test_progress_ends_at_the_whole_file(tmp_path, archive):
    seen = []
    fetched(tmp_path, progress=lambda *report: seen.append(report))
    assert seen[-1] == ("cifar-100-binary.tar.gz", len(archive), len(archive))


def test_a_broken_line_is_continued_where_it_broke(tmp_path, archive, server):
    server.cut_after = [1000, 500]
    fetched(tmp_path)
    assert [r for _, r in server.requests] == [None, "bytes=1000-", "bytes=1500-"]
    assert (tmp_path / "data/cifar-100-binary.tar.gz").read_bytes() == archive


def test_a_download_given_up_is_continued_by_the_next_call(tmp_path, archive, server):
    server.cut_after = [100] * 4
    with pytest.raises(DataError, match="gave up after 4 attempts") as caught:
        fetched(tmp_path)
    assert "fetch again to continue" in str(caught.value)
    assert names(tmp_path / "data") == ["cifar-100-binary.tar.gz.part"]
    server.requests.clear()
    fetched(tmp_path)
    assert server.requests[0][1] == "bytes=400-"
    assert (tmp_path / "data/cifar-100-binary.tar.gz").read_bytes() == archive
    assert names(tmp_path / "data") == ["cifar-100-binary.tar.gz"]


def test_a_part_is_never_taken_for_the_file(tmp_path, archive, server):
    write(tmp_path / "data" / "cifar-100-binary.tar.gz.part", archive[:-1])
    with pytest.raises(DataError, match="not found"):
        cifar100(tmp_path / "data")


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(lambda content: b"x" * 1000, id="other-content"),
        pytest.param(lambda content: content + b"more", id="too-long"),
        pytest.param(lambda content: b"x" * len(content), id="other-content-of-the-same-length"),
    ],
)
def test_a_wrong_part_is_thrown_away_and_fetched_from_the_beginning(
    tmp_path, archive, server, part, caplog
):
    write(tmp_path / "data" / "cifar-100-binary.tar.gz.part", part(archive))
    with caplog.at_level(logging.WARNING):
        fetched(tmp_path)
    assert (tmp_path / "data/cifar-100-binary.tar.gz").read_bytes() == archive
    assert "resumed download is not the published file" in caplog.text


def test_a_complete_part_only_needs_its_checksum(tmp_path, archive, server):
    write(tmp_path / "data" / "cifar-100-binary.tar.gz.part", archive)
    fetched(tmp_path)
    assert (tmp_path / "data/cifar-100-binary.tar.gz").read_bytes() == archive
    assert len(server.requests) == 1


def test_a_server_that_cannot_continue_starts_over(tmp_path, archive, server):
    server.ranges, server.cut_after = False, [1000]
    fetched(tmp_path)
    assert (tmp_path / "data/cifar-100-binary.tar.gz").read_bytes() == archive


def test_a_server_that_continues_at_the_wrong_place_is_not_trusted(tmp_path, archive, server):
    server.wrong_range, server.cut_after = True, [1000]
    fetched(tmp_path)
    assert [r for _, r in server.requests] == [None, "bytes=1000-", None]
    assert (tmp_path / "data/cifar-100-binary.tar.gz").read_bytes() == archive


@pytest.mark.parametrize(
    "serve",
    [
        pytest.param(lambda content: content[:-1], id="truncated"),
        pytest.param(lambda content: content[:-1] + b"?", id="one-wrong-byte"),
        pytest.param(lambda content: b"<html>Not here</html>", id="web-page"),
        pytest.param(lambda content: b"", id="empty"),
    ],
)
@pytest.mark.parametrize("announce", [True, False], ids=["with-length", "without-length"])
def test_a_wrong_file_is_refused_and_nothing_is_kept(tmp_path, archive, server, serve, announce):
    server.files["/cifar-100-binary.tar.gz"] = serve(archive)
    server.announce_length = announce
    with pytest.raises(DataError, match="not the published file"):
        fetched(tmp_path)
    assert names(tmp_path / "data") == []


def test_errors_that_pass_are_waited_out(tmp_path, archive, server):
    server.errors = [503, 500, 429]
    fetched(tmp_path)
    assert (tmp_path / "data/cifar-100-binary.tar.gz").read_bytes() == archive


def test_errors_that_stay_are_reported_at_once(tmp_path, archive, server):
    server.errors = [403]
    with pytest.raises(DataError, match="403"):
        fetched(tmp_path)
    assert len(server.requests) == 1
    assert names(tmp_path / "data") == []


def test_a_server_that_is_not_there(tmp_path, archive, server, monkeypatch):
    publish(monkeypatch, "cifar100", "http://127.0.0.1:9/cifar-100-binary.tar.gz", archive)
    with pytest.raises(DataError, match="gave up"):
        fetched(tmp_path)


def test_a_flood_is_stopped(tmp_path, archive, server, monkeypatch):
    monkeypatch.setattr(fetch, "MAX_BYTES", 1000)
    with pytest.raises(DataError, match="more than 1000 bytes"):
        fetched(tmp_path)
    assert "cifar-100-binary.tar.gz" not in names(tmp_path / "data")


def test_a_different_file_of_that_name_is_left_alone(tmp_path, archive, server):
    mine = write(tmp_path / "data" / "cifar-100-binary.tar.gz", b"repacked by me")
    with pytest.raises(DataError, match="move it away"):
        fetched(tmp_path)
    assert mine.read_bytes() == b"repacked by me"
    assert server.requests == []


def test_a_mirror_is_used_with_the_published_checksum(tmp_path, archive, server, monkeypatch):
    publish(monkeypatch, "cifar100", "http://gone.invalid/cifar-100-binary.tar.gz", archive)
    server.files["/mirror/cifar-100-binary.tar.gz"] = archive
    fetched(tmp_path, mirror=f"{server.address}/mirror/")
    assert server.requests == [("/mirror/cifar-100-binary.tar.gz", None)]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/x"])
def test_only_http_is_fetched(tmp_path, archive, monkeypatch, url):
    publish(monkeypatch, "cifar100", url, archive)
    with pytest.raises(DataError, match="only http and https"):
        fetched(tmp_path)


def test_a_zip_is_unpacked_to_its_folder(tmp_path, server, monkeypatch):
    files = {f"train_image_only/{n[6:]}": c for n, c in clear_files().items() if n[:6] == "train/"}
    content = zipped(tmp_path / "made.zip", files).read_bytes()
    server.files["/clear10-train.zip"] = content
    url = f"{server.address}/clear10-train.zip"
    publish(monkeypatch, "clear10", url, content, unpack_to="clear10/train")
    root = tmp_path / "data"
    assert fetch.fetch("clear10", root, patience=QUICK) == [root / "clear10/train"]
    assert (root / "clear10/train/labeled_metadata.json").is_file()
    with pytest.raises(DataError, match="test/labeled_metadata"):
        clear10(root)


def test_a_hostile_zip_with_the_published_checksum_writes_nothing(tmp_path, server, monkeypatch):
    content = zipped(tmp_path / "made.zip", {"../../evil": b"evil", "a": b""}).read_bytes()
    server.files["/clear10-train.zip"] = content
    url = f"{server.address}/clear10-train.zip"
    publish(monkeypatch, "clear10", url, content, unpack_to="clear10/train")
    with pytest.raises(DataError, match="outside the folder"):
        fetch.fetch("clear10", tmp_path / "data", patience=QUICK)
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path / "data/clear10/train").exists()


def test_a_root_that_cannot_be_written_is_an_error_with_a_way_out(tmp_path, archive):
    write(tmp_path / "data", b"a file where the folder should be")
    with pytest.raises(DataError, match="--data-root"):
        fetched(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("imagenet", "choose from digits, mnist", id="unknown"),
        pytest.param("digits", "It is bundled", id="bundled"),
        pytest.param("pacs", "put the images", id="by-hand"),
    ],
)
def test_what_cannot_be_fetched_says_why(tmp_path, name, message):
    with pytest.raises(DataError, match=message):
        fetch.fetch(name, tmp_path)


def test_patience_checks_itself():
    with pytest.raises(InputError, match="attempts=0; give a whole number"):
        fetch.Patience(attempts=0)


def test_what_a_kill_after_unpacking_left_is_removed_by_the_next_fetch(
    tmp_path, server, monkeypatch
):
    content = zipped(tmp_path / "made.zip", {"top/a": b"a", "top/b": b"b"}).read_bytes()
    server.files["/clear10-train.zip"] = content
    url = f"{server.address}/clear10-train.zip"
    publish(monkeypatch, "clear10", url, content, unpack_to="clear10/train")
    for _ in range(2):
        fetch.fetch("clear10", tmp_path / "data", patience=QUICK)
        assert names(tmp_path / "data/clear10") == ["train"]
        assert names(tmp_path / "data/clear10/train") == ["a", "b"]
        write(tmp_path / "data/clear10/.train.proxreplay-lock", b"1")
        write(tmp_path / "data/clear10/.train.proxreplay-unpacking/c", b"c")
