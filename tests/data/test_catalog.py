import pytest
from typer.testing import CliRunner

from proxreplay.cli import app
from proxreplay.data import cifar100, pacs
from proxreplay.data.catalog import CATALOG, check
from proxreplay.data.roots import cache_folder
from proxreplay.errors import DataError
from tests.data.data_samples import cifar100_files, jpeg, mnist_files, tar_gz, write_files


def by_name(root, **options):
    return {status.name: status for status in check(root, **options)}


def test_an_empty_root_has_only_what_is_bundled(tmp_path):
    statuses = by_name(tmp_path)
    assert list(statuses) == list(CATALOG)
    assert [name for name, status in statuses.items() if status.found] == ["digits"]
    for name, status in statuses.items():
        if not status.found:
            assert status.looked_for, name
            assert all(path.is_relative_to(tmp_path) for path in status.looked_for)
    assert statuses["mnist"].way_out == f"proxreplay data fetch mnist --data-root {tmp_path}"
    assert "<domain>/<class>/<image>" in statuses["pacs"].way_out


def test_a_root_with_spaces_gives_a_command_that_can_be_typed(tmp_path):
    status = by_name(tmp_path / "my data")["cifar10"]
    assert status.way_out.endswith(f"--data-root '{tmp_path}/my data'")


def test_what_is_there_is_found_with_its_cache(tmp_path):
    archive = tar_gz(tmp_path / "cifar-100-binary.tar.gz", cifar100_files()[0])
    write_files(tmp_path / "mnist", mnist_files(compressed=True))
    before = by_name(tmp_path)
    assert before["cifar100"].source == archive
    assert before["cifar100"].cache is None
    assert before["mnist"].source == tmp_path / "mnist"
    cifar100(tmp_path)
    assert by_name(tmp_path)["cifar100"].cache == cache_folder("cifar100", archive)


def test_three_of_four_files_are_not_enough(tmp_path):
    files = mnist_files()
    files.popitem()
    write_files(tmp_path / "mnist", files)
    assert not by_name(tmp_path)["mnist"].found


def test_a_full_check_names_damage_and_differences(tmp_path):
    archive = tar_gz(tmp_path / "cifar-100-binary.tar.gz", cifar100_files()[0])
    cifar100(tmp_path)
    sound = by_name(tmp_path, full=True)["cifar100"]
    assert sound.problems == ()
    assert "differs from the published file" in sound.remarks[0]
    inputs = cache_folder("cifar100", archive) / "test.inputs.npy"
    content = bytearray(inputs.read_bytes())
    content[-1] ^= 1
    inputs.write_bytes(content)
    archive.write_bytes(archive.read_bytes()[:-100])
    problems = " ".join(by_name(tmp_path, full=True)["cifar100"].problems)
    assert "is damaged" in problems
    assert "rebuilt at the next start" in problems


def test_the_status_knows_the_cache_of_images_with_a_stored_size(tmp_path):
    images = {f"{d}/{c}/{i}.jpg": jpeg() for d in "ab" for c in "xy" for i in range(5)}
    write_files(tmp_path / "pacs", images)
    assert by_name(tmp_path)["pacs"].cache is None
    pacs(tmp_path)
    assert by_name(tmp_path)["pacs"].cache is not None


@pytest.mark.parametrize(("load", "size"), [(cifar100, 16), (pacs, 0)], ids=["fixed", "zero"])
def test_an_impossible_stored_size_is_refused(tmp_path, load, size):
    with pytest.raises(DataError, match=f"stored_size={size}"):
        load(tmp_path, stored_size=size)


def test_every_download_has_an_md5_and_a_name():
    for dataset in CATALOG.values():
        for file in dataset.files:
            assert len(bytes.fromhex(file.md5)) == 16
            assert file.name.endswith((".gz", ".zip"))


def test_brackets_in_a_path_are_printed_as_they_are(tmp_path):
    root = tmp_path / "[" / "x]"
    answer = CliRunner().invoke(app, ["data", "check", "--data-root", str(root)])
    assert answer.exit_code == 0
    assert f"{root}/mnist" in answer.output
