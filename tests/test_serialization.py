"""States on disk: exact round trips, damage found and named, failures that lose nothing."""

import errno
import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from proxreplay import serialization
from proxreplay.errors import CheckpointError, InputError
from proxreplay.serialization import load_state, save_state, write_atomically

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def same(a: object, b: object) -> bool:
    """Equal in type, value, dtype, shape and bits (NaN included)."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.contiguous().reshape(-1).view(torch.uint8).tolist()
            == b.contiguous().reshape(-1).view(torch.uint8).tolist()
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(
            type(k) is type(q) and same(a[k], b[q]) for k, q in zip(a, b, strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return repr(a) == repr(b)
    return a == b


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    seed = draw(st.integers(0, 2**20))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return (values > 0) if dtype == torch.bool else values.abs().to(dtype)


structures = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


def example() -> dict[str, object]:
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    return {
        "model": {"weight": weight, "tied": weight, "active": torch.tensor([True, False])},
        "memory": {"fields": {"inputs": torch.arange(48, dtype=torch.uint8)}, "size": 3},
        "stream": {"position": 17, "best": -math.inf},
    }


@settings(
    deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(value=structures)
def test_any_structure_comes_back_exactly(tmp_path: Path, value: object) -> None:
    save_state(tmp_path / "state", {"part": value})
    assert same(load_state(tmp_path / "state"), {"part": value})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.zeros(0, 3),
        torch.arange(12).view(3, 4).t(),
        torch.arange(12)[::3],
        torch.ones(1).expand(5),
        torch.arange(6, dtype=torch.float32).view(2, 3).requires_grad_(),
        torch.tensor([math.nan, math.inf, -0.0]),
        torch.tensor([1 + 2j]).conj(),
    ],
    ids=["0-d", "empty", "transposed", "strided", "expanded", "leaf", "special", "conjugate"],
)
def test_tensor_cases(tmp_path: Path, tensor: Tensor) -> None:
    save_state(tmp_path, {"part": tensor})
    loaded = load_state(tmp_path)["part"]
    assert same(loaded, tensor.detach().resolve_conj())
    assert not loaded.requires_grad


def test_channels_last_comes_back_in_its_own_order_of_memory(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    save_state(tmp_path, {"part": [image]})
    assert load_state(tmp_path)["part"][0].stride() == image.stride()


def test_a_tensor_that_appears_twice_is_written_once_and_stays_shared(tmp_path: Path) -> None:
    shared = torch.zeros(1000)
    save_state(tmp_path, {"part": {"a": shared, "b": shared, "slice": shared[:10]}})
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 2 * shared.nbytes
    part = load_state(tmp_path)["part"]
    part["a"][0] = 1.0
    assert part["b"][0] == 1.0
    assert part["slice"][0] == 0.0


def test_loaded_tensors_do_not_depend_on_the_files(tmp_path: Path) -> None:
    save_state(tmp_path, {"part": torch.arange(10)})
    loaded = load_state(tmp_path)["part"]
    for file in tmp_path.iterdir():
        file.write_bytes(b"\xff" * file.stat().st_size)
    assert loaded.tolist() == list(range(10))


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_state(tmp_path / name, example())
    one, two = ({f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in ("one", "two"))
    assert one == two


def test_saving_again_replaces_the_state_and_leaves_nothing_behind(tmp_path: Path) -> None:
    save_state(tmp_path, {"old": torch.ones(3), "both": 1})
    (tmp_path / "model.json.writing").write_text("from a killed process")
    (tmp_path / "notes.txt").write_text("mine")
    save_state(tmp_path, {"both": 2})
    assert load_state(tmp_path) == {"both": 2}
    suffixes = sorted(file.name.split("-")[0] for file in tmp_path.iterdir())
    assert suffixes == ["both", "manifest.json", "notes.txt"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": object()}, "holds a object at '/x'"),
        ([{"x": {1, 2}}], "holds a set at '/0/x'"),
        ({None: 1}, "has the key None"),
        ({True: 1}, "has the key True"),
        (torch.ones(2, 2).to_sparse(), "only dense tensors"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2, device="meta"), "only dense tensors"),
    ],
    ids=["object", "set", "none-key", "bool-key", "sparse", "complex128", "meta"],
)
def test_what_cannot_be_saved_is_named_before_anything_is_written(
    tmp_path: Path, value: object, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        save_state(tmp_path / "state", {"good": 1, "bad": value})
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("name", ["", "../escape", "a/b", ".hidden", "a" * 65, 3])
def test_part_names_are_plain(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="a part named"):
        save_state(tmp_path / "state", {name: 1})
    assert list(tmp_path.iterdir()) == []


def damaged_part(folder: Path, file: Path) -> str:
    """Load a damaged state; returns the message, which names the file."""
    with pytest.raises(CheckpointError) as caught:
        load_state(folder)
    assert file.name in str(caught.value)
    return str(caught.value)


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    save_state(tmp_path, example())
    for file in sorted(tmp_path.iterdir()):
        whole = file.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 97)):
            for bit in (1, 0x80):
                file.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
                message = damaged_part(tmp_path, file)
                if file.name != "manifest.json":
                    assert f"part '{file.name.split('-')[0]}'" in message
        file.write_bytes(whole)
    assert same(load_state(tmp_path), example())


@pytest.mark.parametrize("keep", [0, 1, 0.5, -1], ids=["empty", "one", "half", "all-but-one"])
def test_a_truncated_file_is_found(tmp_path: Path, keep: float) -> None:
    save_state(tmp_path, example())
    for file in sorted(tmp_path.iterdir()):
        whole = file.read_bytes()
        file.write_bytes(whole[: int(keep * len(whole)) if keep == 0.5 else int(keep)])
        damaged_part(tmp_path, file)
        file.write_bytes(whole + b" ")
        damaged_part(tmp_path, file)
        file.write_bytes(whole)


def test_a_missing_file_is_found(tmp_path: Path) -> None:
    save_state(tmp_path, example())
    for file in sorted(tmp_path.iterdir()):
        whole = file.read_bytes()
        file.unlink()
        damaged_part(tmp_path, file)
        file.write_bytes(whole)


def test_a_folder_without_a_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(CheckpointError, match=r"manifest\.json: missing"):
            load_state(path)


def test_a_foreign_version_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(serialization, "VERSION", 99)
        save_state(tmp_path, example())
    with pytest.raises(
        CheckpointError, match=r"version 99, but this proxreplay reads .* version 1"
    ):
        load_state(tmp_path)


@pytest.mark.parametrize(
    "forge",
    [
        lambda parts: {"../memory": parts["memory"]},
        lambda parts: {"memory": {"structure": {**parts["memory"]["structure"], "file": "../x"}}},
        lambda parts: {"memory": {"script": parts["memory"]["structure"]}},
        lambda parts: {"memory": {"structure": {}}},
        lambda parts: {"memory": {}},
        lambda parts: {"memory": None},
        lambda parts: [],
    ],
    ids=["part-path", "file-path", "kind", "no-checksum", "no-structure", "null", "list"],
)
def test_a_forged_manifest_cannot_name_other_files(tmp_path: Path, forge: object) -> None:
    save_state(tmp_path, example())
    manifest = tmp_path / "manifest.json"
    parts = json.loads(manifest.read_bytes())["parts"]
    manifest.write_bytes(serialization._seal(forge(parts)))  # type: ignore[operator]
    with pytest.raises(CheckpointError):
        load_state(tmp_path)


def test_no_pickle_is_read(tmp_path: Path) -> None:
    torch.save({"weights": torch.ones(3)}, tmp_path / "manifest.json")
    with pytest.raises(CheckpointError, match="damaged"):
        load_state(tmp_path)


def test_other_peoples_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"not empty \(it holds thesis.tex\)"):
        save_state(tmp_path, example())
    (tmp_path / "manifest.json").write_text('{"name": "web app"}')
    with pytest.raises(CheckpointError, match="belongs to something else"):
        save_state(tmp_path, example())
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_state_can_be_saved_over(tmp_path: Path) -> None:
    save_state(tmp_path, example())
    (tmp_path / "manifest.json").write_bytes(b'{"format": "prox')
    save_state(tmp_path, {"new": 1})
    assert load_state(tmp_path) == {"new": 1}


@pytest.mark.parametrize("function", ["replace", "fsync"])
def test_a_failing_disk_leaves_the_old_state_whichever_call_it_strikes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    save_state(tmp_path, example())
    names = sorted(file.name for file in tmp_path.iterdir())
    works = getattr(os, function)
    calls_that_work = 0
    while True:
        left = calls_that_work

        def fails(*args: object, **kwargs: object) -> object:
            nonlocal left
            if left == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            left -= 1
            return works(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, function, fails)
            try:
                save_state(tmp_path, {**example(), "stream": {"position": 18}})
            except CheckpointError as error:
                assert "No space left on device" in str(error)  # noqa: PT017
                assert "earlier state there is intact" in str(error)  # noqa: PT017
            else:
                break
        state = load_state(tmp_path)
        if state["stream"]["position"] == 17:
            assert sorted(file.name for file in tmp_path.iterdir()) == names
        else:  # the manifest was in place; only the certainty that it is on disk is missing
            assert function == "fsync"
            save_state(tmp_path, example())
        calls_that_work += 1
    assert calls_that_work >= 4
    assert load_state(tmp_path)["stream"]["position"] == 18


def test_a_full_disk_gives_a_clear_error_and_leaves_the_old_state(tmp_path: Path) -> None:
    save_state(tmp_path, example())
    script = textwrap.dedent("""
        import resource, signal, sys, torch
        from proxreplay.serialization import save_state
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        save_state(sys.argv[1], {"model": torch.ones(100_000)})
    """)
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert "CheckpointError" in run.stderr
    assert "could not be written" in run.stderr
    assert same(load_state(tmp_path), example())
    assert not [file for file in tmp_path.iterdir() if file.name.endswith(".writing")]


def test_a_place_that_cannot_be_written_to_gives_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        save_state(tmp_path / "file" / "state", example())
    with pytest.raises(CheckpointError, match="could not be written"):
        save_state(tmp_path / "file", example())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_gives_a_clear_error(tmp_path: Path) -> None:
    save_state(tmp_path / "state", example())
    (tmp_path / "state").chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="could not be written"):
            save_state(tmp_path / "state", {"new": 1})
    finally:
        (tmp_path / "state").chmod(0o700)
    assert same(load_state(tmp_path / "state"), example())


def test_killed_at_any_moment_there_is_always_a_whole_state(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import sys, torch
        from proxreplay.serialization import save_state
        for i in range(10**9):
            save_state(sys.argv[1], {"a": {"i": i, "x": torch.full((20_000,), i)}, "b": [i]})
            if i == 0:
                print("ready", flush=True)
    """)
    for attempt in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.05 + 0.037 * attempt)
        process.kill()
        process.wait()
        process.stdout.close()
        state = load_state(tmp_path)
        assert state["b"] == [state["a"]["i"]]
        assert bool((state["a"]["x"] == state["a"]["i"]).all())


def test_write_atomically_replaces_a_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    for content in (b"one", b"two"):
        write_atomically(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]
