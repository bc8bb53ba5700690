"""Whole files or none, whoever is killed and however many write."""

import subprocess
import sys
from pathlib import Path

import pytest

from proxreplay.files import remove_leftovers, replacing, write_text

WRITER = """
import sys
from pathlib import Path
from proxreplay.files import replacing
for i in range(300):
    with replacing(Path(sys.argv[1])) as file:
        file.write(b"%d " % i)
        file.write(b"x" * 5000)
        file.write(b" %d" % i)
"""
STUCK = """
import sys
from pathlib import Path
from proxreplay.files import replacing
with replacing(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_a_file_is_replaced_with_the_folders_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "result.json"
    for content in ("one", "two \u00e4"):
        write_text(path, content)
        assert path.read_text("utf-8") == content
    assert list(path.parent.iterdir()) == [path]


def test_an_error_inside_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"new" * (1 // 0))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_several_processes_may_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) for _ in range(3)]
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            first, body, last = path.read_bytes().split()
            assert first == last
            assert body == b"x" * 5000
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == [path]


def test_only_what_a_dead_writer_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    foreign = [tmp_path / name for name in (".tmpAb12Cd", ".file.proxreplay-writing", "file.tmp")]
    for other in foreign:
        other.write_text("not ours")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", STUCK, str(path)], stdin=pipe, stdout=pipe) as it:
        assert it.stdout is not None
        it.stdout.readline()
        (temporary,) = {*tmp_path.iterdir()} - {*foreign}
        assert temporary.name.endswith(".proxreplay-writing")
        remove_leftovers(tmp_path)
        write_text(path, "another")
        assert temporary.read_bytes() == b"half"
        it.kill()
    write_text(tmp_path / "unrelated", "")
    assert temporary.exists()
    write_text(path, "next")
    assert not temporary.exists()
    assert all(other.exists() for other in foreign)
