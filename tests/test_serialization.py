"""States on disk: exact round trips, damage found and named, failures that lose nothing."""

import errno
import hashlib
import json
import math
import os
import resource
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from proxreplay.errors import CheckpointError, InputError
from proxreplay.serialization import STATE, load_state, save_state

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
    for name in ("one.safetensors", "two.safetensors"):
        save_state(tmp_path / name, example())
    assert (tmp_path / "one.safetensors").read_bytes() == (
        tmp_path / "two.safetensors"
    ).read_bytes()


def test_other_programs_can_read_the_tensors(tmp_path: Path) -> None:
    save_state(tmp_path / "x.safetensors", {"model": {f"{d}": torch.ones(3).to(d) for d in DTYPES}})
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert names == {f"model/{dtype}" for dtype in DTYPES}
        for dtype in DTYPES:
            assert same(file.get_tensor(f"model/{dtype}"), torch.ones(3).to(dtype))


def test_a_path_is_a_file_or_a_folder_by_its_name(tmp_path: Path) -> None:
    save_state(tmp_path / "a.safetensors", {"x": 1})
    save_state(str(tmp_path / "new" / "folder"), {"x": 2})
    (tmp_path / "renamed").write_bytes((tmp_path / "a.safetensors").read_bytes())
    assert load_state(tmp_path / "a.safetensors") == load_state(tmp_path / "renamed") == {"x": 1}
    assert [file.name for file in (tmp_path / "new" / "folder").iterdir()] == [STATE]
    assert load_state(tmp_path / "new" / "folder" / STATE) == {"x": 2}


def test_saving_again_replaces_the_state_and_leaves_nothing_behind(tmp_path: Path) -> None:
    save_state(tmp_path, {"old": torch.ones(3), "both": 1})
    (tmp_path / f".{STATE}.0123abcd.proxreplay-writing").write_text("from a killed process")
    (tmp_path / "notes.txt").write_text("mine")
    save_state(tmp_path, {"both": 2})
    assert load_state(tmp_path) == {"both": 2}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["notes.txt", STATE]


def test_leftovers_and_strangers_never_block(tmp_path: Path) -> None:
    for name in (".tmpAb12Cd", ".DS_Store", "model.json.writing", f"{STATE}.123.tmp"):
        (tmp_path / name).write_text("left behind")
    save_state(tmp_path, {"x": 1})
    assert load_state(tmp_path) == {"x": 1}
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002], ids=oct)
def test_permissions_follow_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        save_state(tmp_path / "state", example())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state" / STATE).stat().st_mode) == 0o666 & ~umask


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": object()}, "a object at '/bad/x'"),
        ([{"x": {1, 2}}], "a set at '/bad/0/x'"),
        ({None: 1}, "the key None at '/bad'"),
        ({True: 1}, "the key True at '/bad'"),
        (torch.ones(2, 2).to_sparse(), "only dense tensors"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2, device="meta"), "only dense tensors"),
        (10**5000, "cannot be written as JSON"),
        (deep(2000), "cannot be written as JSON"),
        (["x" * 100] * 200_000, "bytes of structure"),
    ],
    ids=[
        *("object", "set", "none-key", "bool-key", "sparse", "complex128", "meta"),
        *("integer", "deep", "long"),
    ],
)
def test_what_cannot_be_saved_is_named_before_anything_is_written(
    tmp_path: Path, value: object, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        save_state(tmp_path / "state", {"good": 1, "bad": value})
    assert not (tmp_path / "state").exists()


def check_refused(file: Path, message: str | None = None) -> None:
    """A damaged state is refused with the name of its file."""
    with pytest.raises(CheckpointError, match=message) as caught:
        load_state(file)
    assert file.name in str(caught.value)


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_state(file, example())
    whole = file.read_bytes()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        check_refused(file)
    file.write_bytes(whole)
    assert same(load_state(file), example())


def test_a_truncated_file_is_found(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_state(file, example())
    whole = file.read_bytes()
    for length in range(0, len(whole), 5):
        file.write_bytes(whole[:length])
        check_refused(file)
    file.write_bytes(whole + b" ")
    check_refused(file)


def test_a_path_without_a_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "fifo.safetensors")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "fifo.safetensors", Path("/dev/zero")):
        with pytest.raises(CheckpointError, match="missing"):
            load_state(path)
    check_refused(tmp_path / "file", "0 bytes of header in a file of 0")


def forge(
    file: Path, structure: str, *, version: str = "2", size: int = 4, fill: int = 1, **entry: Any
) -> None:
    """Write a file of the documented form, with a valid checksum, whatever it says."""
    metadata = {"format": "proxreplay-state", "version": version, "sha256": "0" * 64}
    metadata["structure"] = structure
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | entry
    header = json.dumps({"__metadata__": metadata, "x": tensor}, separators=(",", ":")).encode()
    content = len(header).to_bytes(8, "little") + header + bytes([fill]) * size
    digest = hashlib.sha256(content).hexdigest().encode()
    file.write_bytes(content.replace(b"0" * 64, digest, 1))


GOOD = '{"dict": [["part", {"tensor": ["x"]}]]}'


def test_a_file_made_by_hand_from_the_documentation_is_read(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    forge(file, GOOD, shape=[2, 2], dtype="U8")
    assert load_state(file)["part"].tolist() == [[1, 1], [1, 1]]


FORGERIES: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"version": "3"}, "version '3', but this proxreplay reads '2'"),
    "nan": ({"structure": '{"dict": [["part", NaN]]}'}, "it holds NaN"),
    "deep": ({"structure": "[" * 100_000}, "RecursionError"),
    "unknown-kind": ({"structure": '{"dict": [["part", {"eval": "x"}]]}'}, "unknown kind"),
    "two-keys": ({"structure": '{"dict": [], "tuple": []}'}, "too many values"),
    "no-dict": ({"structure": "[1]"}, "not a dict"),
    "no-tensor": ({"structure": '{"dict": [["part", {"tensor": ["y"]}]]}'}, "KeyError"),
    "bad-order": ({"structure": '{"dict": [["p", {"tensor": ["x", [7]]}]]}'}, "damaged"),
    "list-key": ({"structure": '{"dict": [[[1], 2]]}'}, "TypeError"),
    "huge-shape": ({"shape": [2**60]}, "not where or what"),
    "negative": ({"shape": [-1, -1]}, "not where or what"),
    "fraction": ({"shape": [1.0]}, "not where or what"),
    "outside": ({"shape": [2**40], "data_offsets": [0, 2**42]}, "instead of"),
    "gap": ({"data_offsets": [2**40, 2**40 + 4]}, "not where or what"),
    "dtype": ({"dtype": "PICKLE"}, "KeyError"),
    "bool": ({"dtype": "BOOL", "shape": [4], "fill": 2}, "True and False"),
    "too-long": ({"size": 5}, "bytes instead of"),
    "offsets": ({"data_offsets": None}, "damaged"),
    "empty-huge": ({"shape": [0, 2**70], "data_offsets": [0, 0], "size": 0}, "damaged"),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forged_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    how, message = FORGERIES[kind]
    file = tmp_path / "x.safetensors"
    forge(file, **({"structure": GOOD} | how))
    check_refused(file, message)


def test_a_huge_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    with open(file, "wb") as out:  # sparse
        out.write((2**39).to_bytes(8, "little"))
        out.truncate(2**40)
    check_refused(file, "bytes of header")


def test_no_pickle_is_read(tmp_path: Path) -> None:
    torch.save({"weights": torch.ones(3)}, tmp_path / STATE)
    with pytest.raises(CheckpointError, match="damaged or foreign"):
        load_state(tmp_path)


def test_what_belongs_to_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis-0123456789abcdef.json").write_text("years of work")
    (tmp_path / "manifest.json").write_text('{"name": "web app"}')
    save_state(tmp_path, example())
    assert same(load_state(tmp_path), example())
    assert len(list(tmp_path.iterdir())) == 3
    save_file({"weights": torch.ones(3)}, tmp_path / "weights.safetensors")
    os.mkfifo(tmp_path / "fifo.safetensors")
    for name in ("weights.safetensors", "fifo.safetensors"):
        with pytest.raises(CheckpointError, match="is in the way and is not a state"):
            save_state(tmp_path / name, example())


def test_a_damaged_state_can_be_saved_over(tmp_path: Path) -> None:
    save_state(tmp_path, example())
    whole = (tmp_path / STATE).read_bytes()
    for damaged in (whole[:100], whole[:-1], b""):
        (tmp_path / STATE).write_bytes(damaged)
        save_state(tmp_path, {"new": 1})
        assert load_state(tmp_path) == {"new": 1}


# --- version 1 ------------------------------------------------------------------------------------


def save_version_1(folder: Path) -> dict[str, Any]:
    """A state as proxreplay 0.1 wrote it; returns what it holds."""
    folder.mkdir(exist_ok=True)
    weight = torch.arange(6, dtype=torch.float32).view(2, 3)
    structures: dict[str, Any] = {
        "model": {"dict": [["weight", {"tensor": ["/weight", [1, 0]]}], ["tied", {"tuple": [1]}]]},
        "stream": {"dict": [["position", 17], ["best", {"float": "-inf"}]]},
    }
    parts: dict[str, Any] = {}
    for part, structure in structures.items():
        files = {"structure": json.dumps(structure, indent=1).encode()}
        if part == "model":
            save_file({"/weight": weight}, folder / "scratch")
            files["tensors"] = (folder / "scratch").read_bytes()
            (folder / "scratch").unlink()
        for kind, content in files.items():
            digest = hashlib.sha256(content).hexdigest()
            suffix = "json" if kind == "structure" else "safetensors"
            name = f"{part}-{digest[:16]}.{suffix}"
            (folder / name).write_bytes(content)
            entry = {"file": name, "bytes": len(content), "sha256": digest}
            parts.setdefault(part, {})[kind] = entry
    write_manifest(folder, parts)
    return {
        "model": {"weight": weight.t(), "tied": (1,)},
        "stream": {"position": 17, "best": -math.inf},
    }


def write_manifest(folder: Path, parts: Any, version: int = 1) -> None:
    manifest = {"format": "proxreplay-state", "version": version, "parts": parts}
    digest = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    text = json.dumps({**manifest, "sha256": digest}, indent=1)
    (folder / "manifest.json").write_text(text)


def test_a_state_of_version_1_is_read_and_replaced(tmp_path: Path) -> None:
    expected = save_version_1(tmp_path)
    assert same(load_state(tmp_path), expected)
    (tmp_path / ".tmpAb12Cd").write_text("safetensors was killed here")
    (tmp_path / "notes.txt").write_text("mine")
    save_state(tmp_path, {"new": 1})
    assert load_state(tmp_path) == {"new": 1}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["notes.txt", STATE]


def test_damage_to_a_state_of_version_1_is_found(tmp_path: Path) -> None:
    expected = save_version_1(tmp_path)
    for file in sorted(tmp_path.iterdir()):
        whole = file.read_bytes()
        for at in range(0, len(whole), 3):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(CheckpointError, match=file.name):
                load_state(tmp_path)
        file.write_bytes(whole[:-1])
        with pytest.raises(CheckpointError, match=file.name):
            load_state(tmp_path)
        file.unlink()
        with pytest.raises(CheckpointError, match=r"missing"):
            load_state(tmp_path)
        file.write_bytes(whole)
    assert same(load_state(tmp_path), expected)


@pytest.mark.parametrize(
    "forged",
    [
        lambda parts: {"../model": parts["model"]},
        lambda parts: {"model": {"structure": {**parts["model"]["structure"], "file": "../x"}}},
        lambda parts: {"model": {"script": parts["model"]["structure"]}},
        lambda parts: {"model": {"structure": {}}},
        lambda parts: {"model": {}},
        lambda parts: {"model": None},
        lambda parts: [],
    ],
    ids=["part-path", "file-path", "kind", "no-checksum", "no-structure", "null", "list"],
)
def test_a_forged_manifest_cannot_name_other_files(
    tmp_path: Path, forged: Callable[[Any], Any]
) -> None:
    save_version_1(tmp_path)
    parts = json.loads((tmp_path / "manifest.json").read_bytes())["parts"]
    write_manifest(tmp_path, forged(parts))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load_state(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"version": NaN}', "\xff", ""])
def test_a_manifest_that_is_no_json_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text, "latin-1")
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged or foreign"):
        load_state(tmp_path)


# --- trouble while writing ------------------------------------------------------------------------


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
        else:  # the new state was in place; only the certainty that it is on disk is missing
            assert function == "fsync"
            save_state(tmp_path, example())
        calls_that_work += 1
    assert calls_that_work == (1 if function == "replace" else 2)
    assert load_state(tmp_path)["stream"]["position"] == 18


def test_a_full_disk_gives_a_clear_error_and_leaves_the_old_state(tmp_path: Path) -> None:
    save_state(tmp_path, example())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="could not be written"):
            save_state(tmp_path, {"model": torch.ones(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert same(load_state(tmp_path), example())
    assert [file.name for file in tmp_path.iterdir()] == [STATE]


def test_a_place_that_cannot_be_written_to_gives_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        save_state(tmp_path / "file" / "state", example())
    with pytest.raises(CheckpointError, match="could not be written"):
        save_state(tmp_path / "file", example())
    with pytest.raises(CheckpointError, match="could not be written"):
        save_state("/dev/null", example())


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


def test_threads_that_save_to_one_place_never_fail_and_readers_see_whole_states(
    tmp_path: Path,
) -> None:
    def save(rounds: int) -> None:
        for i in range(rounds):
            save_state(tmp_path, {"a": i, "x": torch.full((2000,), i), "b": [i]})

    save(1)
    with ThreadPoolExecutor(3) as pool:
        writers = [pool.submit(save, 40) for _ in range(3)]
        while not all(writer.done() for writer in writers):
            state = load_state(tmp_path)
            assert state["b"] == [state["a"]]
            assert bool((state["x"] == state["a"]).all())
        for writer in writers:
            writer.result()
    assert [file.name for file in tmp_path.iterdir()] == [STATE]
