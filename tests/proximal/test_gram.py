"""The fast Gram matrices against ``Z'Z`` with ``Z`` built, and ``Z`` against the layer itself."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from proxreplay.errors import InputError
from proxreplay.proximal.gram.patches import PatchRows
from proxreplay.proximal.gram.rows import ColumnRows, DenseRows, self_product
from proxreplay.proximal.gram.sums import GramSum, gram_with_bias

CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def brute_force(rows: PatchRows | DenseRows | ColumnRows) -> Tensor:
    Z = rows.dense().double()
    return Z.mT @ Z


def paths(rows: PatchRows) -> list[str]:
    """The ways that there are for this geometry."""
    if min(axis.length for axis in rows.plan.axes) == 0:
        return ["patches"]
    return ["patches", "shifts", "spectrum"] if rows.plan.moving else ["patches", "shifts"]


def energy(rows: PatchRows) -> float:
    """What rounding errors are relative to; a Gram entry may be 0 where the input is not."""
    return max(rows.x.double().square().sum().item(), 1e-30)


@st.composite
def patch_rows(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> PatchRows:
    """Patches of convolutions in 1 to 3 dimensions of every sort that torch allows."""
    dims = draw(st.integers(1, 3))

    def numbers(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    kernel = numbers(1, 4 if dims < 3 else 3)
    stride, dilation = numbers(1, 3), numbers(1, 3 if dims < 3 else 2)
    padding = tuple(zip(numbers(0, 3), numbers(0, 3), strict=True))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    size = tuple(
        draw(st.integers(max(1, r - sum(zeros)), max(1, r - sum(zeros)) + 6))
        for r, zeros in zip(reach, padding, strict=True)
    )
    groups, channels = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    n, seed = draw(st.integers(1, 3)), draw(st.integers(0, 99))
    x = random(n, groups * channels, *size, seed=seed, dtype=dtype)
    if dims > 1 and draw(st.booleans()):
        x = x.contiguous(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
    mode = draw(st.sampled_from(["zeros", "constant", "circular", "reflect", "replicate"]))
    if mode == "zeros":
        return PatchRows(x, kernel, stride, dilation, groups, padding)
    around = [zeros for pair in reversed(padding) for zeros in pair]
    most = min(size) if mode == "circular" else min(size) - 1 if mode == "reflect" else 9
    if max(around) > most:
        mode = "constant"
    value = {"value": 1.5} if mode == "constant" else {}
    return PatchRows(F.pad(x, around, mode=mode, **value), kernel, stride, dilation, groups)


@settings(deadline=None, max_examples=150)
@given(patch_rows())
def test_patches_are_what_the_layer_multiplies(rows: PatchRows) -> None:
    groups, _, d = rows.shape
    weight = random(groups * 2, d // torch.Size(rows.kernel).numel(), *rows.kernel, seed=7)
    x = F.pad(rows.x, [zeros for pair in reversed(rows.padding) for zeros in pair])
    out = CONVOLVE[len(rows.kernel)](
        x, weight, stride=rows.stride, dilation=rows.dilation, groups=groups
    )
    expected = out.transpose(0, 1).reshape(groups, 2, -1).mT
    kernel_first = weight.movedim(1, -1).reshape(groups, 2, d)
    torch.testing.assert_close(rows.dense() @ kernel_first.mT, expected)


@settings(deadline=None, max_examples=300)
@given(patch_rows())
def test_every_path_is_exact_in_float64(rows: PatchRows) -> None:
    expected, scale = brute_force(rows), energy(rows)
    for path in paths(rows):
        error = (rows.gram_by(path) - expected).abs().max().item() / scale
        assert error < 1e-13, f"{path}: {error}"


@settings(deadline=None, max_examples=100)
@given(patch_rows(dtype=torch.float32))
def test_every_path_is_within_1e_5_in_float32(rows: PatchRows) -> None:
    expected, scale = brute_force(rows), energy(rows)
    for path in paths(rows):
        gram = rows.gram_by(path)
        assert gram.dtype == torch.float32
        assert (gram - expected).abs().max().item() / scale < 1e-5, path


@settings(deadline=None, max_examples=100)
@given(patch_rows())
def test_totals_are_column_sums(rows: PatchRows) -> None:
    torch.testing.assert_close(rows.total(), rows.dense().sum(dim=1))


@settings(deadline=None, max_examples=60)
@given(patch_rows(), st.integers(1, 3))
def test_a_sum_is_the_gram_of_all_rows(rows: PatchRows, times: int) -> None:
    added = GramSum()
    for i in range(times):
        added.add(replace(rows, x=rows.x * (i + 1)))
    factor = sum((i + 1) ** 2 for i in range(times))
    torch.testing.assert_close(
        added.gram(), brute_force(rows) * factor, atol=1e-11 * energy(rows), rtol=1e-11
    )
    assert added.shape == (rows.shape[0], rows.shape[1] * times, rows.shape[2])


LAYERS = {
    "stem": (3, 32, 3, 1),
    "stage 1": (20, 32, 3, 1),
    "stage 2, first": (20, 32, 3, 2),
    "stage 2, shortcut": (20, 32, 1, 2),
    "stage 2": (40, 16, 3, 1),
    "stage 3, first": (40, 16, 3, 2),
    "stage 3": (80, 8, 3, 1),
    "stage 4, first": (80, 8, 3, 2),
    "stage 4": (160, 4, 3, 1),
    "4x4 after another stride": (160, 2, 3, 1),
    "1x1 map": (160, 1, 3, 1),
}


@pytest.mark.parametrize(("channels", "size", "kernel", "stride"), LAYERS.values(), ids=LAYERS)
def test_slim_resnet_layers_are_within_1e_5_of_float64(
    channels: int, size: int, kernel: int, stride: int
) -> None:
    """The chosen path on inputs as after a ReLU, against brute force in float64."""
    x = random(20, channels, size, size, dtype=torch.float32).relu()
    x = x.contiguous(memory_format=torch.channels_last)
    padding = ((kernel // 2,) * 2,) * 2
    rows = PatchRows(x, (kernel,) * 2, (stride,) * 2, (1, 1), 1, padding)
    expected = brute_force(replace(rows, x=x.double()))
    relative = (rows.gram() - expected).norm() / expected.norm()
    assert relative < 1e-6
    scale = expected.diagonal(dim1=1, dim2=2).sqrt()
    bound = 1e-5 * scale[:, :, None] * scale[:, None, :]
    assert ((rows.gram() - expected).abs() <= bound).all()


def test_large_convolutions_do_not_unfold() -> None:
    x = torch.randn(100, 20, 32, 32)
    rows = PatchRows(x, (3, 3), (1, 1), (1, 1), 1, ((1, 1), (1, 1)))
    assert rows.path == "spectrum"
    assert replace(rows, stride=(2, 2)).path == "spectrum"
    assert replace(rows, kernel=(32, 32), padding=()).path == "patches"


def test_a_channel_much_larger_than_another_does_not_drown_it() -> None:
    """Errors of an entry are relative to its own two channels, not to the whole matrix."""
    x = random(8, 2, 16, 16, dtype=torch.float32)
    x[:, 0] *= 1e5
    rows = PatchRows(x, (3, 3), (1, 1), (1, 1), 1, ((1, 1), (1, 1)))
    expected = brute_force(rows)
    for path in paths(rows):
        small = (rows.gram_by(path) - expected)[0, 9:, 9:]
        assert small.abs().max() / expected[0, 9:, 9:].max() < 1e-5, path


def test_patches_larger_than_the_limit_are_unfolded_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = PatchRows(random(7, 2, 6, 6), (3, 3), (1, 1), (1, 1), 1)
    monkeypatch.setattr("proxreplay.proximal.gram.patches.PATCHES_AT_ONCE", 2 * 16 * 18)
    torch.testing.assert_close(rows.gram_by("patches"), brute_force(rows))


def test_spectra_larger_than_the_limit_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = PatchRows(random(2, 6, 7, 5), (3, 3), (1, 1), (1, 1), 3, ((1, 1), (1, 1)))
    for limit in (1, 200, 3000):  # parts of a group, one group, two of three groups
        monkeypatch.setattr("proxreplay.proximal.gram.correlate.CHUNK", limit)
        torch.testing.assert_close(rows.gram_by("spectrum"), brute_force(rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_statistics_of_low_precision_rows_are_float32(dtype: torch.dtype) -> None:
    x = random(3, 4, 6, 6).to(dtype)
    rows = [
        PatchRows(x, (3, 3), (1, 1), (1, 1), 1, ((1, 1), (1, 1))),
        ColumnRows(x),
        DenseRows(x.flatten(2)),
    ]
    for each in rows:
        assert each.gram().dtype == each.total().dtype == torch.float32
        torch.testing.assert_close(
            each.gram(), brute_force(each), check_dtype=False, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 5), (6, 3, 4, 5), (6, 3, 2, 4, 5)], ids=str)
def test_columns_of_channels_are_the_dense_rows(shape: tuple[int, ...]) -> None:
    x, mean, scale = random(*shape), random(3, seed=1), random(3, seed=2)
    if len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    z = (x.transpose(1, -1) - mean) * scale
    for rows, values in ((ColumnRows(x), x), (ColumnRows(x, mean, scale), z.transpose(1, -1))):
        Z = values.transpose(0, 1).reshape(3, -1, 1)
        torch.testing.assert_close(rows.dense(), Z)
        torch.testing.assert_close(rows.gram(), Z.mT @ Z)
        torch.testing.assert_close(rows.total(), Z.sum(dim=1))
        assert rows.shape == Z.shape


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("far", [0.0, 1.0, 7.0, 30.0, 1000.0])
def test_columns_far_from_0_keep_their_precision(far: float, layout: torch.memory_format) -> None:
    """Against float64; a few channels are far away, the shift is near them."""
    mean = far * random(20, seed=1, dtype=torch.float32)
    x = random(100, 20, 16, 16, dtype=torch.float32) + mean[:, None, None]
    rows = ColumnRows(x.contiguous(memory_format=layout), mean + 0.1)
    z = x.double() - (mean + 0.1).double()[:, None, None]
    squares = z.square().sum(dim=(0, 2, 3))
    assert ((rows.gram()[:, 0, 0] - squares).abs() <= 1e-5 * squares).all()
    total = z.sum(dim=(0, 2, 3))
    assert ((rows.total()[:, 0] - total).abs() <= 1e-5 * z.abs().sum(dim=(0, 2, 3))).all()


@pytest.mark.parametrize("d", [5, 383, 384, 801])
def test_a_product_by_halves_is_the_product(d: int) -> None:
    Z = random(2, 6, d)
    torch.testing.assert_close(self_product(Z), Z.mT @ Z)


def test_a_bias_adds_a_column_of_ones() -> None:
    rows = PatchRows(random(2, 3, 5, 5), (3, 3), (1, 1), (1, 1), 1, ((1, 1), (1, 1)))
    Z = torch.cat([rows.dense(), torch.ones(1, rows.shape[1], 1, dtype=torch.float64)], dim=2)
    full = Z.mT @ Z
    torch.testing.assert_close(gram_with_bias(rows), full)
    torch.testing.assert_close(gram_with_bias(GramSum().add(rows)), full)
    torch.testing.assert_close(gram_with_bias(rows, bias=False), full[:, :-1, :-1])
    torch.testing.assert_close(gram_with_bias(rows, weight=False), full[:, -1:, -1:])


def test_a_sum_takes_rows_of_different_sizes_and_kinds() -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1)
    added = GramSum(dtype=torch.float64)
    expected = torch.zeros(1, 27, 27, dtype=torch.float64)
    for size in (5, 8, 5):
        x = random(40, 3, size, size, seed=size, dtype=torch.float32)
        rows = PatchRows(x, conv.kernel_size, conv.stride, conv.dilation, 1, ((1, 1), (1, 1)))
        expected += 2 * brute_force(rows)
        added.add(rows).add(DenseRows(rows.dense()))
    assert added.gram().dtype == torch.float64
    torch.testing.assert_close(added.gram(), expected, rtol=1e-5, atol=1e-2)
    assert added.shape == (1, 2 * 40 * (25 + 64 + 25), 27)


def test_sums_refuse_what_does_not_fit() -> None:
    added = GramSum()
    with pytest.raises(InputError, match="nothing was added"):
        added.gram()
    with pytest.raises(InputError, match="nothing was added"):
        _ = added.shape
    added.add(DenseRows(random(1, 4, 3)), total=False)
    with pytest.raises(InputError, match="total=True"):
        added.total()
    with pytest.raises(InputError, match="2 columns cannot be added to those of 1 groups and 3"):
        added.add(DenseRows(random(1, 4, 2)))


def test_a_sum_leaves_the_first_tensor_alone() -> None:
    rows = DenseRows(random(1, 4, 3))
    added = GramSum().add(rows)
    before = added.gram().clone()
    added.add(rows)
    torch.testing.assert_close(added.gram(), 2 * before)
    torch.testing.assert_close(rows.gram(), before)
