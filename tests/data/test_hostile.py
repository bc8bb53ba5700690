"""Damaged and forged files end in an error of ours that names them, in little time and memory."""

import contextlib
import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxreplay.data import cifar, from_npz, trees
from proxreplay.data.idx import read_idx
from proxreplay.data.images import decode
from proxreplay.errors import DataError, ProxreplayError
from tests.data.data_samples import cifar100_files, idx_bytes, jpeg, tar_gz, zipped
from tests.data.hostile import CASES, IMAGES

ROOT = Path(__file__).parents[2]
MOST_KILOBYTES = 300 << 10


@pytest.mark.parametrize("name", CASES)
def test_hostile_files_are_refused_by_name(name, tmp_path):
    with pytest.raises(DataError) as caught:
        CASES[name](tmp_path)
    assert " at 0x" not in str(caught.value)
    named = (str(tmp_path), "x.png", "x.tif", "x train", "x: labels", "CLEAR-10", "/dev/zero")
    assert any(name in str(caught.value) for name in named), str(caught.value)


def test_hostile_files_take_little_memory(tmp_path):
    command = [sys.executable, "-m", "tests.data.hostile", str(tmp_path / "cases")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["survived"] == []
    assert found["kilobytes"] < MOST_KILOBYTES, done.stderr[-4000:]


def consume(opened):
    """Everything that a reader yields."""
    with opened as decoded:
        for part in decoded.parts.values():
            for _ in part.blocks:
                pass


def sample(kind, folder):
    """A good file of a kind, and what loads it."""
    if kind == "zip":
        return zipped(folder / "x.zip", IMAGES), lambda path: consume(trees.read(path, 8))
    if kind == "tar.gz":
        path = tar_gz(folder / "x.tar.gz", cifar100_files(4)[0])
        return path, lambda path: consume(cifar.read(path, cifar.LAYOUTS["cifar100"]))
    if kind == "npz":
        np.savez_compressed(folder / "x.npz", x=np.ones((9, 4)), y=["a", "b", "c"] * 3)
        return folder / "x.npz", from_npz
    if kind in ("PNG", "JPEG", "TIFF", "GIF", "BMP", "WEBP"):
        path = folder / "x"
        path.write_bytes(jpeg((16, 16), fmt=kind))
        return path, lambda path: decode(path.read_bytes(), 8, "x")
    data = idx_bytes(np.arange(60).reshape(3, 4, 5))
    path = folder / ("x.gz" if kind == "idx.gz" else "x")
    path.write_bytes(gzip.compress(data) if kind == "idx.gz" else data)
    return path, read_idx


KINDS = ("zip", "tar.gz", "npz", "idx", "idx.gz", "PNG", "JPEG", "TIFF", "GIF", "BMP", "WEBP")
DAMAGE = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1), st.integers(0, 255)),
    st.tuples(st.just("set"), st.floats(0, 1), st.integers(0, 255)),
    st.tuples(st.just("insert"), st.floats(0, 1), st.integers(0, 255)),
    st.tuples(st.just("ones"), st.floats(0, 1), st.integers(1, 8)),
)


def damaged(content, damages):
    for how, where, value in damages:
        place = int(where * len(content))
        if how == "cut":
            content = content[:place]
        elif how == "set":
            content = content[:place] + bytes([value]) + content[place + 1 :]
        elif how == "insert":
            content = content[:place] + bytes([value]) * 3 + content[place:]
        else:
            content = content[:place] + b"\xff" * value + content[place + value :]
    return content


@pytest.mark.parametrize("kind", KINDS)
def test_damage_of_any_kind_loads_or_is_an_error_of_ours(kind, tmp_path):
    path, load = sample(kind, tmp_path)
    good = path.read_bytes()
    load(path)  # the sample itself is sound

    @settings(max_examples=80, deadline=None, database=None)
    @given(st.lists(DAMAGE, min_size=1, max_size=3))
    def check(damages):
        path.write_bytes(damaged(good, damages))
        with contextlib.suppress(ProxreplayError):
            load(path)

    check()
