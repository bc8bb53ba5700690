import io
import tarfile
import zipfile
from types import SimpleNamespace

import pytest

from proxreplay.data import archives
from proxreplay.data.archives import Limits, open_files, unpack
from proxreplay.errors import DataError
from tests.data.data_samples import everything_below, tar_gz, write_files, zipped

GOOD = {"top/a.txt": b"one", "top/deep/b.bin": bytes(range(256)) * 100}
EVIL_NAMES = [
    pytest.param("../evil", id="parent"),
    pytest.param("top/../../evil", id="parent-inside"),
    pytest.param("/tmp/evil", id="absolute"),
    pytest.param("..", id="only-parent"),
    pytest.param("top\\..\\..\\evil", id="backslashes"),
    pytest.param("C:/evil", id="drive"),
]


@pytest.fixture(params=["tar.gz", "zip", "folder"])
def good(request, tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    if request.param == "tar.gz":
        return tar_gz(source / "good.tar.gz", GOOD)
    if request.param == "zip":
        return zipped(source / "good.zip", GOOD)
    return write_files(source / "good", GOOD)


def test_files_can_be_read_in_place(good):
    with open_files(good) as files:
        assert files.sizes == {name: len(content) for name, content in GOOD.items()}
        for name, content in GOOD.items():
            with files.open(name) as file:
                assert file.read() == content


def test_unpacking_gives_the_files_inside_the_common_folder(good, tmp_path):
    unpack(good, tmp_path / "out" / "new")
    assert (tmp_path / "out/new/a.txt").read_bytes() == b"one"
    assert (tmp_path / "out/new/deep/b.bin").read_bytes() == GOOD["top/deep/b.bin"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["new"]


def test_what_a_killed_unpacking_left_behind_goes_with_the_next(good, tmp_path):
    write_files(tmp_path / "out" / ".new.proxreplay-unpacking", {"half": b"x"})
    write_files(tmp_path / "out" / ".new-mine", {"kept": b"mine"})
    unpack(good, tmp_path / "out" / "new")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [".new-mine", "new"]


def test_an_existing_folder_is_not_touched(good, tmp_path):
    kept = write_files(tmp_path / "out", {"kept": b"mine"})
    with pytest.raises(DataError, match="exists already"):
        unpack(good, kept)
    assert everything_below(kept) == ["kept"]


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
@pytest.mark.parametrize("name", EVIL_NAMES)
def test_members_outside_the_folder_are_refused_before_anything_is_written(tmp_path, kind, name):
    make = tar_gz if kind == "tar.gz" else zipped
    archive = make(tmp_path / f"evil.{kind}", {**GOOD, name: b"evil"})
    with pytest.raises(DataError, match="outside the folder"):
        unpack(archive, tmp_path / "out" / "new")
    assert not (tmp_path / "out" / "new").exists()
    assert everything_below(tmp_path / "out") == []
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(tarfile.SYMTYPE, id="symlink"),
        pytest.param(tarfile.LNKTYPE, id="hardlink"),
        pytest.param(tarfile.CHRTYPE, id="device"),
        pytest.param(tarfile.FIFOTYPE, id="fifo"),
    ],
)
def test_links_and_devices_in_a_tar_are_refused(tmp_path, kind):
    archive = tmp_path / "evil.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        link = tarfile.TarInfo("top/link")
        link.type, link.linkname = kind, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(DataError, match="link or device"):
        unpack(archive, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_in_a_zip_are_refused(tmp_path):
    archive = tmp_path / "evil.zip"
    with zipfile.ZipFile(archive, "w") as file:
        link = zipfile.ZipInfo("top/link")
        link.external_attr = 0o120777 << 16
        file.writestr(link, "/etc/passwd")
    with pytest.raises(DataError, match="link or device"):
        unpack(archive, tmp_path / "out")


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(Limits(members=1), id="members"),
        pytest.param(Limits(total_bytes=9999), id="bytes"),
    ],
)
def test_archives_beyond_the_limits_are_refused(tmp_path, kind, limits):
    archive = (tar_gz if kind == "tar.gz" else zipped)(tmp_path / f"big.{kind}", GOOD)
    with pytest.raises(DataError, match="more than"):
        unpack(archive, tmp_path / "out", limits)
    assert not (tmp_path / "out").exists()


def test_a_tar_bomb_is_refused_by_its_announced_size_without_reading_it(tmp_path):
    archive = tmp_path / "bomb.tar"
    huge = tarfile.TarInfo("bomb")
    huge.size = 2**40
    archive.write_bytes(huge.tobuf() + bytes(1024))
    with pytest.raises(DataError, match="more than"), open_files(archive):
        pass


def test_a_zip_that_holds_more_than_it_announces_is_refused(tmp_path):
    archive = zipped(tmp_path / "liar.zip", {"a": b"x" * 5000})
    content = bytearray(archive.read_bytes())
    header = content.rfind(b"PK\x01\x02")
    content[header + 24 : header + 28] = (10).to_bytes(4, "little")
    archive.write_bytes(content)
    with pytest.raises(DataError):
        unpack(archive, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("announced", [4, 6])
def test_a_member_of_another_length_than_announced_is_refused(tmp_path, monkeypatch, announced):
    folder = write_files(tmp_path / "in", {"a": b"12345"})
    seen = [("a", SimpleNamespace(st_size=announced))]
    monkeypatch.setattr(archives, "walk_files", lambda folder: seen)
    with pytest.raises(DataError, match=f"not the {announced} bytes"):
        unpack(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_the_same_member_twice_is_refused(tmp_path, kind):
    archive = tmp_path / f"twice.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("a", b"1")
            with pytest.warns(UserWarning, match="Duplicate"):
                file.writestr("a", b"2")
    else:
        with tarfile.open(archive, "w:gz") as tar:
            for _ in range(2):
                tar.addfile(tarfile.TarInfo("a"), io.BytesIO())
    with pytest.raises(DataError, match="occurs twice"), open_files(archive):
        pass


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda b: b[: len(b) // 2], id="truncated"),
        pytest.param(lambda b: b[:-20], id="end-missing"),
        pytest.param(lambda b: b"<html>404</html>", id="web-page"),
        pytest.param(lambda b: b"", id="empty"),
        pytest.param(lambda b: b[:60] + bytes(60) + b[120:], id="overwritten"),
    ],
)
def test_damaged_archives_are_named_with_the_way_out(tmp_path, kind, damage):
    archive = (tar_gz if kind == "tar.gz" else zipped)(tmp_path / f"bad.{kind}", GOOD)
    archive.write_bytes(damage(archive.read_bytes()))
    with pytest.raises(DataError, match=r"bad\..*"):
        unpack(archive, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "data.rar"
    path.write_bytes(b"")
    with pytest.raises(DataError, match="expected a folder"), open_files(path):
        pass
